"""Names the weight or gradient that isn't finite, for the message of a run that stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..shards import local
from .master import MasterOptimizer


def first_bad(optimizer: MasterOptimizer, world: int, *, gradients: bool = False) -> str:
    """Returns a part of a message that names the first weight (or gradient) that isn't finite, or "" if all are finite.

    If several ranks have a weight (or gradient) that isn't finite, the message names the lowest of these ranks. Every
    rank has to call this function, because a rank sees only its own shards.
    """
    found = _bad(optimizer, world, gradients=gradients)
    rank, name = next(((rank, names[0]) for rank, names in enumerate(found) if names), (0, ""))
    # Gradients are reduced over all ranks, so any rank may have caused a bad gradient.
    what = f"the gradient of {name}" if gradients else name + (f" on rank {rank}" if len(found) > 1 else "")
    return f"; the first that isn't finite is {what}" if name else ""


def first_overflow(optimizer: MasterOptimizer, world: int) -> str:
    """Returns the name of the parameter whose gradient overflows first in the backward pass, or "" if all gradients are
    finite.

    The backward pass goes from the model's last module to the first, so this is the last of the names. In a pipeline,
    the name is from the last rank. Every rank has to call this function.
    """
    found = [names for names in _bad(optimizer, world, gradients=True) if names]
    return found[-1][-1] if found else ""


def _bad(optimizer: MasterOptimizer, world: int, *, gradients: bool) -> Sequence[list[str]]:
    """Returns the names of the weights (or gradients) of each rank that aren't finite, in the order of the model."""
    named = zip(optimizer.names, optimizer.parameters, strict=True)
    own = [name for name, p in named if _is_bad(optimizer.value(p.grad if gradients else p))]
    found: list[Any] = [own]
    if world > 1:
        found = [[]] * world
        dist.all_gather_object(found, own)
    return found


def _is_bad(value: torch.Tensor | None) -> bool:
    return value is not None and not bool(torch.isfinite(local(value)).all())
