"""Replaces the local functions of an ONNX model by their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns ``model`` with its local functions inlined."""
    if not model.functions:
        return model
    import onnx.inliner

    flat: onnx.ModelProto = onnx.inliner.inline_local_functions(model)
    return flat
