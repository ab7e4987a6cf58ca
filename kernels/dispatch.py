"""Which implementation a problem gets, and why.

Compute capability and layout decide, then the size; what no kernel takes is computed by the reference, in the same
dtype semantics. The dtype of a problem is never changed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from accel.kernels import reference
from accel.kernels.configs import ARCHS, FIRST_FP8, TMA_ARCHS, Config, get
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import BYTES, ConvSpec, GemmSpec

SMALL_M = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An implementation, its configuration (None: the reference) and the reason it was taken."""

    config: Config | None
    reason: str

    def __str__(self) -> str:
        name = "reference" if self.config is None else f"triton {self.config.name}"
        return f"{name}: {self.reason}"


def family(capability: tuple[int, int]) -> int | None:
    """The architecture whose configurations run on this compute capability; None under 8.0."""
    number = capability[0] * 10 + capability[1]
    fitting = [arch for arch in ARCHS if arch <= number]
    return fitting[-1] if fitting else None


def choose(
    spec: GemmSpec | ConvSpec,
    capability: tuple[int, int] | None,
    *,
    tma_layout: bool = False,
    triton_installed: bool = True,
) -> Choice:
    """The implementation of ``spec`` on a device of this compute capability (None: the CPU).

    ``tma_layout``: ``a`` is (M, K) and ``b`` (N, K) transposed, both dense, both at addresses of a multiple of 16.
    """
    if capability is None:
        return Choice(config=None, reason="the CPU runs the reference")
    if not triton_installed:
        return Choice(config=None, reason='Triton is not installed; run: pip install "accel-toolchain[kernels]"')
    arch = family(capability)
    if arch is None:
        return Choice(config=None, reason=f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    if spec.in_dtype == "fp8_e4m3" and arch < FIRST_FP8:
        return Choice(config=None, reason=f"sm_{arch} has no fp8 products; they begin with sm_89")
    if isinstance(spec, ConvSpec):
        large = spec.gemm.m >= 4096 and spec.gemm.n >= 64 and spec.in_dtype != "fp32"
        name = "conv2d_128x64" if large else "conv2d_64x64"
        return Choice(config=get(name), reason=f"{spec.gemm.m} output pixels x {spec.c_out} channels on sm_{arch}")
    if spec.in_dtype == "fp32":
        return Choice(config=get("gemm_64x64"), reason="fp32 products run on the plain cores, never as tf32")
    if spec.m <= SMALL_M:
        return Choice(config=get("gemm_16x64_split"), reason=f"M = {spec.m} <= {SMALL_M}: K is split over the chip")
    if min(spec.m, spec.n) < 128:
        return Choice(config=get("gemm_64x64"), reason="M or N is below 128")
    if arch in TMA_ARCHS and tma_layout and spec.k * BYTES[spec.in_dtype] % 16 == 0:
        return Choice(config=get("gemm_tma_128x128"), reason=f"sm_{arch}, dense operands with rows of 16 bytes")
    return Choice(config=get("gemm_128x128"), reason=f"sm_{arch}, M and N of at least 128")


def why(spec: GemmSpec | ConvSpec, capability: tuple[int, int] | None, *, tma_layout: bool = False) -> str:
    """One sentence: what would run and why."""
    return str(choose(spec, capability, tma_layout=tma_layout, triton_installed=_has_triton()))


def run_gemm(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """``spec`` by the chosen implementation."""
    config = _choose_for(spec, a, b).config
    if config is None:
        wide = reference.gemm_torch(spec, a, b, operands, compute=torch.float32)
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype])
    from accel.kernels import triton_kernels, triton_launch

    with torch.cuda.device(a.device):
        return triton_launch.run_gemm(spec, a, b, operands, config, triton_kernels)


def run_conv2d(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """``spec`` by the chosen implementation."""
    config = _choose_for(spec, x, weight).config
    if config is None:
        wide = reference.conv2d_torch(spec, x, weight, operands, compute=torch.float32)
        return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype]).contiguous()
    from accel.kernels import triton_kernels, triton_launch

    with torch.cuda.device(x.device):
        return triton_launch.run_conv2d(spec, x, weight, operands, config, triton_kernels)


def run_quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise quantization: Triton on a GPU that has the dtype, else the reference."""
    arch = family(torch.cuda.get_device_capability(x.device)) if x.is_cuda else None
    if arch is None or not _has_triton() or (dtype == "fp8_e4m3" and arch < FIRST_FP8):
        return reference.quantize_rowwise_torch(x, dtype)
    from accel.kernels import triton_kernels, triton_launch

    with torch.cuda.device(x.device):
        return triton_launch.run_quantize(x, dtype, triton_kernels)


def _choose_for(spec: GemmSpec | ConvSpec, a: torch.Tensor, b: torch.Tensor) -> Choice:
    capability = torch.cuda.get_device_capability(a.device) if a.is_cuda else None
    dense = a.is_contiguous() and b.dim() == 2 and b.t().is_contiguous()
    aligned = dense and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
    return choose(spec, capability, tma_layout=aligned, triton_installed=_has_triton())


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
