"""Gives the ONNX operators from which the translations are made."""

from __future__ import annotations

from typing import Any


def operators() -> Any:
    """Returns ONNX's operators as onnxscript functions. The return type is Any, because onnxscript's annotations only
    allow tensors whose dtype is known to the type checker."""
    from onnxscript import opset18

    return opset18
