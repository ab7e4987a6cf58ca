"""Lists the configurations of kernels that accel ships, each with its tile, its dtypes and its architectures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .spec import BYTES
from .units import NATIVE

ARCHS = (80, 86, 89, 90, 100, 120)
# The maximum shared memory of a thread block in bytes, by architecture (CUDA C++ Programming Guide, table of compute
# capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# The PTX instruction that a matrix product has to compile to, by architecture.
INSTRUCTION = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
# The names of the operand types in PTX. In tcgen05.mma, kind::f16 means fp16 or bf16, and a descriptor selects one of
# these types.
_OPERAND = {"fp16": "f16", "bf16": "bf16", "int8": "s8", "fp8_e4m3": "e4m3"}
_KIND = {"fp16": "kind::f16", "bf16": "kind::f16", "int8": "kind::i8", "fp8_e4m3": "kind::f8f6f4"}
FIRST_FP8 = 89


@dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration of a Triton kernel: its dtypes, architectures, tile, warps and stages.

    ``block_k_bytes`` is the tile's K in bytes. For example, 128 bytes are 64 fp16 numbers or 128 int8 numbers.
    """

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
        """Returns the tile's K in elements of ``dtype``."""
        return self.block_k_bytes // BYTES[dtype]

    def supports(self, dtype: str, arch: int) -> bool:
        """Tells whether this configuration is shipped for ``dtype`` on ``arch`` (90 for sm_90)."""
        return dtype in self.dtypes and arch in self.archs and (dtype != "fp8_e4m3" or arch >= FIRST_FP8)


def product(config: Config, dtype: str, arch: int) -> str:
    """Returns the tensor-core instruction that the PTX of ``config`` must have, with its operand type, such as
    ``mma.sync s8``.

    Returns "" if the kernel uses no tensor cores (fp32, quantization).
    """
    if config.op == "quantize_rowwise" or dtype == "fp32":
        return ""
    if config.block_m >= 64:  # wgmma and tcgen05.mma take at least 64 rows
        instruction = INSTRUCTION[arch]
        return f"{instruction} {(_KIND if instruction == 'tcgen05.mma' else _OPERAND)[dtype]}"
    # On sm_90 and sm_100, mma.sync has no fp8. Kernels with mma.sync widen fp8 to fp16, which represents every fp8
    # value.
    widened = dtype == "fp8_e4m3" and arch in (90, 100)
    return f"mma.sync {'f16' if widened else _OPERAND[dtype]}"


ALL = ("fp16", "bf16", "int8", "fp8_e4m3")
TMA_ARCHS = (90, 100, 120)
# A small tile has eight warps, because it may spill registers with four warps. Registers are spilled if none of the
# operand's sizes is a multiple of 16, because Triton then loads one element at a time.
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
    """Returns the configuration called ``name``."""
    return next(config for config in CONFIGS if config.name == name)


def shipped() -> Iterator[tuple[Config, str, int]]:
    """Yields every shipped combination as (configuration, dtype, architecture)."""
    for config in CONFIGS:
        for arch in config.archs:
            for dtype in config.dtypes:
                if config.supports(dtype, arch):
                    yield config, dtype, arch


@dataclass(frozen=True, kw_only=True)
class HandWritten:
    """A kernel of ``csrc`` that uses no tensor cores. Every compiled library has this kernel.

    ``tile`` has M and N in elements and K in bytes. A dim that is not tiled has size 0. The kernel ``gemv`` takes at
    most as many rows as its tile has.
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
    """Returns the table of ``accel kernels list``: one row per configuration, with its dtypes and architectures.

    ``tile`` has M and N in elements and K in bytes. A dim that is not tiled has size 0.
    """
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
