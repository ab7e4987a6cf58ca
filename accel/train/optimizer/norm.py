"""Computes this rank's share of the norm of all gradients, and scales the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..shards import local


@torch.no_grad()
def share_of_squares(
    parameters: Iterable[nn.Parameter], rank: int, ranks: int, known: Mapping[int, torch.Tensor] | None = None
) -> torch.Tensor:
    """Returns this rank's share of the squares of all gradients, as a float64 scalar.

    The sum of all ranks' shares is the square of the gradients' 2-norm, and isn't finite if a gradient isn't finite.
    ``ranks`` ranks hold these gradients, and this is number ``rank`` of them. They hold the same plain gradients, so
    each rank reads only its part of the elements. If a DTensor has fewer shards than there are ranks, several ranks
    hold the same shard, and each counts a part of its squares. ``known`` has the norms of this rank's shards by number,
    if the gradients aren't in memory.
    """
    read: dict[float, list[torch.Tensor]] = {}
    for index, gradient in enumerate(p.grad for p in parameters):
        if isinstance(gradient, DTensor):
            mesh, places = gradient.device_mesh, gradient.placements
            shards = math.prod(mesh.size(axis) for axis, place in enumerate(places) if not place.is_replicate())
            read.setdefault(shards / ranks, []).append(gradient.to_local() if known is None else known[index])
        elif gradient is not None:
            size = gradient.numel()
            part = slice(size * rank // ranks, size * (rank + 1) // ranks)
            read.setdefault(1.0, []).append(gradient.flatten()[part])
    shares = []
    for share, tensors in read.items():
        held = [tensor for tensor in tensors if tensor.numel()]  # an empty tensor has no norm in torch
        norms = torch._foreach_norm(held, 2, dtype=torch.float32) if held and known is None else held
        shares += [share * torch.stack(list(norms)).double().square().sum()] if norms else []
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by ``factor``, in place."""
    gradients: list[torch.Tensor] = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
