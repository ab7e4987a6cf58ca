"""Translates the sum of overlapping windows, of which ``torch.istft`` is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .opset import count_up_to, ints, operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    return {torch.ops.aten.unfold_backward.default: _sum_of_windows}


def _sum_of_windows(windows: Any, input_size: Sequence[Any], dim: int, size: int, step: int) -> Any:
    """Adds windows of ``size`` entries, each of which begins ``step`` entries after the one before.

    ``windows`` has the windows along ``dim``, and their entries along the last dim. PyTorch's decomposition adds one
    window after the other, for a fixed number of windows, at indices of a type that ONNX doesn't take.
    """
    op = operators()
    rank = len(input_size)
    dim %= rank
    others = [axis for axis in range(rank) if axis != dim]
    one = ints(-1)
    length = op.Reshape(op.Constant(value_int=n) if isinstance(n := input_size[dim], int) else n, one)
    count = op.Shape(windows, start=dim, end=dim + 1)
    rows = op.Reshape(
        op.Transpose(windows, perm=[dim, rank, *others]),
        op.Concat(op.Mul(count, ints(size)), ints(-1), axis=0),
    )
    begins = op.Mul(count_up_to(count), op.Constant(value_int=step))
    places = op.Add(op.Unsqueeze(begins, ints(1)), ints(*range(size)))
    width = op.Shape(rows, start=1, end=2)
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), windows), op.Concat(length, width, axis=0))
    added = op.ScatterND(zeros, op.Reshape(places, ints(-1, 1)), rows, reduction="add")
    kept = [op.Shape(windows, start=axis, end=axis + 1) for axis in others]
    found = op.Reshape(added, op.Concat(length, *kept, axis=0))
    order = [0] * rank
    for place, axis in enumerate([dim, *others]):
        order[axis] = place
    return op.Transpose(found, perm=order)
