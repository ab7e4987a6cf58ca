"""Computes the rounding of ZeRO++ on one process, independently of accel's implementation. The tests of qwZ and qgZ
compare accel's results with this rounding.

Rank r of n holds chunk r of ``torch.chunk(parameter, n)``. Before a rank sends its rows, the rank rounds the values in
blocks of 256. A rounded value is a multiple of 1/127 of the block's largest absolute value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel.train.loop import Trainer


def rounded(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns ``tensor`` with the rounded values that every rank receives. Each rank rounds its rows before sending
    them."""
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
    """Makes one process round the values in the same way as ``ranks`` ranks. ``weights`` turns on the rounding of qwZ,
    and ``gradients`` turns on the rounding of qgZ. ``shards`` is the number of ranks over which a replica is sharded.
    The process runs one micro-batch for each simulated rank."""
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
