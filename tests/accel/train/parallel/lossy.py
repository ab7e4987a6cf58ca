"""What ZeRO++ does to weights and gradients, on one process and in a few lines of its own: the reference of qwZ and
qgZ. Rank r of n holds rows r of ``torch.chunk(parameter, n)``; what it sends is rounded in blocks of 256 of each
parameter to 127 steps of the largest in the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel.train.loop import Trainer


def rounded(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """``tensor`` as everybody gets it from the ranks that hold its rows."""
    found = tensor.clone()
    for rows in found.chunk(ranks):
        flat = rows.view(-1)
        for start in range(0, len(flat), 256):
            block = flat[start : start + 256]
            step = block.abs().max() / 127
            if step > 0:
                block.copy_((block / step).round() * step)
    return found


def make_lossy(trainer: Trainer, *, ranks: int, shards: int, weights: bool, gradients: bool) -> None:
    """Let one process compute what ``ranks`` ranks, ``shards`` of which hold one replica, with qwZ (``weights``) and
    qgZ (``gradients``) compute: its micro-batches are the ranks'."""
    exact = trainer.built.passes.run
    parameters = list(trainer.module.parameters())

    def run(batches: Sequence[Any], forth: float) -> torch.Tensor:
        assert len(batches) == ranks
        kept = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.copy_(rounded(p, shards) if weights else p)
        total = [torch.zeros_like(p) for p in parameters]
        seen = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            seen += exact([batch], forth)
            for p, sum_ in zip(parameters, total, strict=True):
                assert p.grad is not None
                sum_ += rounded(p.grad, shards) if gradients else p.grad
                p.grad = None
        with torch.no_grad():
            for p, old, sum_ in zip(parameters, kept, total, strict=True):
                p.copy_(old)
                p.grad = sum_
        return seen

    trainer.built.passes.run = run  # type: ignore[method-assign]
