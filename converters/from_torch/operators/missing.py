"""Gives ONNX translations of operators that torch's exporter leaves out or translates wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .opset import ints, operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.scatter_reduce.two: _scatter_reduce,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.hypot.default: _hypotenuse,
        aten.copysign.Tensor: _with_sign,
        aten.atan2.default: _angle,
        aten.log1p.default: _log_of_one_plus,
        aten.expm1.default: _exp_minus_one,
        aten.signbit.default: _has_sign,
        aten.remainder.Tensor: _remainder,
        aten.remainder.Scalar: _remainder,
        aten.avg_pool2d.default: _averages("aten_avg_pool2d"),
        aten.avg_pool3d.default: _averages("aten_avg_pool3d"),
        aten._cdist_forward.default: _distances,
        aten.fmax.default: _of_numbers("Max"),
        aten.fmin.default: _of_numbers("Min"),
        aten.fft_fftfreq.default: _frequencies(torch.fft.fftfreq),
        aten.fft_rfftfreq.default: _frequencies(torch.fft.rfftfreq),
    }


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


def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Removes the dims in ``dim`` whose size is 1, and keeps the other dims. The exporter's own translation removes all
    dims in ``dim``. ``torch.export`` assumes that the size of a dynamic dim isn't 1."""
    op, rank = operators(), len(x.shape)
    axes = [axis % rank for axis in (dim if isinstance(dim, Sequence) else [dim])] if rank else []
    axes = [axis for axis in axes if x.shape[axis] == 1]
    return op.Squeeze(x, ints(*axes)) if axes else op.Identity(x)


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


def _angle(y: Any, x: Any) -> Any:
    """Computes the angle of (x, y) between -pi and pi. The exporter's own translation ignores the sign of a zero y, and
    is NaN if both are 0."""
    op = operators()

    def number(value: float) -> Any:
        return op.CastLike(op.Constant(value_float=value), x)

    zero, half_turn, quarter = number(0.0), number(math.pi), number(math.pi / 2)
    negative_y, negative_x = _has_sign(y), _has_sign(x)
    sign = op.Where(negative_y, number(-1.0), number(1.0))
    steep, flat = op.Abs(y), op.Abs(x)
    # The smaller divided by the larger can't overflow. Two infinities have the ratio 1, and two zeros 0.
    swap = op.Greater(steep, flat)
    larger, smaller = op.Where(swap, steep, flat), op.Where(swap, flat, steep)
    ratio = op.Where(op.Equal(smaller, larger), number(1.0), op.Div(smaller, larger))
    ratio = op.Where(op.Equal(larger, zero), zero, ratio)
    angle = op.Atan(ratio)
    angle = op.Where(swap, op.Sub(quarter, angle), angle)
    angle = op.Where(negative_x, op.Sub(half_turn, angle), angle)
    angle = op.Mul(angle, sign)
    return op.Where(op.Or(op.IsNaN(x), op.IsNaN(y)), op.Add(x, y), angle)


def _log_of_one_plus(x: Any) -> Any:
    """Computes log(1 + x). Multiplies by x / ((1 + x) - 1), which corrects the rounding of 1 + x (Higham, Accuracy and
    Stability of Numerical Algorithms, section 1.14.1)."""
    op = operators()
    one = op.CastLike(op.Constant(value_float=1.0), x)
    sum_ = op.Add(one, x)
    rounded = op.Sub(sum_, one)
    exact = op.Or(op.Equal(rounded, x), op.IsInf(x))
    corrected = op.Mul(op.Log(sum_), op.Div(x, rounded))
    small = op.Equal(sum_, one)
    return op.Where(small, x, op.Where(exact, op.Log(sum_), corrected))


def _exp_minus_one(x: Any) -> Any:
    """Computes e^x - 1 as 2 sinh(x / 2) e^(x / 2), which loses no digit near 0."""
    op = operators()
    one = op.CastLike(op.Constant(value_float=1.0), x)
    half = op.Mul(x, op.CastLike(op.Constant(value_float=0.5), x))
    # The power series of sinh. Below 1/2, the first term that it leaves out is below the rounding of float32.
    square = op.Mul(half, half)
    series = one
    for divisor in (72.0, 42.0, 20.0, 6.0):
        series = op.Add(one, op.Div(op.Mul(square, series), op.CastLike(op.Constant(value_float=divisor), x)))
    near = op.Mul(op.Mul(x, series), op.Exp(half))
    return op.Where(op.Less(op.Abs(x), one), near, op.Sub(op.Exp(x), one))


