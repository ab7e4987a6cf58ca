"""Which implementation a problem gets, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel.kernels import reference
from accel.kernels.reference import TORCH_DTYPES
from accel.kernels.spec import ConvSpec, GemmSpec


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An implementation (its name and configuration) and the reason it was taken."""

    implementation: str
    reason: str


def choose(spec: GemmSpec | ConvSpec, device: torch.device) -> Choice:
    """The implementation ``spec`` gets on ``device``."""
    return Choice(implementation="reference", reason=f"{device.type} runs {type(spec).__name__} by the reference")


def why(spec: GemmSpec | ConvSpec, device: torch.device) -> str:
    """One sentence: what would run and why."""
    choice = choose(spec, device)
    return f"{choice.implementation}: {choice.reason}"


def run_gemm(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """``spec`` by the chosen implementation."""
    wide = reference.gemm_torch(spec, a, b, operands, compute=torch.float32)
    return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype])


def run_conv2d(
    spec: ConvSpec, x: torch.Tensor, weight: torch.Tensor, operands: dict[str, torch.Tensor]
) -> torch.Tensor:
    """``spec`` by the chosen implementation."""
    wide = reference.conv2d_torch(spec, x, weight, operands, compute=torch.float32)
    return wide.to(TORCH_DTYPES[spec.epilogue.out_dtype]).contiguous()


def run_quantize(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise quantization by the chosen implementation."""
    return reference.quantize_rowwise_torch(x, dtype)
