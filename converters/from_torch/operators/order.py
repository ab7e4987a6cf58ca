"""Translates operators that depend on the order of the elements along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .opset import count_up_to, ints, operators


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
        aten.nanmedian.default: _median_of_numbers,
        aten.nanmedian.dim: _median_of_numbers_along,
        aten.mode.default: _most_frequent,
        aten.cummax.default: _running("GreaterOrEqual"),
        aten.cummin.default: _running("LessOrEqual"),
        aten.logcumsumexp.default: _running_log_of_sum,
    }


def _median(x: Any) -> Any:
    """Computes the median of all elements. If two elements are in the middle, returns the lower element."""
    op = operators()

    values, _ = _median_along(op.Reshape(x, ints(-1)), 0)
    return values


def _median_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """Computes the median along a dim, and the median's index. If two elements are in the middle, returns the lower
    element."""
    op = operators()

    size = op.Shape(x, start=dim, end=dim + 1 or None)
    half = op.Div(op.Add(size, ints(1)), ints(2))
    return _smallest(x, half, dim, keepdim)


def _median_of_numbers(x: Any) -> Any:
    """Computes the median of all elements except NaN."""
    op = operators()

    flat = op.Reshape(x, ints(-1))
    values, _ = _median_along(flat, 0) if x.dtype.is_integer() else _middle_number(flat, 0, keepdim=False)
    return values


def _median_of_numbers_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """Computes the median along a dim except NaN, and the median's index."""
    return _median_along(x, dim, keepdim) if x.dtype.is_integer() else _middle_number(x, dim, keepdim)


