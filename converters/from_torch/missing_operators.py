"""Gives ONNX translations of operators that torch's exporter leaves out or translates wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

_TRIGONOMETRY = ("acos", "asin", "atan", "cos", "cosh", "sin", "sinh", "tan", "tanh")


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        aten.scatter_reduce.two: _scatter_reduce,
        aten.median.default: _median,
        aten.median.dim: _median_along,
        aten.kthvalue.default: _kth_value,
        aten.sort.stable: _stable_sort,
        torch.ops.prims.prod.default: _product,
        aten.amax.default: _largest_of_dims,
        aten.amin.default: _smallest_of_dims,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.hypot.default: _hypotenuse,
        aten.copysign.Tensor: _with_sign,
        aten.searchsorted.Tensor: _places_in_sorted,
        aten.fft_fftfreq.default: _frequencies(torch.fft.fftfreq),
        aten.fft_rfftfreq.default: _frequencies(torch.fft.rfftfreq),
    }
    return table | _of_integers() | _of_numbers() | _of_torchvision()


def _of_integers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of operators that the exporter's own translation computes in floats, or doesn't know for
    integers."""
    import torch

    aten = torch.ops.aten
    modes = dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _rounded_division)
    remainders = dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), _signed_remainder)
    rounding = {getattr(aten, name).default: _rounding(name) for name in ("ceil", "floor", "round", "trunc")}
    return {**modes, **remainders, **rounding, aten.floor_divide.default: _floor_division}


def _of_numbers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of Python functions that take a number from ``item()``."""
    import torch

    names = {"sqrt": "Sqrt"} | {name: name.capitalize() for name in _TRIGONOMETRY}
    table = {getattr(torch, f"_sym_{name}"): _of_number(operator) for name, operator in names.items()}
    return {**table, getattr(torch, "_sym_log2"): _log2_of_number, round: _rounded_number}  # noqa: B009 - no stub


def _of_torchvision() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations of the torchvision operators that are registered in this process. If another library
    declares these operators in the place of torchvision, torch's exporter can't translate them."""
    import torch

    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name, translation in (("nms", _nms), ("roi_align", _roi_align)):
        if hasattr(torch.ops.torchvision, name):
            found[getattr(torch.ops.torchvision, name).default] = translation
    return found


def operators() -> Any:
    """Returns ONNX's operators as onnxscript functions. The return type is Any, because onnxscript's annotations only
    allow tensors whose dtype is known to the type checker."""
    from onnxscript import opset18

    return opset18


def _scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """Computes a mean as the sum divided by the count. The exporter's own translation keeps one of the values instead
    of their mean."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_scatter_reduce

    op = operators()
    if reduce != "mean":
        return aten_scatter_reduce(x, index=index, src=src, dim=dim, reduce=reduce, include_self=include_self)
    total = aten_scatter_reduce(x, index=index, src=src, dim=dim, reduce="sum", include_self=include_self)
    one = op.CastLike(op.Constant(value_float=1.0), src)
    own = one if include_self else op.Sub(one, one)
    counts = op.ScatterElements(
        op.Expand(own, op.Shape(x)), index, op.Expand(one, op.Shape(src)), axis=dim, reduction="add"
    )
    return op.Div(total, op.Max(counts, one))


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


def _product(x: Any, dims: Sequence[int] | None, dtype: int = -1) -> Any:
    """Computes a product over dims. PyTorch also uses this operator to compute ``cumprod``."""
    op = operators()

    found = op.ReduceProd(x, keepdims=0) if dims is None else op.ReduceProd(x, list(dims), keepdims=0)
    return found if dtype == -1 else op.Cast(found, to=dtype)


def _largest_of_dims(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Computes the largest element. The exporter's own translation requires ``dim``."""
    op = operators()

    return op.ReduceMax(x, list(dim), keepdims=int(keepdim)) if dim else op.ReduceMax(x, keepdims=int(keepdim))


