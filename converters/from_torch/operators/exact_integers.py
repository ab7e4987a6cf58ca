"""Translates sums, products, extremes and signs of int64.

ONNX Runtime sums and multiplies the elements of int64 as float64, which is exact only up to 2^53, and compares only 32
bits in Max, Min, Clip, Sign, ReduceMax and ReduceMin. Its Less, Greater, ArgMax, ArgMin, Add and Mul are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .opset import ints, operators

# The number of values of one half of an int64. Sums of halves are exact in float64 up to 2^21 elements.
_HALF = 2**32
# The types whose sums are exact in float64.
_SMALL = ("BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32")


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.maximum.default: _of_two("Greater"),
        aten.minimum.default: _of_two("Less"),
        aten.clamp.default: _clamp,
        aten.clamp.Tensor: _clamp,
        aten.clamp_min.default: _clamp,
        aten.clamp_min.Tensor: _clamp,
        aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
        aten.clamp_max.Tensor: lambda x, most: _clamp(x, None, most),
        aten.relu.default: _relu,
        aten.sign.default: _sign,
        aten.amax.default: _extreme("Max"),
        aten.amin.default: _extreme("Min"),
        aten.max.default: _extreme("Max"),
        aten.min.default: _extreme("Min"),
        aten.max.dim: _extreme_and_place("Max"),
        aten.min.dim: _extreme_and_place("Min"),
        aten.sum.default: _sum_of_all,
        aten.sum.dim_IntList: _sum,
        aten.prod.default: _product_of_all,
        aten.prod.dim_int: _product_along,
        torch.ops.prims.prod.default: _product,
    }


def _is_int64(x: Any) -> bool:
    import onnx_ir as ir

    return bool(x.dtype == ir.DataType.INT64)


def _core(name: str) -> Callable[..., Any]:
    """Returns the exporter's own translation, which is right for all types except int64."""
    from onnxscript.function_libs.torch_lib.ops import core, nn

    found: Callable[..., Any] = getattr(core, name, None) or getattr(nn, name)
    return found


def _of_two(comparison: str) -> Callable[..., Any]:
    def translated(x: Any, y: Any) -> Any:
        if not _is_int64(x):
            return _core("aten_maximum" if comparison == "Greater" else "aten_minimum")(x, y)
        return _chosen(comparison, x, y)

    return translated


def _chosen(comparison: str, x: Any, y: Any) -> Any:
    op = operators()
    return op.Where(getattr(op, comparison)(x, y), x, y)


def _clamp(x: Any, least: Any = None, most: Any = None) -> Any:
    """Clamps to bounds that are numbers or tensors. If the lower bound is above the upper bound, the upper bound
    counts."""
    op = operators()
    if not _is_int64(x):
        tensors = any(one is not None and not isinstance(one, int | float) for one in (least, most))
        return _core("aten_clamp_tensor" if tensors else "aten_clamp")(x, least, most)
    for comparison, bound in (("Greater", least), ("Less", most)):
        if bound is not None:
            x = _chosen(
                comparison, x, op.Constant(value_int=bound) if isinstance(bound, int) else op.CastLike(bound, x)
            )
    return x


def _relu(x: Any) -> Any:
    op = operators()
    if not x.dtype.is_integer():
        return op.Relu(x)
    zero = op.CastLike(op.Constant(value_int=0), x)  # ONNX Runtime's Relu takes int32 and int8 alone
    return op.Where(op.Greater(x, zero), x, zero)


def _sign(x: Any) -> Any:
    op = operators()
    if not _is_int64(x):
        return _core("aten_sign")(x)
    zero = op.Constant(value_int=0)
    return op.Sub(op.Cast(op.Greater(x, zero), to=7), op.Cast(op.Less(x, zero), to=7))


