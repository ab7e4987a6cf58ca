"""Gives ONNX translations of operators that torch's exporter leaves out or translates wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .opset import operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.scatter_reduce.two: _scatter_reduce,
        torch.ops.prims.prod.default: _product,
        aten.amax.default: _largest_of_dims,
        aten.amin.default: _smallest_of_dims,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.hypot.default: _hypotenuse,
        aten.copysign.Tensor: _with_sign,
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
