"""The samples of each rank. The order of the samples depends only on the seed and the step, so a run resumes
exactly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from accel.child import die_with_parent
from accel.errors import AccelError, BadData, MissingExtra, one_line

from .unlike import unlike

Sample = tuple[Any, Any]
_T = TypeVar("_T")


# The inputs of a sample with labels that a trained model doesn't need.
FOR_TRAINING = ("labels",)


def labelled(row: Mapping[str, Any]) -> Sample:
    """Returns a dict with the entry ``labels`` as a sample ``(inputs, targets)``."""
    inputs = {name: torch.as_tensor(value) for name, value in row.items()}
    return inputs, inputs["labels"]


class Labelled(torch.utils.data.Dataset[Any]):
    """A dataset of ``(inputs, targets)`` from the dicts in ``rows``. ``inputs`` is the whole dict, and ``targets`` is
    its entry ``labels``. A model that gets the labels computes its loss itself."""

    for_training = FOR_TRAINING

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return labelled(self.rows[index])


class Order(torch.utils.data.Sampler[int]):
    """The samples of one data-parallel rank.

    Shuffles all samples of an epoch by (seed, epoch), cuts the epoch into global batches, and divides each batch among
    the ranks. The global batch of a step is therefore the same for any number of ranks.

    ``first`` is the number of the first step. The samples that don't fill the last global batch are left out of the
    epoch. With ``drop_last=False`` the remaining samples form a smaller batch. In a smaller batch, some ranks get fewer
    samples than others, or none.
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
            raise BadData(
                f"the data has only {length} samples, but global_batch is {global_batch}; use a smaller global_batch"
            )
        self.length, self.global_batch, self.rank, self.ranks = length, global_batch, rank, ranks
        self.seed, self.first = seed, first
        self.epoch = length // global_batch if drop_last else -(-length // global_batch)  # in steps

    def steps(self) -> Iterator[Sequence[int]]:
        """Yields this rank's samples of each step, in an endless loop."""
        step = self.first
        order: list[int] = []
        while True:
            epoch, batch = divmod(step, self.epoch)
            if not order or batch == 0:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(self.length, generator=generator).tolist()
            whole = order[batch * self.global_batch : (batch + 1) * self.global_batch]
            yield share(whole, self.rank, self.ranks)
            step += 1

    def __iter__(self) -> Iterator[int]:
        for samples in self.steps():
            yield from samples


def share(whole: Sequence[_T], rank: int, ranks: int) -> Sequence[_T]:
    """Returns the part of a global batch that rank ``rank`` of ``ranks`` trains on."""
    start, end = (len(whole) * part // ranks for part in (rank, rank + 1))
    return whole[start:end]


class MicroBatches:
    """Cuts each step of an ``Order`` into ``count`` micro-batches of ``size`` samples.

    If a step has too few samples, the last micro-batches are smaller or empty. Every rank runs the same number of
    micro-batches, because the ranks wait for each other in their collectives.
    """

    def __init__(self, order: Order, size: int) -> None:
        self.order, self.size = order, size
        self.count = order.global_batch // (order.ranks * size)

    def __iter__(self) -> Iterator[Sequence[int]]:
        for samples in self.order.steps():
            for index in range(self.count):
                yield samples[index * self.size : (index + 1) * self.size]


class Stack:
    """Stacks numbered samples into a micro-batch ``(inputs, targets)``. If there are no samples, returns the inputs of
    ``spare`` and None as the targets. Raises ``BadData`` if the samples can't be stacked."""

    def __init__(self, spare: Sample) -> None:
        self.spare = spare

    def __call__(self, samples: Sequence[tuple[int, Sample]]) -> tuple[Any, Any]:
        try:
            inputs, targets = torch.utils.data.default_collate([sample for _, sample in samples] or [self.spare])
        except Exception as error:  # numpy and torch raise many kinds of errors
            raise BadData(unlike(samples, error)) from error
        return inputs, (targets if samples else None)


class _Numbered(torch.utils.data.Dataset[Any]):
    """The samples of ``data``, each with its number. Raises ``BadData`` if a sample can't be fetched."""

    def __init__(self, data: Sequence[Sample]) -> None:
        self.data = data

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[int, Sample]]:
        several = getattr(self.data, "__getitems__", None)
        if several is not None:
            return list(zip(numbers, several(numbers), strict=True))
        return [(number, self._sample(number)) for number in numbers]

    def _sample(self, number: int) -> Sample:
        try:
            return self.data[number]
        except AccelError:
            raise
        except Exception as error:  # the user's dataset may raise any exception
            raise BadData(
                f"sample {number} can't be fetched ({type(error).__name__}: {one_line(error, 200)}; its traceback is "
                "in ranks.log); correct the sample or the dataset"
            ) from error


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
    """Returns a StatefulDataLoader over ``data`` for one rank. The loader yields micro-batches ``(inputs, targets)``
    without end.

    With ``drop_last=False``, the last batch is smaller, and the targets are None on a rank without samples. The loader
    begins with step ``first``. The loader counts its position in global batches, so resuming is exact at another world
    size too. Raises ``BadData`` if the data has fewer samples than a batch.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("torchdata", "train") from error
    order = Order(
        len(data), global_batch=global_batch, rank=rank, ranks=ranks, seed=seed, first=first, drop_last=drop_last
    )
    with warnings.catch_warnings():  # the constructor calls a deprecated function of torch
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return StatefulDataLoader(
            _Numbered(data),
            batch_sampler=MicroBatches(order, micro_batch),
            collate_fn=Stack(data[0]),
            num_workers=processes,
            worker_init_fn=_end_with_rank,
        )


def _end_with_rank(_: int) -> None:
    """Makes a process of the loader end with its rank. torch would notice the rank's end only after seconds."""
    die_with_parent(os.getppid())
