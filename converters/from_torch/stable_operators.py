"""Gives ONNX translations of operators that overflow if torch's own exporter translates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    return {torch.ops.aten.log_sigmoid.default: _log_sigmoid, torch.ops.aten.logaddexp.default: _logaddexp}


def _log_sigmoid(x: Any) -> Any:
    """Computes log(1 / (1 + e^-x)) as -softplus(-x).

    A sigmoid can underflow to 0, and its logarithm is then infinite.
    """
    from onnxscript import opset18 as op

    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    """Computes log(e^x + e^y) as max(x, y) + softplus(-|x - y|), which can't overflow.

    If x and y are the same infinity, x - y is NaN, and the result is x + y.
    """
    from onnxscript import opset18 as op

    apart: Any = op.Sub(x, y)
    added: Any = op.Softplus(op.Neg(op.Abs(apart)))
    return op.Where(op.IsNaN(apart), op.Add(x, y), op.Add(op.Max(x, y), added))
