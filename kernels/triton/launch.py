"""Launches the Triton kernels with tensors. The same code works on a GPU and in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..catalogue.configs import Config, get
from ..catalogue.reference import QMAX, TORCH_DTYPES
from ..catalogue.spec import BYTES, ConvSpec, EpilogueSpec, GemmSpec

GROUP = 8  # Each group of programs computes GROUP rows of tiles.
PARTS_TILE = {"BM": 16, "BN": 64}  # The tile of the kernel that sums the parts of a split-K GEMM.


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def flags(epilogue: EpilogueSpec) -> dict[str, Any]:
    """Returns the compile-time constants of an epilogue."""
    return {
        "ACT": epilogue.act,
        "HAS_BIAS": epilogue.bias,
        "HAS_RESIDUAL": epilogue.residual,
        "HAS_ROW": epilogue.row_scale,
        "HAS_COL": epilogue.col_scale,
    }


def tile(config: Config, dtype: str) -> dict[str, int]:
    """Returns the tile of a configuration as compile-time constants."""
    return {"BM": config.block_m, "BN": config.block_n, "BK": config.block_k(dtype)}


def _settings(spec: GemmSpec | ConvSpec, config: Config, interpreted: bool) -> dict[str, Any]:
    """Returns constants of a launch: the tile, the arithmetic of the dtype, and the warps and stages for the
    compiler."""
    found: dict[str, Any] = {**tile(config, spec.in_dtype), "GROUP": GROUP, "INTEGER": spec.in_dtype == "int8"}
    found["UPCAST"] = interpreted and spec.in_dtype in ("bf16", "fp8_e4m3")
    return found if interpreted else found | {"num_warps": config.warps, "num_stages": config.stages}


def _epilogue_of(operands: dict[str, torch.Tensor], placeholder: torch.Tensor) -> list[torch.Tensor]:
    """Returns every operand that an epilogue can have, as a dense tensor. A missing operand is replaced by
    ``placeholder``, which the kernel doesn't read."""
    names = ("bias", "residual", "row_scale", "col_scale")
    return [operands[name].contiguous() if name in operands else placeholder for name in names]


def run_gemm(
    spec: GemmSpec,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: dict[str, torch.Tensor],
    config: Config,
    kernels: Any,
    *,
    interpreted: bool = False,
) -> torch.Tensor:
    """Computes ``spec`` with the configuration ``config``. ``kernels`` is the module with the Triton source."""
    e = spec.epilogue
    out = torch.empty(spec.m, spec.n, dtype=TORCH_DTYPES[e.out_dtype], device=a.device)
    given = _epilogue_of(operands, a)
    settings = _settings(spec, config, interpreted)
    tiles = cdiv(spec.m, config.block_m) * cdiv(spec.n, config.block_n)
    sizes = (spec.m, spec.n, spec.k)
    if config.kernel == "gemm_tma":
        programs = min(tiles, 2 if interpreted else torch.cuda.get_device_properties(a.device).multi_processor_count)
        if not interpreted:
            _give_scratch(a.device)
        kernels.gemm_tma[(programs,)](a, b.t(), out, *given, *sizes, programs, **flags(e), **settings)
        return out
    split = min(config.split_k, cdiv(spec.k, config.block_k(spec.in_dtype)))
    target = out
    if split > 1:
        partial = torch.int32 if spec.in_dtype == "int8" else torch.float32
        target = torch.empty(split, spec.m, spec.n, dtype=partial, device=a.device)
    strides = (*a.stride(), *b.stride())
    kernels.gemm[(tiles, split)](a, b, target, *given, *sizes, *strides, **flags(e), SPLIT=split, **settings)
    if split > 1:
        grid = (cdiv(spec.m, PARTS_TILE["BM"]), cdiv(spec.n, PARTS_TILE["BN"]))
        kernels.sum_parts[grid](target, out, *given, spec.m, spec.n, **flags(e), **PARTS_TILE, SPLIT=split)
    return out


def run_conv2d(
    spec: ConvSpec,
    x: torch.Tensor,
    weight: torch.Tensor,
    operands: dict[str, torch.Tensor],
    config: Config,
    kernels: Any,
    *,
    interpreted: bool = False,
) -> torch.Tensor:
    """Computes ``spec`` with the configuration ``config``. Takes and returns NHWC."""
    g, e = spec.gemm, spec.epilogue
    x, weight = x.contiguous(), weight.contiguous()
    shape = (spec.images, spec.out_height, spec.out_width, spec.c_out)
    out = torch.empty(shape, dtype=TORCH_DTYPES[e.out_dtype], device=x.device)
    given = _epilogue_of(operands, x)
    settings = _settings(spec, config, interpreted)
    sizes = (g.m, g.n, spec.c_in, spec.height, spec.width, spec.out_height, spec.out_width)
    tiles = cdiv(g.m, config.block_m) * cdiv(g.n, config.block_n)
    kernels.conv2d[(tiles,)](x, weight, out, *given, *sizes, **geometry(spec), **flags(e), **settings)
    return out


def geometry(spec: ConvSpec) -> dict[str, int]:
    """Returns the compile-time constants of a convolution."""
    values = (*spec.kernel, *spec.stride, *spec.padding, *spec.dilation)
    return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW"), values, strict=True))


def run_quantize(x: torch.Tensor, dtype: str, kernels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the rows of ``x`` to ``dtype``. Returns the quantized matrix, and the rows' scales in fp32."""
    q = torch.empty(x.shape, dtype=TORCH_DTYPES[dtype], device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    config = row_config(x.shape[1], dtype)
    constants: dict[str, Any] = {"QMAX": QMAX[dtype], "INTEGER": dtype == "int8", "BK": config.block_k(dtype)}
    kernels.quantize_rowwise[(x.shape[0],)](
        x, q, scale, x.shape[1], *x.stride(), **constants, num_warps=config.warps, num_stages=config.stages
    )
    return q, scale


def row_config(columns: int, dtype: str) -> Config:
    """Returns the configuration whose block holds a row in registers, with at most 16 elements per thread.

    The block has at least 1024 elements, and is at most as large as the largest shipped block.
    """
    largest = get("quantize_8192")
    block = min(max(1 << (columns - 1).bit_length(), 1024), largest.block_k(dtype))
    return replace(largest, block_k_bytes=block * BYTES[dtype], warps=max(4, block // 512))


def _give_scratch(device: torch.device) -> None:
    import triton

    # The GPU builds TMA descriptors in memory that Triton requests from an allocator.
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