def _has_sign(x: Any) -> Any:
    """Tells whether ``x`` is negative, also for -0.0."""
    op = operators()
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    if x.dtype.is_integer():
        return op.Less(x, zero)
    one = op.CastLike(op.Constant(value_float=1.0), x)
    return op.Or(op.Less(x, zero), op.And(op.Equal(x, zero), op.Less(op.Div(one, x), zero)))


def _remainder(x: Any, other: Any) -> Any:
    """Computes the remainder with the sign of ``other``. The exporter's own translation subtracts a multiple of
    ``other``, which loses the digits of a remainder of large floats."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_remainder

    op = operators()
    like = x if hasattr(x, "dtype") else other
    if like.dtype.is_integer():
        return aten_remainder(x, other)
    zero = op.CastLike(op.Constant(value_float=0.0), like)
    if not hasattr(other, "dtype"):
        other = op.CastLike(op.Constant(value_float=float(other)), like)
    rest = op.Mod(x, other, fmod=1)
    other_sign = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(other, zero)))
    return op.Where(other_sign, op.Add(rest, other), rest)


def _averages(name: str) -> Callable[..., Any]:
    """Returns the translation of an average pooling. If its sums are divided by another number than the size of a
    window, the exporter's own translation ignores this number."""

    def translated(x: Any, kernel_size: Sequence[int], *arguments: Any, **named: Any) -> Any:
        from onnxscript.function_libs.torch_lib.ops import nn

        op = operators()
        names = ("stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        given = dict(zip(names, arguments, strict=False)) | named
        divisor = given.pop("divisor_override", None)
        if not divisor:
            return getattr(nn, name)(x, kernel_size, **given)
        if given.get("ceil_mode"):
            raise NotImplementedError("average pooling with ceil_mode and divisor_override")
        found = getattr(nn, name)(x, kernel_size, **given | {"count_include_pad": True})
        sizes = kernel_size if len(kernel_size) > 1 else [*kernel_size] * (2 if name.endswith("2d") else 3)
        return op.Mul(found, op.CastLike(op.Constant(value_float=math.prod(sizes) / divisor), x))

    return translated


def _distances(x: Any, y: Any, p: float, *_: Any) -> Any:
    """Computes the p-norm of the difference of each row of ``x`` and each row of ``y``. The memory is the product of
    both numbers of rows and the number of columns."""
    op = operators()
    last, differences = ints(-1), _differences(x, y)
    if p == 0:
        zero = op.CastLike(op.Constant(value_float=0.0), x)
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(differences, zero)), x), last, keepdims=0)
    if p == 1:
        return op.ReduceSum(differences, last, keepdims=0)
    if p == math.inf:
        return op.ReduceMax(differences, last, keepdims=0)
    if p == 2:
        return op.ReduceL2(differences, last, keepdims=0)
    power, root = (op.CastLike(op.Constant(value_float=value), x) for value in (p, 1 / p))
    return op.Pow(op.ReduceSum(op.Pow(differences, power), last, keepdims=0), root)


def _differences(x: Any, y: Any) -> Any:
    op = operators()
    each, others = op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3))
    return op.Abs(op.Sub(each, others))


def _of_numbers(name: str) -> Callable[..., Any]:
    """Returns the translation of ``fmax`` or ``fmin``, which return the other number if one is NaN."""

    def translated(x: Any, y: Any) -> Any:
        op = operators()
        found = getattr(op, name)(x, y)
        return found if x.dtype.is_integer() else op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, found))

    return translated


def _with_sign(x: Any, y: Any) -> Any:
    """Gives ``x`` the sign of ``y``, also that of -0.0."""
    op = operators()
    zero, one = op.CastLike(op.Constant(value_float=0.0), y), op.CastLike(op.Constant(value_float=1.0), y)
    negative = op.Or(op.Less(y, zero), op.And(op.Equal(y, zero), op.Less(op.Div(one, y), zero)))
    return op.Where(negative, op.Neg(op.Abs(x)), op.Abs(x))


def _frequencies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the translation of ``function``, which is ``torch.fft.fftfreq`` or ``rfftfreq``. PyTorch gives it a
    number for ``n``, and never a size of the graph."""
    import torch

    def translated(n: int, d: float = 1.0, dtype: int = 1, **_: Any) -> Any:
        import onnx_ir as ir

        op = operators()
        return op.Cast(op.Constant(value=ir.tensor(function(n, d, dtype=torch.float64).numpy())), to=dtype)

    return translated
