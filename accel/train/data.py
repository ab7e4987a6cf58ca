"""Samples for each rank, in an order that depends on the seed and the step alone, and resumes where it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel.errors import BadData, MissingExtra

Sample = tuple[Any, Any]


class Order(torch.utils.data.Sampler[int]):
    """The samples of one data-parallel rank: all of an epoch shuffled with (seed, epoch), global batches cut out of it
    in turn, of each batch the rank's own part. So the global batch of a step is the same on any number of ranks.

    ``first``: the step to begin with. What doesn't fill the last global batch of an epoch is left out of that epoch.
    """

    def __init__(self, length: int, *, global_batch: int, rank: int, ranks: int, seed: int, first: int = 0) -> None:
        if length < global_batch:
            raise BadData(f"the data has {length} samples, a global batch takes {global_batch}; use a smaller batch")
        self.length, self.global_batch, self.rank, self.ranks = length, global_batch, rank, ranks
        self.seed, self.first = seed, first

    def __iter__(self) -> Iterator[int]:
        each = self.global_batch // self.ranks
        a_pass = self.length // self.global_batch
        step = self.first
        order: list[int] = []
        while True:
            epoch, batch = divmod(step, a_pass)
            if not order or batch == 0:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(self.length, generator=generator).tolist()
            start = batch * self.global_batch + self.rank * each
            yield from order[start : start + each]
            step += 1


def loader(
    data: Sequence[Sample],
    *,
    global_batch: int,
    micro_batch: int,
    rank: int,
    ranks: int,
    seed: int,
    first: int,
    processes: int,
) -> Any:
    """A StatefulDataLoader over ``data`` for one rank: endless micro-batches ``(inputs, targets)``, stacked.

    It begins with step ``first``, whatever the number of ranks was before: position is counted in global batches, which
    makes resuming exact on another world size too. Raises ``BadData`` where the data is shorter than a batch.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("torchdata", "train") from error
    order = Order(len(data), global_batch=global_batch, rank=rank, ranks=ranks, seed=seed, first=first)
    with warnings.catch_warnings():  # its constructor calls a deprecated function of torch
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return StatefulDataLoader(data, batch_size=micro_batch, sampler=order, num_workers=processes)
