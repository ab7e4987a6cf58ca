"""Translates operators that depend on the order of the elements along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .opset import operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.median.default: _median,
        aten.median.dim: _median_along,
        aten.kthvalue.default: _kth_value,
        aten.sort.stable: _stable_sort,
        aten.searchsorted.Tensor: _places_in_sorted,
    }


def _median(x: Any) -> Any:
    """Computes the median of all elements. If two elements are in the middle, returns the lower element."""
    op = operators()

    values, _ = _median_along(op.Reshape(x, op.Constant(value_ints=[-1])), 0)
    return values


def _median_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """Computes the median along a dim, and the median's index. If two elements are in the middle, returns the lower
    element."""
    op = operators()

    size = op.Shape(x, start=dim, end=dim + 1 or None)
    half = op.Div(op.Add(size, op.Constant(value_ints=[1])), op.Constant(value_ints=[2]))
    return _smallest(x, half, dim, keepdim)


def _kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Computes the k-th smallest element along a dim, and the index of the element."""
    op = operators()

    return _smallest(x, op.Constant(value_ints=[k]), dim, keepdim)


def _stable_sort(x: Any, dim: int = -1, descending: bool = False, **_: Any) -> tuple[Any, Any]:
    """Sorts along a dim, and returns the indices too. TopK is stable: of equal elements, the one of the lowest index
    comes first (https://onnx.ai/onnx/operators/onnx__TopK.html)."""
    op = operators()

    size = op.Shape(x, start=dim, end=dim + 1 or None)
    values, indices = op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)
    return values, indices


def _smallest(x: Any, k: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Returns the largest of the ``k`` smallest elements along a dim, and the index of the element."""
    op = operators()

    last = op.Constant(value_ints=[-1]) if keepdim else op.Constant(value_int=-1)
    values, indices = op.TopK(x, k, axis=dim, largest=0, sorted=1)
    return op.Gather(values, last, axis=dim), op.Gather(indices, last, axis=dim)


def _places_in_sorted(
    sorted_sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Counts the numbers before each value in a sorted sequence. With ``right``, a number that equals the value is
    before it. NaN comes after all numbers. Compares each value with each number, so the memory is their product."""
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter")
    op = operators()
    before_last, last = op.Constant(value_ints=[-2]), op.Constant(value_ints=[-1])
    numbers = op.Unsqueeze(sorted_sequence, before_last) if len(sorted_sequence.shape) > 1 else sorted_sequence
    each = op.Unsqueeze(values, last)
    after = op.Greater(numbers, each) if right or side == "right" else op.GreaterOrEqual(numbers, each)
    return op.ReduceSum(op.Cast(op.Not(after), to=6 if out_int32 else 7), last, keepdims=0)  # int32 or int64
