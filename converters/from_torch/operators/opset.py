"""Gives the ONNX operators from which the translations are made, and small graphs that several translations use."""

from __future__ import annotations

from typing import Any


def operators() -> Any:
    """Returns ONNX's operators as onnxscript functions. The return type is Any, because onnxscript's annotations only
    allow tensors whose dtype is known to the type checker."""
    from onnxscript import opset18

    return opset18


def ints(*values: int) -> Any:
    """Returns a constant of the shape [len(values)]."""
    return operators().Constant(value_ints=list(values))


def count_up_to(size: Any) -> Any:
    """Returns the numbers 0, 1, ... below a size of the graph, which has the shape [] or [1]."""
    op = operators()
    return op.Range(op.Constant(value_int=0), op.Squeeze(size), op.Constant(value_int=1))
