"""Collectives of FSDP2 in 8 bits: qwZ (gather of parameters) and qgZ (reduction of gradients) of ZeRO++.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training": values are quantized
symmetrically in blocks, each with its own scale, so that one outlier spoils its block only. A gradient is quantized
once for the wire, exchanged all to all, and summed in float32; nothing is quantized twice. int8 here (the paper's
reduction uses int4 between nodes): a value is off by at most half a step, 1/254 of the largest in its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

BLOCK = 256
_LEVELS = 127


def quantize(values: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """1-D floats to int8 [blocks, block] (zeros behind the last value) and their float32 scales [blocks].

    A block that holds NaN or infinity has a scale that is not finite: it comes back as NaN, never as a number.
    """
    count = -(-values.numel() // block)
    padded = torch.zeros(count * block, dtype=torch.float32, device=values.device)
    padded[: values.numel()] = values.reshape(-1)
    rows = padded.view(count, block)
    scales = rows.abs().amax(1) / _LEVELS
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = torch.nan_to_num((rows / steps[:, None]).round(), nan=0.0, posinf=0.0, neginf=0.0)
    return codes.clamp_(-_LEVELS, _LEVELS).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., blocks, block] of int8 codes and their scales; NaN where a scale isn't finite."""
    return codes.to(torch.float32) * torch.where(scales.isfinite(), scales, torch.nan)[..., None]


class _Comm:
    """What FSDP2 asks of a collective of one's own, but for the call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class QuantizedAllGather(_Comm):
    """Every rank, the one that owns a shard too, gets the same rounded parameters: replicas stay equal."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002 - FSDP2's own call
    ) -> None:
        world = dist.get_world_size(group)
        codes, scales = quantize(input_tensor)
        all_codes = codes.new_empty((world * len(codes), BLOCK))
        all_scales = scales.new_empty(world * len(scales))
        dist.all_gather_single(all_codes, codes, group=group)
        dist.all_gather_single(all_scales, scales, group=group)
        found = dequantize(all_codes, all_scales).view(world, -1)[:, : input_tensor.numel()]
        output_tensor.copy_(found.reshape(output_tensor.shape))


class QuantizedReduceScatter(_Comm):
    """One all-to-all of int8 blocks, then a sum in float32 on the rank that keeps the shard."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - FSDP2's own call
    ) -> None:
        world = dist.get_world_size(group)
        parts = [quantize(part) for part in input_tensor.reshape(world, -1)]
        codes, scales = (torch.stack(rows) for rows in zip(*parts, strict=True))
        got_codes, got_scales = torch.empty_like(codes), torch.empty_like(scales)
        dist.all_to_all_single(got_codes, codes, group=group)
        dist.all_to_all_single(got_scales, scales, group=group)
        total = dequantize(got_codes, got_scales).sum(0).view(-1)[: output_tensor.numel()]
        if op == dist.ReduceOp.AVG:
            total /= world
        else:
            assert op == dist.ReduceOp.SUM, op  # FSDP2 asks for others with a divide factor of one's own alone
        output_tensor.copy_(total.view(output_tensor.shape))


def set_quantized(module: torch.nn.Module, *, gather: bool, reduce: bool) -> None:
    """Let each FSDP2 module inside ``module`` gather its parameters (``gather``) and reduce its gradients
    (``reduce``) in int8."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            if gather:
                part.set_custom_all_gather(QuantizedAllGather())  # type: ignore[arg-type]
            if reduce:
                part.set_custom_reduce_scatter(QuantizedReduceScatter())  # type: ignore[arg-type]
