"""Gives ONNX translations of operators whose translation by torch's own exporter overflows, or replaces infinity by a
large number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .opset import ints, operators

# The axes of the keys of an attention, with the last two swapped.
_SWAPPED = [0, 1, 3, 2]


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.log_sigmoid.default: _log_sigmoid,
        aten.logaddexp.default: _logaddexp,
        aten.scaled_dot_product_attention.default: _attention,
    }


def _log_sigmoid(x: Any) -> Any:
    """Computes log(1 / (1 + e^-x)) as -softplus(-x).

    A sigmoid can underflow to 0, and its logarithm is then infinite.
    """
    op = operators()
    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    """Computes log(e^x + e^y) as max(x, y) + softplus(-|x - y|), which can't overflow.

    If x and y are the same infinity, x - y is NaN, and the result is x + y.
    """
    op = operators()
    apart = op.Sub(x, y)
    added = op.Softplus(op.Neg(op.Abs(apart)))
    return op.Where(op.IsNaN(apart), op.Add(x, y), op.Add(op.Max(x, y), added))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes attention. If a mask excludes all keys of a query, the result for this query is 0, as in PyTorch.

    torch's exporter adds the smallest float32 to the scores of excluded keys. A query without keys would then get the
    mean of all values. To transpose the keys, torch's exporter adds eight nodes that compute shapes.
    """
    import onnx_ir as ir
    from onnxscript.function_libs.torch_lib.ops import nn

    op = operators()

    def attend(mask: Any) -> Any:
        size = query.shape[-1]
        plain = isinstance(size, int) and len(key.shape) == len(_SWAPPED)
        if dropout_p or is_causal or enable_gqa or not plain:
            arguments = (query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
            return nn.aten_scaled_dot_product_attention(*arguments)
        factor = size**-0.5 if scale is None else scale
        root = abs(factor) ** 0.5  # scaling both sides keeps their product small in float16
        signed, root = (op.Constant(value=ir.tensor(n, dtype=query.dtype)) for n in (math.copysign(root, factor), root))
        scores = op.MatMul(op.Mul(query, signed), op.Mul(op.Transpose(key, perm=_SWAPPED), root))
        return op.MatMul(op.Softmax(scores if mask is None else op.Add(scores, mask), axis=-1), value)

    if attn_mask is None or attn_mask.dtype != ir.DataType.BOOL:
        return attend(attn_mask)
    zero, lowest = (op.Constant(value=ir.tensor(number, dtype=query.dtype)) for number in (0.0, float(query.dtype.min)))
    added = op.Where(attn_mask, zero, lowest)
    added.dtype = query.dtype
    last = ints(-1)
    has_key = op.Cast(op.ReduceMax(op.Cast(attn_mask, to=ir.DataType.INT32), last, keepdims=1), to=ir.DataType.BOOL)
    return op.Where(has_key, attend(added), zero)
