"""Finds the integer inputs of a model that an operator reads, such as the lengths of an LSTM."""

from __future__ import annotations

from pathlib import Path

from .file import read_without_weights

_PASSED_ON = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def integers_read(path: Path, operator: str) -> tuple[str, ...]:
    """Returns the names of the integer inputs of the model in ``path`` that its nodes of the type ``operator`` read,
    directly or after a cast or a new shape."""
    from onnx import TensorProto

    whole = (TensorProto.INT32, TensorProto.INT64)
    graph = read_without_weights(path).graph
    origin = {v.name: v.name for v in graph.input if v.type.tensor_type.elem_type in whole}
    found: dict[str, None] = {}
    for node in graph.node:
        if node.op_type == operator:
            found |= dict.fromkeys(origin[name] for name in node.input if name in origin)
        if node.op_type in _PASSED_ON and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
    return tuple(found)
