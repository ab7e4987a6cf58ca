"""The Python face of the kernels: ``fused_gemm``, ``fused_conv2d`` and ``quantize_rowwise``.

They are PyTorch operators (``torch.ops.accel``): differentiable, kept whole by ``torch.compile``, right on the CPU
(the reference, with the GPU's arithmetic) and dispatched on a GPU (``accel.kernels.dispatch``).
"""

from __future__ import annotations

from typing import Any

import torch

from accel.errors import BadFeeds
from accel.kernels import operators

__all__ = ["fused_conv2d", "fused_gemm", "quantize_rowwise"]


def fused_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    act: str = "none",
    residual: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``act(row_scale * col_scale * (a @ b) + bias) + residual``, (M, N) in ``out_dtype``.

    ``a`` (M, K) and ``b`` (K, N), any strides, both float32, float16, bfloat16, int8 or float8_e4m3fn; ``bias`` (N,),
    ``residual`` (M, N), ``row_scale`` (M,) and ``col_scale`` (N,); a scale of one element holds for all.
    ``act`` is none, relu, gelu_tanh, gelu_erf or silu. ``out_dtype`` is that of ``a`` unless given; int8 and float8
    inputs need it. Sums and epilogue are fp32 (int8: int32 sums), the output is rounded once.

    Raises ``BadFeeds`` for operands that don't fit, ``UnknownName`` for an activation that doesn't exist.
    """
    row_scale = _spread(row_scale, a.shape[0] if a.dim() else 1)
    col_scale = _spread(col_scale, b.shape[-1] if b.dim() else 1)
    return operators.fused_gemm(  # type: ignore[no-any-return]
        a, b, bias, residual, row_scale, col_scale, act, out_dtype
    )


def fused_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    act: str = "none",
    residual: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``act(col_scale * conv2d(x, weight) + bias) + residual``, NHWC, in ``out_dtype``.

    ``x`` (N, H, W, C), ``weight`` (O, kernel height, kernel width, C), one group; ``bias`` and ``col_scale`` (O,),
    ``residual`` as the output. dtypes, ``act`` and errors as for ``fused_gemm``.
    """
    geometry = [_pair(*named) for named in (("stride", stride), ("padding", padding), ("dilation", dilation))]
    col_scale = _spread(col_scale, weight.shape[0] if weight.dim() else 1)
    return operators.fused_conv2d(  # type: ignore[no-any-return]
        x, weight, bias, residual, col_scale, *geometry, act, out_dtype
    )


def quantize_rowwise(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` (M, K) as int8 or float8_e4m3fn and the fp32 scale of each row (M,): x is about ``q * scale[:, None]``.

    scale = max|row| / 127 (int8) or / 448 (float8). The two go into ``fused_gemm`` as ``a`` and ``row_scale``.
    Raises ``BadFeeds`` for anything but a float matrix and these two dtypes.
    """
    return operators.quantize_rowwise(x, dtype)  # type: ignore[no-any-return]


def _pair(name: str, value: Any) -> list[int]:
    """(height, width) of a number for both, or of two."""
    found = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(found) != 2 or not all(isinstance(size, int | torch.SymInt) for size in found):
        raise BadFeeds(f"{name} is {value!r}; pass a whole number, or two of them as (height, width)")
    return found


def _spread(scale: torch.Tensor | None, size: int) -> torch.Tensor | None:
    if scale is None or (scale.dim() == 1 and scale.shape[0] == size):
        return scale
    flat = scale.reshape(-1)
    return flat.expand(size) if flat.shape[0] == 1 else flat