def _extreme(name: str) -> Callable[..., Any]:
    """Returns the translation of ``amax`` or ``amin``, and of ``max`` or ``min`` of all elements."""

    def translated(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Any:
        op = operators()
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        if not x.shape:
            return op.Identity(x)
        if not _is_int64(x):  # the exporter's own translation of amax requires dims
            reduce = getattr(op, f"Reduce{name}")
            return reduce(x, ints(*dims), keepdims=int(keepdim)) if dims else reduce(x, keepdims=int(keepdim))
        rank = len(x.shape)
        for axis in dims or range(rank):
            x, _ = _extreme_along(name, x, axis)
        return x if keepdim else op.Squeeze(x, ints(*(dims or range(rank))))

    return translated


def _extreme_and_place(name: str) -> Callable[..., Any]:
    """Returns the translation of ``max`` or ``min`` along a dim, with the index."""

    def translated(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        op = operators()
        if not _is_int64(x) or not x.shape:
            found: tuple[Any, Any] = _core(f"aten_{name.lower()}_dim")(x, dim, keepdim)
            return found
        value, place = _extreme_along(name, x, dim)
        return (value, place) if keepdim else (op.Squeeze(value, ints(dim)), op.Squeeze(place, ints(dim)))

    return translated


def _extreme_along(name: str, x: Any, axis: int) -> tuple[Any, Any]:
    """Returns the extreme along an axis and its index. Keeps the axis with the size 1."""
    op = operators()
    place = getattr(op, f"Arg{name}")(x, axis=axis, keepdims=1)
    return op.GatherElements(x, place, axis=axis), place


def _sum_of_all(x: Any, *, dtype: int = -1) -> Any:
    return _sum(x, None, False, dtype=dtype)


def _sum(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: int = -1) -> Any:
    """Computes the sum. For int64, it is the sum of the upper halves times 2^32, plus the sum of the lower halves."""
    op = operators()
    if not x.shape or not _is_int64(x) or dtype not in (-1, None, 7) or _is_small(x):
        return _core("aten_sum_dim_IntList")(x, dim or None, keepdim, dtype)
    axes = [] if not dim and dim != 0 else [ints(*([dim] if isinstance(dim, int) else dim))]
    half = op.Constant(value_int=_HALF)
    upper = op.Div(x, half)
    lower = op.Sub(x, op.Mul(upper, half))
    upper, lower = (op.ReduceSum(one, *axes, keepdims=int(keepdim)) for one in (upper, lower))
    return op.Add(op.Mul(upper, half), lower)


def _is_small(x: Any) -> bool:
    """Tells whether the values of ``x`` come from a type whose sums are exact, such as a mask's bool."""
    producer = x.producer()
    if producer is None or producer.op_type != "Cast":
        return False
    dtype = producer.inputs[0].dtype
    return dtype is not None and dtype.name in _SMALL


def _product_of_all(x: Any, *, dtype: int = -1) -> Any:
    return _product(x, None, dtype)


def _product_along(x: Any, dim: int, keepdim: bool = False, *, dtype: int = -1) -> Any:
    found = _product(x, [dim], dtype)
    return operators().Unsqueeze(found, ints(dim)) if keepdim and x.shape else found


def _product(x: Any, dims: Sequence[int] | None, dtype: int = -1) -> Any:
    """Computes a product over dims. PyTorch also uses this operator to compute ``cumprod``. The product of integers is
    scattered into ones, because ScatterElements multiplies exactly."""
    op = operators()
    if not x.shape:
        return op.Identity(x) if dtype in (-1, None) else op.Cast(x, to=dtype)
    if not x.dtype.is_integer() or dtype not in (-1, None, 7):
        found = op.ReduceProd(x, keepdims=0) if dims is None else op.ReduceProd(x, ints(*dims), keepdims=0)
        return found if dtype in (-1, None) else op.Cast(found, to=dtype)
    wide, rank = op.Cast(x, to=7), len(x.shape)
    axes = [axis % rank for axis in (range(rank) if dims is None else dims)]
    zero, one = _numbers(0), _numbers(1)
    for axis in axes:
        shape = op.Shape(wide)
        sizes = [op.Slice(shape, ints(at), ints(at + 1)) if at != axis else ints(1) for at in range(rank)]
        start = op.ConstantOfShape(op.Concat(*sizes, axis=0), value=one)
        wide = op.ScatterElements(start, op.ConstantOfShape(shape, value=zero), wide, axis=axis, reduction="mul")
    return op.Squeeze(wide, ints(*axes))


def _numbers(value: int) -> Any:
    import onnx_ir as ir

    return ir.tensor([value], dtype=ir.DataType.INT64)
