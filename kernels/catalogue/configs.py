"""Every shipped configuration: which implementation, which tile, for which dtypes, on which architectures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from accel.kernels.spec import BYTES
from accel.kernels.units import NATIVE

ARCHS = (80, 86, 89, 90, 100, 120)
# The shared memory a block can have, bytes (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# What the product has to become in PTX: warp-level mma, the warpgroup's, or the tensor memory's.
INSTRUCTION = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
# How PTX names the type that is multiplied. kind::f16 of the tensor memory is fp16 and bf16: a descriptor says which.
_OPERAND = {"fp16": "f16", "bf16": "bf16", "int8": "s8", "fp8_e4m3": "e4m3"}
_KIND = {"fp16": "kind::f16", "bf16": "kind::f16", "int8": "kind::i8", "fp8_e4m3": "kind::f8f6f4"}
FIRST_FP8 = 89


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration: tile sizes in elements (``block_k`` in bytes: 128 are 64 fp16 or 128 int8), warps, stages."""

    name: str
    op: str
    kernel: str
    dtypes: tuple[str, ...]
    archs: tuple[int, ...]
    block_m: int
    block_n: int
    block_k_bytes: int
    warps: int
    stages: int
    split_k: int = 1

    def block_k(self, dtype: str) -> int:
        """The tile's K in elements of ``dtype``."""
        return self.block_k_bytes // BYTES[dtype]

    def supports(self, dtype: str, arch: int) -> bool:
        """Whether this configuration is shipped for ``dtype`` on ``arch`` (90 for sm_90)."""
        return dtype in self.dtypes and arch in self.archs and (dtype != "fp8_e4m3" or arch >= FIRST_FP8)


def product(config: Config, dtype: str, arch: int) -> str:
    """The tensor-core instruction and the type of its operands that ``config`` has to become in PTX: ``mma.sync s8``.
    Empty where there is none (fp32, quantization)."""
    if config.op == "quantize_rowwise" or dtype == "fp32":
        return ""
    if config.block_m >= 64:  # rows of a warpgroup's product, and of the tensor memory's
        instruction = INSTRUCTION[arch]
        return f"{instruction} {(_KIND if instruction == 'tcgen05.mma' else _OPERAND)[dtype]}"
    # Of sm_90 and sm_100 the warp's product has no fp8: it is widened to fp16, which holds every fp8 value.
    widened = dtype == "fp8_e4m3" and arch in (90, 100)
    return f"mma.sync {'f16' if widened else _OPERAND[dtype]}"


ALL = ("fp16", "bf16", "int8", "fp8_e4m3")
TMA_ARCHS = (90, 100, 120)
# Eight warps are what a small tile needs for single elements: with four it spills where nothing is a multiple of 16.
CONFIGS: tuple[Config, ...] = (
    Config(name="gemm_128x128", op="gemm", kernel="gemm", dtypes=ALL, archs=ARCHS,
           block_m=128, block_n=128, block_k_bytes=128, warps=8, stages=3),
    Config(name="gemm_64x64", op="gemm", kernel="gemm", dtypes=(*ALL, "fp32"), archs=ARCHS,
           block_m=64, block_n=64, block_k_bytes=64, warps=8, stages=3),
    Config(name="gemm_16x64_split", op="gemm", kernel="gemm", dtypes=ALL, archs=ARCHS,
           block_m=16, block_n=64, block_k_bytes=128, warps=8, stages=4, split_k=8),
    Config(name="gemm_tma_128x128", op="gemm", kernel="gemm_tma", dtypes=ALL, archs=TMA_ARCHS,
           block_m=128, block_n=128, block_k_bytes=128, warps=8, stages=3),
    Config(name="conv2d_128x64", op="conv2d", kernel="conv2d", dtypes=ALL, archs=ARCHS,
           block_m=128, block_n=64, block_k_bytes=64, warps=4, stages=3),
    Config(name="conv2d_64x64", op="conv2d", kernel="conv2d", dtypes=(*ALL, "fp32"), archs=ARCHS,
           block_m=64, block_n=64, block_k_bytes=64, warps=8, stages=3),
    Config(name="quantize_8192", op="quantize_rowwise", kernel="quantize_rowwise", dtypes=("int8", "fp8_e4m3"),
           archs=ARCHS, block_m=1, block_n=1, block_k_bytes=8192, warps=16, stages=1),
)  # fmt: skip


def get(name: str) -> Config:
    """The configuration called ``name``."""
    return next(config for config in CONFIGS if config.name == name)


def shipped() -> Iterator[tuple[Config, str, int]]:
    """Every (configuration, dtype, architecture) there is."""
    for config in CONFIGS:
        for arch in config.archs:
            for dtype in config.dtypes:
                if config.supports(dtype, arch):
                    yield config, dtype, arch


@dataclass(frozen=True, kw_only=True)
class HandWritten:
    """A kernel of ``csrc`` without tensor cores, in every compiled library: name, what it takes, what it does.

    ``tile``: M, N and K as in ``rows``; 16 rows are as many as gemv takes.
    """

    name: str
    op: str
    dtypes: tuple[str, ...]
    tile: tuple[int, int, int]


HAND_WRITTEN: dict[str, HandWritten] = {
    kernel.name: kernel
    for kernel in (
        HandWritten(name="gemv", op="gemm", dtypes=("fp32", "fp16", "bf16"), tile=(16, 1, 0)),
        HandWritten(name="quantize_rowwise", op="quantize_rowwise", dtypes=("int8", "fp8_e4m3"), tile=(1, 0, 0)),
        HandWritten(name="im2col", op="conv2d", dtypes=("fp32", "fp16", "bf16", "int8", "fp8_e4m3"), tile=(0, 0, 0)),
    )
}


def rows() -> list[dict[str, Any]]:
    """What ``accel kernels list`` shows: one row a configuration, with its dtypes and architectures. ``tile``: M and N
    in elements, K in bytes (0: not tiled)."""
    found = []
    for config in CONFIGS:
        row = asdict(config)
        row["implementation"] = "triton"
        row["tile"] = [config.block_m, config.block_n, config.block_k_bytes]
        row["archs"] = [f"sm_{arch}" for arch in config.archs]
        row["dtypes"] = list(config.dtypes)
        found.append(row)
    for native in NATIVE.values():
        unit = native.unit
        found.append(
            {
                "name": native.name,
                "op": "gemm",
                "implementation": "cutlass",
                "dtypes": [unit.dtype],
                "out_dtype": unit.out_dtype,
                "tile": [native.block_m, native.block_n, native.block_k_bytes],
                "archs": list(unit.family.archs),
            }
        )
    for kernel in HAND_WRITTEN.values():
        archs = [f"sm_{arch}" for arch in ARCHS]
        kind = {"implementation": "cuda", "dtypes": list(kernel.dtypes)}
        found.append({"name": kernel.name, "op": kernel.op, **kind, "tile": list(kernel.tile), "archs": archs})
    return found
