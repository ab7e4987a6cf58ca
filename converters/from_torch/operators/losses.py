"""Translates the cross entropy with smoothed labels or with probabilities, of which torch's exporter makes another
loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .opset import ints, operators

# PyTorch's numbers for the reductions.
_NONE, _MEAN, _SUM = 0, 1, 2


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    return {torch.ops.aten.cross_entropy_loss.default: _cross_entropy}


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Computes ``F.cross_entropy``. The exporter's own translation leaves out ``label_smoothing``, and takes no
    probabilities as ``target``."""
    from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss

    op = operators()
    by_index = target.dtype.is_integer()
    if by_index and not label_smoothing:
        return aten_cross_entropy_loss(x, target, weight, reduction, ignore_index)
    axis = 1 if len(x.shape) > 1 else 0
    classes = op.CastLike(op.Shape(x, start=axis, end=axis + 1), x)
    logs = op.LogSoftmax(x, axis=axis)
    if weight is not None:
        logs = op.Mul(logs, op.Reshape(weight, ints(-1, *[1] * (len(x.shape) - axis - 1))))
    share = op.Div(op.CastLike(op.Constant(value_float=label_smoothing), x), classes)
    rest = op.CastLike(op.Constant(value_float=1 - label_smoothing), x)
    over = ints(axis)
    if not by_index:
        wanted = op.Add(op.Mul(target, rest), share)
        loss = op.Neg(op.ReduceSum(op.Mul(logs, wanted), over, keepdims=0))
        if reduction == _MEAN:
            return op.Div(_total(loss), op.CastLike(op.Size(loss), x))
        return _total(loss) if reduction == _SUM else loss
    ignored = op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target))
    zero, one = op.CastLike(op.Constant(value_float=0.0), x), op.CastLike(op.Constant(value_float=1.0), x)
    spread = op.Where(ignored, zero, op.Neg(op.ReduceSum(logs, over, keepdims=0)))
    if reduction != _NONE:
        spread = _total(spread)
    if reduction == _MEAN:
        rows = op.Where(ignored, op.Sub(target, target), target)
        counted = op.Expand(one, op.Shape(target)) if weight is None else op.Gather(weight, rows)
        spread = op.Div(spread, _total(op.Where(ignored, zero, counted)))
    right = aten_cross_entropy_loss(x, target, weight, reduction, ignore_index)
    return op.Add(op.Mul(right, rest), op.Mul(spread, op.Squeeze(share)))


def _total(x: Any) -> Any:
    return operators().ReduceSum(x, keepdims=0)
