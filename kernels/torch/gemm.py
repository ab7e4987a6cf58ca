"""Defines ``fused_gemm``, ``fused_conv2d`` and ``quantize_rowwise``, the Python interface of the kernels.

The three functions are PyTorch operators (``torch.ops.accel``), and ``torch.compile`` keeps each call as a single node.
``fused_gemm`` and ``fused_conv2d`` are differentiable. On the CPU, an operator runs the reference implementation with
the GPU's arithmetic. On a GPU, an operator runs the kernel that ``accel.kernels.choose.dispatch`` chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from accel.errors import BadFeeds

from . import operators

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
    """Returns ``act(row_scale * col_scale * (a @ b) + bias) + residual`` with shape (M, N) and dtype ``out_dtype``.

    ``a`` (M, K) and ``b`` (K, N) can have any strides. The dtype of both operands is float32, float16, bfloat16, int8
    or float8_e4m3fn. ``bias`` is (N,), ``residual`` is (M, N), ``row_scale`` is (M,), and ``col_scale`` is (N,). A
    scale of one element applies to all rows or columns.

    ``act`` is none, relu, gelu_tanh, gelu_erf or silu. ``out_dtype`` is the dtype of ``a`` by default, and is required
    for int8 and float8 inputs. Sums are computed in fp32, or in int32 for int8 inputs. The epilogue is computed in
    fp32, and the output is rounded once.

    Raises ``BadFeeds`` for operands that don't match, and ``UnknownName`` for an unknown activation.
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
    """Returns ``act(col_scale * conv2d(x, weight) + bias) + residual`` with layout NHWC and dtype ``out_dtype``.

    ``x`` is (N, H, W, C), and ``weight`` is (O, kernel height, kernel width, C). Grouped convolutions aren't supported.
    ``bias`` and ``col_scale`` are (O,), and ``residual`` has the shape of the output. The dtypes, the activations and
    the errors are the same as in ``fused_gemm``.
    """
    geometry = [_pair(*named) for named in (("stride", stride), ("padding", padding), ("dilation", dilation))]
    col_scale = _spread(col_scale, weight.shape[0] if weight.dim() else 1)
    return operators.fused_conv2d(  # type: ignore[no-any-return]
        x, weight, bias, residual, col_scale, *geometry, act, out_dtype
    )


def quantize_rowwise(x: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``x`` (M, K) to int8 or float8_e4m3fn. Returns the quantized matrix q and the scales of its rows. The
    scales are fp32 with shape (M,).

    ``x`` is about ``q * scale[:, None]``, where scale is max|row| / 127 (int8) or max|row| / 448 (float8).
    ``fused_gemm`` takes q as ``a`` and the scale as ``row_scale``. Raises ``BadFeeds`` for an ``x`` that isn't a float
    matrix, and for an unsupported ``dtype``.
    """
    return operators.quantize_rowwise(x, dtype)  # type: ignore[no-any-return]


def _pair(name: str, value: Any) -> list[int]:
    """Returns (height, width) for a single number or a pair of numbers."""
    found = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(found) != 2 or not all(isinstance(size, int | torch.SymInt) for size in found):
        raise BadFeeds(f"the argument {name} is {value!r}; pass a whole number, or a pair (height, width)")
    return found


def _spread(scale: torch.Tensor | None, size: int) -> torch.Tensor | None:
    if scale is None or (scale.dim() == 1 and scale.shape[0] == size):
        return scale
    flat = scale.reshape(-1)
    return flat.expand(size) if flat.shape[0] == 1 else flat
