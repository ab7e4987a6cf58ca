"""Computes the norm of all gradients together, and scales the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter],
    stages: dist.ProcessGroup | None = None,
    known: Mapping[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the 2-norm of all gradients together. The result is a float32 scalar, which is the same on every rank.

    The norm is not finite if any gradient is not finite. PyTorch can't compute one norm over plain tensors and DTensors
    of different meshes (pytorch#180346). Therefore, this function groups the gradients by the ranks that hold their
    shards, and sums the squares of each group over these ranks. ``stages`` is the group of the ranks that hold the
    other pipeline stages. ``known`` has the norms of this rank's shards by number, if the gradients aren't in memory.
    """
    gradients = [(index, p.grad) for index, p in enumerate(parameters) if p.grad is not None]
    total = torch.zeros((), device=gradients[0][1].device if gradients else None)
    layouts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for index, gradient in gradients:
        cut: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            cut = tuple(mesh.get_group(i) for i, place in enumerate(gradient.placements) if not place.is_replicate())
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        layouts.setdefault(cut, []).append(local if known is None else known[index])
    for groups, tensors in layouts.items():
        squares = _squares(tensors, total.device) if known is None else _summed(tensors)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def share_of_squares(parameters: Iterable[nn.Parameter], rank: int, ranks: int) -> torch.Tensor:
    """Cuts the gradients into ``ranks`` parts and returns the sum of the squares of part ``rank`` as a float32 scalar.
    Each rank reads only its part of the gradients. If all ranks hold the same gradients, the sum over all ranks is the
    square of ``gradient_norm``.
    """
    gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
    parts = [g[g.numel() * rank // ranks : g.numel() * (rank + 1) // ranks] for g in gradients]
    device = gradients[0].device if gradients else torch.device("cpu")
    return _squares([part for part in parts if part.numel()], device)


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return _summed(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def _summed(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(norms)).square().sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by ``factor``, in place."""
    gradients: list[torch.Tensor] = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