def _middle_number(x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Computes the median of floats along a dim except NaN. Returns NaN if all elements are NaN. Puts infinity in the
    place of NaN, so that TopK sorts it to the end."""
    op = operators()
    axes, one = ints(dim), op.Constant(value_int=1)
    size = op.Shape(x, start=dim, end=dim + 1 or None)
    missing = op.IsNaN(x)
    count = op.ReduceSum(op.Cast(op.Not(missing), to=7), axes, keepdims=1)
    sorted_, indices = op.TopK(
        op.Where(missing, op.CastLike(op.Constant(value_float=float("inf")), x), x), size, axis=dim, largest=0, sorted=1
    )
    place = op.Max(op.Div(op.Sub(count, one), op.Constant(value_int=2)), op.Constant(value_int=0))
    values, index = op.GatherElements(sorted_, place, axis=dim), op.GatherElements(indices, place, axis=dim)
    nothing = op.CastLike(op.Constant(value_float=float("nan")), x)
    values = op.Where(op.Less(count, one), nothing, values)
    return (values, index) if keepdim else (op.Squeeze(values, axes), op.Squeeze(index, axes))


def _most_frequent(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Finds the most frequent value along a dim, and its last index. Of equally frequent values, takes the smallest.
    Compares each element with each other, so the memory is the square of the size."""
    op = operators()
    last = ints(-1)
    elements = _dim_last(x, dim)
    equal = op.Equal(op.Unsqueeze(elements, last), op.Unsqueeze(elements, ints(-2)))
    counts = op.ReduceSum(op.Cast(equal, to=7), last, keepdims=0)
    often = op.Equal(counts, op.ReduceMax(counts, last, keepdims=1))
    ordered, order = op.TopK(elements, op.Shape(elements, start=-1), axis=-1, largest=0, sorted=1)
    first = op.ArgMax(op.Cast(op.GatherElements(often, order, axis=-1), to=7), axis=-1, keepdims=1)
    values = op.GatherElements(ordered, first, axis=-1)
    indices = op.ArgMax(op.Cast(op.Equal(elements, values), to=7), axis=-1, keepdims=1, select_last_index=1)
    found = [_dim_back(one, dim, len(x.shape)) for one in (values, indices)]
    if not keepdim:
        found = [op.Squeeze(one, ints(dim)) for one in found]
    return found[0], found[1]


def _running(comparison: str) -> Callable[..., Any]:
    """Returns the translation of ``cummax`` or ``cummin``, which find the largest or smallest element up to each
    place, and its last index. NaN remains from its place on. Compares each element with each other, so the memory is
    the square of the size."""

    def translated(x: Any, dim: int) -> tuple[Any, Any]:
        op = operators()
        if not x.shape:
            return op.Identity(x), op.Constant(value_int=0)
        last, one_before = ints(-1), ints(-2)
        elements = _dim_last(x, dim)
        numbers = op.Cast(elements, to=6) if x.dtype.is_integer() and x.dtype.bitwidth < 32 else elements
        each, others = op.Unsqueeze(numbers, last), op.Unsqueeze(numbers, one_before)
        places = count_up_to(op.Shape(elements, start=-1))
        at, other = op.Unsqueeze(places, last), op.Unsqueeze(places, ints(0))
        # An element is a record if no element before it beats it. The found element is the last record up to a place.
        beats = getattr(op, comparison)(each, others)
        if not x.dtype.is_integer():
            beats = op.And(op.Or(beats, op.IsNaN(each)), op.Or(op.Not(op.IsNaN(others)), op.IsNaN(each)))
        record = op.ReduceMin(op.Cast(op.Or(beats, op.Greater(other, at)), to=7), last, keepdims=0)
        marked = op.Sub(op.Mul(record, op.Add(places, op.Constant(value_int=1))), op.Constant(value_int=1))
        earlier = op.Where(op.LessOrEqual(other, at), op.Unsqueeze(marked, one_before), op.Constant(value_int=-1))
        indices = op.ReduceMax(earlier, last, keepdims=0)
        values = op.GatherElements(elements, indices, axis=-1)
        rank = len(x.shape)
        return _dim_back(values, dim, rank), _dim_back(indices, dim, rank)

    return translated


def _running_log_of_sum(x: Any, dim: int) -> Any:
    """Computes log(e^x_0 + ... + e^x_i) for each i, relative to the largest element up to i. The exporter's own
    translation takes the largest of all elements, so a sum of much smaller elements is 0. The memory is the square of
    the size."""
    op = operators()
    if not x.shape:
        return op.Identity(x)
    last = ints(-1)
    elements = _dim_last(x, dim)
    places = count_up_to(op.Shape(elements, start=-1))
    earlier = op.LessOrEqual(op.Unsqueeze(places, ints(0)), op.Unsqueeze(places, last))
    zero, nothing = (op.CastLike(op.Constant(value_float=value), x) for value in (0.0, float("-inf")))
    summed = op.Where(earlier, op.Unsqueeze(elements, ints(-2)), nothing)
    largest = op.ReduceMax(summed, last, keepdims=1)
    largest = op.Where(op.IsInf(largest), zero, largest)
    found = op.Log(op.ReduceSum(op.Exp(op.Sub(summed, largest)), last, keepdims=0))
    return _dim_back(op.Add(found, op.Squeeze(largest, last)), dim, len(x.shape))


def _dim_last(x: Any, dim: int) -> Any:
    """Moves a dim to the end."""
    rank = len(x.shape)
    rest = [axis for axis in range(rank) if axis != dim % rank]
    return operators().Transpose(x, perm=[*rest, dim % rank])


def _dim_back(x: Any, dim: int, rank: int) -> Any:
    """Moves the last dim back to ``dim``."""
    order = list(range(rank - 1))
    order.insert(dim % rank, rank - 1)
    return operators().Transpose(x, perm=order)


def _kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Computes the k-th smallest element along a dim, and the index of the element."""
    return _smallest(x, ints(k), dim, keepdim)


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

    last = ints(-1) if keepdim else op.Constant(value_int=-1)
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
    before_last, last = ints(-2), ints(-1)
    numbers = op.Unsqueeze(sorted_sequence, before_last) if len(sorted_sequence.shape) > 1 else sorted_sequence
    each = op.Unsqueeze(values, last)
    after = op.Greater(numbers, each) if right or side == "right" else op.GreaterOrEqual(numbers, each)
    return op.ReduceSum(op.Cast(op.Not(after), to=6 if out_int32 else 7), last, keepdims=0)  # int32 or int64
