"""Translates divisions and rounding of integers, which torch's exporter computes in floats, or doesn't know for
integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .opset import operators


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    modes = dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _rounded_division)
    remainders = dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), _signed_remainder)
    rounding = {getattr(aten, name).default: _rounding(name) for name in ("ceil", "floor", "round", "trunc")}
    return {**modes, **remainders, **rounding, aten.floor_divide.default: _floor_division}


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
