"""Computes the reference for all kernels: a matrix product and its epilogue in float64, once in numpy and once in
torch.

The torch version is also the implementation for the CPU. On the CPU, the torch version sums products and computes the
epilogue in fp32, as the GPU kernels do. ``gemm_bound`` returns the largest error that tests allow in a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .spec import ConvSpec, EpilogueSpec, GemmSpec

Float64 = npt.NDArray[np.float64]
Operands = Mapping[str, torch.Tensor]

TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
QMAX = {"int8": 127.0, "fp8_e4m3": 448.0}
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32

# ROUNDING has the largest relative rounding error and the smallest step near zero of each output dtype.
ROUNDING = {"fp32": (2.0**-24, 2.0**-149), "fp16": (2.0**-11, 2.0**-24), "bf16": (2.0**-8, 2.0**-133)}
# SLOPE has the largest slope |act'| of each activation, rounded up. The largest slope is 1.129 for GELU (at x = 1.41)
# and 1.0998 for SiLU (at x = 2.40), the points where the second derivative is zero.
SLOPE = {"none": 1.0, "relu": 1.0, "gelu_tanh": 1.13, "gelu_erf": 1.13, "silu": 1.1}


def act_numpy(name: str, x: Float64) -> Float64:
    """Applies the activation ``name`` to ``x`` in float64. GELU follows Hendrycks and Gimpel (2016), by erf or tanh.
    SiLU is x * sigmoid(x)."""
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "gelu_erf":
        erf = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2.0)), dtype=np.float64)
        return 0.5 * x * (1.0 + erf)
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return 0.5 * x * (1.0 + np.tanh(0.5 * x))
    return x


def gemm_numpy(spec: GemmSpec, a: npt.NDArray[Any], b: npt.NDArray[Any], **operands: npt.NDArray[Any]) -> Float64:
    """Computes ``spec`` in float64 from ``a`` (M, K), ``b`` (K, N) and the epilogue's operands.

    Returns a matrix (M, N) that isn't rounded to the output dtype.
    """
    x = a.astype(np.float64) @ b.astype(np.float64)
    return _epilogue_numpy(spec.epilogue, x, operands)


def conv2d_numpy(
    spec: ConvSpec, x: npt.NDArray[Any], weight: npt.NDArray[Any], **operands: npt.NDArray[Any]
) -> Float64:
    """Computes the convolution ``spec`` in float64. Each position in the convolution's kernel gives one matrix product,
    and the products are added. ``x`` is NHWC, and ``weight`` is (O, kh, kw, C).

    Returns (images, out height, out width, O).
    """
    (ph, pw), (sh, sw), (dh, dw) = spec.padding, spec.stride, spec.dilation
    padded = np.pad(x.astype(np.float64), ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    out = np.zeros((spec.images, spec.out_height, spec.out_width, spec.c_out))
    for i in range(spec.kernel[0]):
        for j in range(spec.kernel[1]):
            rows = slice(i * dh, i * dh + (spec.out_height - 1) * sh + 1, sh)
            columns = slice(j * dw, j * dw + (spec.out_width - 1) * sw + 1, sw)
            out += padded[:, rows, columns, :] @ weight[:, i, j, :].astype(np.float64).T
    return _epilogue_numpy(spec.epilogue, out, operands)


def _epilogue_numpy(spec: EpilogueSpec, x: Float64, operands: Mapping[str, npt.NDArray[Any]]) -> Float64:
    if spec.row_scale:
        x = x * operands["row_scale"].astype(np.float64)[:, None]
    if spec.col_scale:
        x = x * operands["col_scale"].astype(np.float64)
    if spec.bias:
        x = x + operands["bias"].astype(np.float64)
    x = act_numpy(spec.act, x)
    return x + operands["residual"].astype(np.float64) if spec.residual else x


def act_torch(name: str, x: torch.Tensor) -> torch.Tensor:
    """Applies the activation ``name`` to ``x``, in the dtype of ``x``."""
    if name == "relu":
        return torch.relu(x)
    if name == "silu":
        return torch.nn.functional.silu(x)
    if name in ("gelu_erf", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return x


def epilogue_torch(spec: EpilogueSpec, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Applies scales, bias, activation and residual to ``x`` (..., N). The result has the dtype of ``x``, and isn't
    rounded to the output dtype."""
    if spec.row_scale:
        x = x * operands["row_scale"].to(x.dtype).unsqueeze(-1)
    if spec.col_scale:
        x = x * operands["col_scale"].to(x.dtype)
    if spec.bias:
        x = x + operands["bias"].to(x.dtype)
    x = act_torch(spec.act, x)
    return x + operands["residual"].to(x.dtype) if spec.residual else x