def _smallest_of_dims(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Computes the smallest element. The exporter's own translation requires ``dim``."""
    op = operators()

    return op.ReduceMin(x, list(dim), keepdims=int(keepdim)) if dim else op.ReduceMin(x, keepdims=int(keepdim))


def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Removes the dims in ``dim`` whose size is 1, and keeps the other dims. The exporter's own translation removes all
    dims in ``dim``. ``torch.export`` assumes that the size of a dynamic dim isn't 1."""
    op, rank = operators(), len(x.shape)
    axes = [axis % rank for axis in (dim if isinstance(dim, Sequence) else [dim])] if rank else []
    axes = [axis for axis in axes if x.shape[axis] == 1]
    return op.Squeeze(x, op.Constant(value_ints=axes)) if axes else op.Identity(x)


def _hypotenuse(x: Any, y: Any) -> Any:
    """Computes sqrt(x^2 + y^2) by the larger of both, so that no square overflows."""
    op = operators()
    x, y = op.Abs(x), op.Abs(y)
    larger, smaller = op.Max(x, y), op.Min(x, y)
    zero, one = op.CastLike(op.Constant(value_float=0.0), x), op.CastLike(op.Constant(value_float=1.0), x)
    ratio = op.Div(smaller, larger)
    found = op.Mul(larger, op.Sqrt(op.Add(op.Mul(ratio, ratio), one)))
    whole = op.Or(op.Equal(larger, zero), op.Equal(op.Div(one, larger), zero))  # the ratio of two zeros is NaN
    return op.Where(whole, larger, found)


def _with_sign(x: Any, y: Any) -> Any:
    """Gives ``x`` the sign of ``y``, also that of -0.0."""
    op = operators()
    zero, one = op.CastLike(op.Constant(value_float=0.0), y), op.CastLike(op.Constant(value_float=1.0), y)
    negative = op.Or(op.Less(y, zero), op.And(op.Equal(y, zero), op.Less(op.Div(one, y), zero)))
    return op.Where(negative, op.Neg(op.Abs(x)), op.Abs(x))


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


def _frequencies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the translation of ``function``, which is ``torch.fft.fftfreq`` or ``rfftfreq``. PyTorch gives it a
    number for ``n``, and never a size of the graph."""
    import torch

    def translated(n: int, d: float = 1.0, dtype: int = 1, **_: Any) -> Any:
        import onnx_ir as ir

        op = operators()
        return op.Cast(op.Constant(value=ir.tensor(function(n, d, dtype=torch.float64).numpy())), to=dtype)

    return translated


def _rounded_division(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """Divides, and rounds towards zero or down. The exporter's own translation divides integers as float32, which is
    exact only up to 2^24."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_div_mode

    if rounding_mode == "floor" and _holds_integers(x, other):
        return _floor_division(x, other)
    if rounding_mode == "trunc" and _holds_integers(x, other):
        x, other, like = _divisible(x, other)
        return operators().Cast(operators().Div(x, other), to=like)
    return aten_div_mode(x, other, rounding_mode)


def _floor_division(x: Any, other: Any) -> Any:
    """Divides and rounds down. The exporter's own translation doesn't take a Python number for ``x``, and divides 8-bit
    integers, which ONNX Runtime doesn't."""
    op = operators()
    if not _holds_integers(x, other):
        return op.Floor(op.Div(x, other))
    x, other, like = _divisible(x, other)
    quotient, zero = op.Div(x, other), op.Sub(other, other)
    rest = op.Sub(x, op.Mul(quotient, other))
    lower = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(other, zero)))
    return op.Cast(op.Sub(quotient, op.CastLike(lower, other)), to=like)


def _signed_remainder(x: Any, other: Any) -> Any:
    """Computes the remainder with the sign of ``x``. ONNX Runtime's Mod computes this remainder of integers as float64,
    which is exact only up to 2^53."""
    op = operators()
    if not _holds_integers(x, other):
        return op.Mod(x, other, fmod=1)
    x, other, like = _divisible(x, other)
    return op.Cast(op.Sub(x, op.Mul(op.Div(x, other), other)), to=like)


def _rounding(name: str) -> Callable[..., Any]:
    """Returns the translation of ``torch.floor`` and the like, which return integers unchanged. ONNX's operators don't
    take integers."""

    def translated(x: Any) -> Any:
        from onnxscript.function_libs.torch_lib.ops.core import aten_trunc

        op = operators()
        if x.dtype.is_integer():
            return op.Identity(x)
        return aten_trunc(x) if name == "trunc" else getattr(op, name.capitalize())(x)

    return translated


def _holds_integers(x: Any, other: Any) -> bool:
    """Tells whether both hold integers. Each is a tensor or a Python number."""
    return all(isinstance(one, int) if isinstance(one, int | float) else one.dtype.is_integer() for one in (x, other))


def _divisible(x: Any, other: Any) -> tuple[Any, Any, int]:
    """Casts both operands to an integer type that ONNX Runtime divides. Returns them and the type of the result."""
    import onnx_ir as ir

    op = operators()
    like = next(one.dtype for one in (x, other) if not isinstance(one, int))
    wide = like if like in (ir.DataType.INT32, ir.DataType.INT64) else ir.DataType.INT64
    found = [
        op.Constant(value=ir.tensor(one, dtype=wide)) if isinstance(one, int) else op.Cast(one, to=wide)
        for one in (x, other)
    ]
    return found[0], found[1], int(like)


def _of_number(operator: str) -> Callable[..., Any]:
    """Returns the translation of a ``math`` function to the ONNX operator ``operator``."""

    def translated(x: Any) -> Any:
        return getattr(operators(), operator)(x)

    return translated


def _log2_of_number(x: Any) -> Any:
    op = operators()

    return op.Div(op.Log(x), op.Constant(value_float=math.log(2)))


def _rounded_number(x: Any, ndigits: int | None = None) -> Any:
    """Computes Python's ``round``, which returns an integer if ``ndigits`` is None."""
    op = operators()

    if ndigits is None:
        return op.Cast(op.Round(x), to=7)  # int64
    scale = op.Constant(value_float=float(10**ndigits))
    return op.Div(op.Round(op.Mul(x, scale)), scale)


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Selects the boxes that overlap no box with a higher score."""
    from onnxscript.function_libs.torch_lib.ops.vision import torchvision_nms

    return torchvision_nms(boxes, scores, iou_threshold)


def _roi_align(
    image: Any,
    boxes: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Any:
    """Averages sampling points inside each cell of each box. In ONNX, a sampling ratio of 0 makes the number of points
    depend on the size of the box."""
    from onnxscript.function_libs.torch_lib.ops.vision import torchvision_roi_align

    return torchvision_roi_align(
        image, boxes, spatial_scale, pooled_height, pooled_width, max(sampling_ratio, 0), aligned
    )
