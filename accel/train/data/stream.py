"""Trains on an iterable dataset, and resumes at the exact sample.

Every rank reads the whole stream and trains on its part of each global batch, so that the global batch of a step is the
same for any number of ranks. A resumed run reads the samples of its epoch again, up to where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from accel.errors import BadData, kind_of

from .samples import FOR_TRAINING, Sample, Stack, labelled, share

# The number of samples that a stream keeps as examples of its inputs.
_EXAMPLES = 64
_END: Any = object()


class Stream(torch.utils.data.Dataset[Any]):
    """The samples of ``data``, which iterates over an epoch. As a sequence, a stream holds its first samples.

    ``epoch`` and ``taken`` are the position: the number of the epoch, and the number of samples that were taken from
    the epoch. ``batch`` has the numbers of the last batch's samples in the epoch. Random numbers that ``data`` draws
    from torch, NumPy and ``random`` depend only on ``seed`` and the position. If ``data`` has a method ``set_epoch``,
    calls it at the start of each epoch.
    """

    def __init__(self, data: Iterable[Any], name: str, seed: int) -> None:
        self.data, self.name, self.seed = data, name, seed
        self.epoch = self.taken = 0
        self.batch = range(0)
        if iter(data) is data:
            raise BadData(
                f"{name} returned {kind_of(data)} as the data, which can be read only once; return an object whose "
                "__iter__ starts again, such as a torch.utils.data.IterableDataset (docs/how-to/training.md)"
            )
        self.head: list[Sample] = list(islice(self._samples(0), _EXAMPLES))
        rows = bool(self.head) and isinstance(self.head[0][0], Mapping) and "labels" in self.head[0][0]
        self.for_training = FOR_TRAINING if rows else ()

    def __len__(self) -> int:
        return len(self.head)

    def __getitem__(self, index: int) -> Sample:
        return self.head[index]

    def place(self) -> dict[str, int]:
        """Returns the position for a checkpoint."""
        return {"epoch": self.epoch, "taken": self.taken}

    def steps(self, global_batch: int, *, drop_last: bool) -> Iterator[list[Sample]]:
        """Yields the samples of each step over all ranks, in an endless loop from the position on.

        Raises ``BadData`` if a whole epoch doesn't fill a batch.
        """
        while True:
            samples = self._samples(self.epoch)
            for _ in islice(samples, self.taken):
                pass
            while batch := list(islice(samples, global_batch)):
                if len(batch) < global_batch and drop_last:
                    break
                self.batch = range(self.taken, self.taken + len(batch))
                self.taken += len(batch)
                yield batch
            if not self.taken:
                raise BadData(
                    f"an epoch of {self.name} has only {len(batch)} samples, but global_batch is {global_batch}; use a "
                    "smaller global_batch"
                )
            self.epoch, self.taken = self.epoch + 1, 0

    def _samples(self, epoch: int) -> Iterator[Sample]:
        """Yields the samples of ``epoch``. While ``data`` computes a sample, random numbers come from generators of the
        stream's own, because the generators of the run depend on the rank."""
        getattr(self.data, "set_epoch", lambda _: None)(epoch)
        seed = self.seed * 1_000_003 + epoch
        own = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state(), _torch_state(seed))
        samples = None
        while True:
            before = _swapped(own)
            try:
                samples = iter(self.data) if samples is None else samples
                sample = next(samples, _END)
            finally:
                own = _swapped(before)
            if sample is _END:
                return
            yield labelled(sample) if isinstance(sample, Mapping) and "labels" in sample else sample


def _torch_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _swapped(states: tuple[Any, Any, torch.Tensor]) -> tuple[Any, Any, torch.Tensor]:
    """Sets the states of ``random``, NumPy and torch, and returns the states of before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return before


def micro_batches(
    stream: Stream, *, global_batch: int, micro_batch: int, rank: int, ranks: int, drop_last: bool
) -> Iterator[Sample]:
    """Yields the micro-batches ``(inputs, targets)`` of one rank without end, from the stream's position on.

    With ``drop_last=False``, the last batch of an epoch is smaller, and the targets are None on a rank without samples.
    """
    stack = Stack(stream[0])
    for samples in stream.steps(global_batch, drop_last=drop_last):
        own = share(list(zip(stream.batch, samples, strict=True)), rank, ranks)
        for index in range(global_batch // (ranks * micro_batch)):
            yield stack(own[index * micro_batch : (index + 1) * micro_batch])
