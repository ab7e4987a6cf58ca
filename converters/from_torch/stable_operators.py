"""Operators that torch's exporter writes in a form that overflows where PyTorch doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)`` takes."""
    import torch

    return {torch.ops.aten.log_sigmoid.default: _log_sigmoid, torch.ops.aten.logaddexp.default: _logaddexp}


def _log_sigmoid(x: Any) -> Any:
    """log(1 / (1 + e^-x)) as -softplus(-x): the logarithm of a sigmoid that has become 0 is infinite."""
    from onnxscript import opset18 as op

    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    """log(e^x + e^y) as max(x, y) + softplus(-|x - y|), which nothing overflows; equal infinities, whose difference is
    no number, are what they are."""
    from onnxscript import opset18 as op

    apart: Any = op.Sub(x, y)
    added: Any = op.Softplus(op.Neg(op.Abs(apart)))
    return op.Where(op.IsNaN(apart), op.Add(x, y), op.Add(op.Max(x, y), added))
