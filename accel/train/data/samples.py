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

    ``first``: the step to begin with. What doesn't fill the last global batch of an epoch is left out of that epoch, or
    (``drop_last=False``) is a smaller batch, of which some ranks get a sample more than others, or none.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        first: int = 0,
        drop_last: bool = True,
    ) -> None:
        if length < (global_batch if drop_last else 1):
            raise BadData(f"the data has {length} samples, a global batch takes {global_batch}; use a smaller batch")
        self.length, self.global_batch, self.rank, self.ranks = length, global_batch, rank, ranks
        self.seed, self.first = seed, first
        self.epoch = length // global_batch if drop_last else -(-length // global_batch)  # in steps

    def steps(self) -> Iterator[list[int]]:
        """This rank's samples of each step."""
        step = self.first
        order: list[int] = []
        while True:
            epoch, batch = divmod(step, self.epoch)
            if not order or batch == 0:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(self.length, generator=generator).tolist()
            whole = order[batch * self.global_batch : (batch + 1) * self.global_batch]
            start, end = (len(whole) * part // self.ranks for part in (self.rank, self.rank + 1))
            yield whole[start:end]
            step += 1

    def __iter__(self) -> Iterator[int]:
        for samples in self.steps():
            yield from samples


class MicroBatches:
    """An order's steps, each as ``count`` micro-batches of ``size``; where samples run out, smaller and empty ones:
    every rank runs as many, because the others wait for it in their collectives."""

    def __init__(self, order: Order, size: int) -> None:
        self.order, self.size = order, size
        self.count = order.global_batch // (order.ranks * size)

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.order.steps():
            for index in range(self.count):
                yield samples[index * self.size : (index + 1) * self.size]


class _Stack:
    """Samples to a micro-batch ``(inputs, targets)``; of none, the inputs of ``spare`` and no targets."""

    def __init__(self, spare: Sample) -> None:
        self.spare = spare

    def __call__(self, samples: list[Sample]) -> tuple[Any, Any]:
        inputs, targets = torch.utils.data.default_collate(samples or [self.spare])
        return inputs, (targets if samples else None)


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
    drop_last: bool = True,
) -> Any:
    """A StatefulDataLoader over ``data`` for one rank: endless micro-batches ``(inputs, targets)``, stacked; targets
    are None where this rank has no sample of a last, smaller batch left (``drop_last=False``).

    It begins with step ``first``, whatever the number of ranks was before: position is counted in global batches, which
    makes resuming exact on another world size too. Raises ``BadData`` where the data is shorter than a batch.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("torchdata", "train") from error
    order = Order(
        len(data), global_batch=global_batch, rank=rank, ranks=ranks, seed=seed, first=first, drop_last=drop_last
    )
    with warnings.catch_warnings():  # its constructor calls a deprecated function of torch
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return StatefulDataLoader(
            data, batch_sampler=MicroBatches(order, micro_batch), collate_fn=_Stack(data[0]), num_workers=processes
        )
