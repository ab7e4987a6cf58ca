"""Translates Python functions that take a number from ``item()``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .opset import operators

_TRIGONOMETRY = ("acos", "asin", "atan", "cos", "cosh", "sin", "sinh", "tan", "tanh")


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    names = {"sqrt": "Sqrt"} | {name: name.capitalize() for name in _TRIGONOMETRY}
    table = {getattr(torch, f"_sym_{name}"): _of_number(operator) for name, operator in names.items()}
    return {**table, getattr(torch, "_sym_log2"): _log2_of_number, round: _rounded_number}  # noqa: B009 - no stub


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