def accumulate_torch(a: torch.Tensor, b: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Returns ``a @ b`` with sums in the dtype ``compute``. Products of int8 are summed exactly, in float64, and
    rounded once to ``compute``."""
    if a.dtype == torch.int8:
        return (a.double() @ b.double()).to(compute)
    return a.to(compute) @ b.to(compute)


def gemm_torch(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: Operands, *, compute: torch.dtype = torch.float64
) -> torch.Tensor:
    """Computes ``spec`` with sums, epilogue and result (M, N) in the dtype ``compute``."""
    return epilogue_torch(spec.epilogue, accumulate_torch(a, b, compute), operands)


def conv2d_torch(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: Operands, *, compute: torch.dtype = torch.float64
) -> torch.Tensor:
    """Computes ``spec`` with sums, epilogue and result in the dtype ``compute``. ``x`` and the result are NHWC."""
    wide = torch.float64 if x.dtype == torch.int8 else compute
    product = torch.nn.functional.conv2d(
        x.to(wide).permute(0, 3, 1, 2),
        weight.to(wide).permute(0, 3, 1, 2),
        stride=spec.stride,
        padding=spec.padding,
        dilation=spec.dilation,
    )
    return epilogue_torch(spec.epilogue, product.permute(0, 2, 3, 1).to(compute), operands)


def quantize_rowwise_torch(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``x`` (M, K) to ``dtype`` (int8 or fp8_e4m3) with one fp32 scale per row.

    Returns the values q and the scales, so that ``x`` is about q * scale[:, None]. The scale of a row is max|row| / 127
    (int8) or max|row| / 448 (fp8), but at least 2**-126. A row of zeros has scale 1. The values q are x / scale,
    rounded to nearest even and clamped to the range of ``dtype``. Int8 has no NaN, so a NaN in a row makes the row's
    scale NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    # The divisor is a tensor, because PyTorch multiplies by the reciprocal of a number on a GPU, which rounds twice.
    scale = (largest / torch.full_like(largest, QMAX[dtype])).clamp(min=SMALLEST_SCALE)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    ratio = (wide / scale[:, None]).clamp(-QMAX[dtype], QMAX[dtype])
    if dtype == "int8":
        ratio = torch.nan_to_num(torch.round(ratio))
    return ratio.to(TORCH_DTYPES[dtype]), scale


def gemm_bound(
    spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: Operands, *, unit: float = 2.0**-23
) -> torch.Tensor:
    """Returns the largest error that a correct implementation can have, for each element of the output. The result is
    (M, N) in float64.

    A sum of K products, added in any order, has an error of at most K*u*|a|@|b| (Higham, Accuracy and Stability,
    section 3.1). ``unit`` is u. The default of ``unit`` is for tensor cores, which truncate sums. On a CPU, half of the
    default of ``unit`` is enough, because a CPU rounds to nearest. The scales and the bias add four roundings. The
    activation multiplies the error by its slope. The exp or erf in the activation adds an error of 2**-20 times the
    input, because the fast exp of a GPU has this error. Adding the residual and rounding to the output dtype add
    further errors.
    """
    e = spec.epilogue
    magnitude = a.double().abs() @ b.double().abs()
    if e.row_scale:
        magnitude = magnitude * operands["row_scale"].double().abs()[:, None]
    if e.col_scale:
        magnitude = magnitude * operands["col_scale"].double().abs()
    sums = 1 if spec.in_dtype == "int8" else spec.k
    inner = (sums + 4) * unit * magnitude
    if e.bias:
        inner = inner + 4 * unit * (magnitude + operands["bias"].double().abs())
    exact = gemm_torch(spec, a, b, operands)
    before = gemm_torch(
        GemmSpec(m=spec.m, n=spec.n, k=spec.k, in_dtype=spec.in_dtype, epilogue=_linear(e)), a, b, operands
    )
    error = SLOPE[e.act] * inner + (0.0 if e.act in ("none", "relu") else 2.0**-20) * before.abs()
    if e.residual:
        error = error + 2 * unit * (exact.abs() + operands["residual"].double().abs())
    relative, step = ROUNDING[e.out_dtype]
    return error * (1 + relative) + relative * exact.abs() + step


def error_over_bound(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Returns the largest |got - exact| / bound of all elements, or infinity if there is a NaN."""
    ratio = (got.double() - exact).abs() / bound
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def _linear(e: EpilogueSpec) -> EpilogueSpec:
    return EpilogueSpec(bias=e.bias, row_scale=e.row_scale, col_scale=e.col_scale, out_dtype=e.out_dtype)
