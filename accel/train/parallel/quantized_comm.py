"""Runs FSDP2's collectives in 8 bits, as in ZeRO++: qwZ gathers parameters, and qgZ reduces gradients.

The paper is Wang et al. 2023, "ZeRO++". Values are quantized symmetrically in blocks. Each block has a scale, so an
outlier affects only one block. Each parameter begins a new block, so that large weights of one parameter don't affect
the scale of another parameter.

A gradient is quantized once, exchanged all to all, and summed in float32. A parameter is quantized only once. With hpZ,
the backward pass gathers the values that the forward pass has already rounded. This module quantizes all blocks to
int8, but the paper uses int4 for the reduction between nodes. The error of a value is at most half a quantization step,
which is at most 1/254 of the block's largest value.
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
    """Quantizes 1-D floats to int8 codes [blocks, block] and float32 scales [blocks]. Pads the last block with zeros.

    The scale of a block with NaN or infinity is not finite, so ``dequantize`` returns NaN for the whole block.
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
    """Returns float32 values [..., blocks, block] from int8 codes and scales. A block with a scale of NaN or infinity
    becomes NaN."""
    return codes.to(torch.float32) * torch.where(scales.isfinite(), scales, torch.nan)[..., None]


def encode(values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Quantizes concatenated 1-D parameters to int8 codes and float32 block scales. ``sizes`` are the parameters'
    lengths."""
    parts = [quantize(part) for part in values.split(list(sizes))]
    codes = [codes.view(-1)[:size] for (codes, _), size in zip(parts, sizes, strict=True)]
    return torch.cat(codes), torch.cat([scales for _, scales in parts])


def decode(codes: Tensor, scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns a float32 tensor [rows, values] from the codes and scales that ``encode`` returned for each row."""
    blocks = [-(-size // BLOCK) for size in sizes]
    found = []
    for code, scale, size, count in zip(
        codes.split(list(sizes), 1), scales.split(blocks, 1), sizes, blocks, strict=True
    ):
        padded = code.new_zeros((len(code), count * BLOCK))
        padded[:, :size] = code
        found.append(dequantize(padded.view(len(code), count, BLOCK), scale).flatten(1)[:, :size])
    return torch.cat(found, 1)


class _Comm:
    """The base class of the custom FSDP2 collectives. Subclasses add ``__call__``."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def sizes(self, count: int) -> list[int]:
        """Returns how many of a rank's ``count`` values belong to each parameter.

        If FSDP2 leaves out a parameter without a gradient, the sizes are unknown, and the result is ``[count]``.
        """
        groups = self.module._get_fsdp_state()._fsdp_param_groups
        found = [p._sharded_param_data.numel() for group in groups for p in group.fsdp_params]
        return found if sum(found) == count else [count]


class QuantizedAllGather(_Comm):
    """Gathers parameters in int8. The owner of a shard gets the rounded values too, so all ranks have equal parameters.

    ``shards`` is the number of ranks that the parameters are sharded over.
    """

    def __init__(self, module: FSDPModule, shards: int) -> None:
        super().__init__(module)
        self.shards = shards

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002 - FSDP2's own call
    ) -> None:
        world = dist.get_world_size(group)
        if world != self.shards:  # the shards within a group of hpZ are already rounded
            dist.all_gather_single(output_tensor, input_tensor, group=group)
            return
        sizes = self.sizes(input_tensor.numel())
        codes, scales = encode(input_tensor, sizes)
        all_codes = codes.new_empty(world * len(codes))
        all_scales = scales.new_empty(world * len(scales))
        dist.all_gather_single(all_codes, codes, group=group)
        dist.all_gather_single(all_scales, scales, group=group)
        found = decode(all_codes.view(world, -1), all_scales.view(world, -1), sizes)
        output_tensor.copy_(found.reshape(output_tensor.shape))


class QuantizedReduceScatter(_Comm):
    """Reduces gradients by an all-to-all of int8 blocks and a float32 sum on the rank that keeps the shard."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002 - FSDP2's own call
    ) -> None:
        world = dist.get_world_size(group)
        sizes = self.sizes(output_tensor.numel())
        parts = [encode(part, sizes) for part in input_tensor.reshape(world, -1)]
        codes, scales = (torch.stack(rows) for rows in zip(*parts, strict=True))
        got_codes, got_scales = torch.empty_like(codes), torch.empty_like(scales)
        dist.all_to_all_single(got_codes, codes, group=group)
        dist.all_to_all_single(got_scales, scales, group=group)
        total = decode(got_codes, got_scales, sizes).sum(0)
        if op == dist.ReduceOp.AVG:
            total /= world
        else:
            assert op == dist.ReduceOp.SUM, op  # without a custom divide factor, FSDP2 uses AVG or SUM
        output_tensor.copy_(total.view(output_tensor.shape))


def set_quantized(module: torch.nn.Module, shards: int, *, gather: bool, reduce: bool) -> None:
    """Makes each FSDP2 module inside ``module`` communicate in int8.

    ``shards`` is the number of ranks that parameters are sharded over. With ``gather``, parameters are gathered in
    int8. With ``reduce``, gradients are reduced in int8.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            if gather:
                part.set_custom_all_gather(QuantizedAllGather(part, shards))  # type: ignore[arg-type]
            if reduce:
                part.set_custom_reduce_scatter(QuantizedReduceScatter(part))  # type: ignore[arg-type]
