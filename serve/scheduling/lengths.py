"""Batching of inputs that differ in one dim: short ones are not padded to the length of a long one that came with them.

The waiting requests are sorted by length and cut into batches where the sum of what the batches cost is the least: the
best cut of the first i ends with some batch j..i, so best(i) = min over j of best(j) + cost(rows of j..i, length of i),
which is dynamic programming over O(n * batch) cells. The least sum also is the earliest end of the last batch, so no
other cut of the same requests has a smaller longest wait. An idle instance runs the batch whose oldest request may wait
the shortest, but of those that can't all be in time it puts off what makes the fewest late.

It runs it at once: company comes while instances are busy, and what waits for more of it makes others late. Where
``Scheduling.eager`` is off, a batch goes when one of them would be late if they were run one after the other from then
on: each request is to be run within the delay bound, or answered where that leaves it half of the bound to wait for
company. Before that none goes, unless as many wait as fit into one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadConfig
from accel.serve.batcher import Choice, NotBatched, RowBatching
from accel.serve.cost_table import CostTable
from accel.serve.inference import Code, InferenceRequest, ServeError
from accel.serve.profiles import Shapes
from accel.serve.queue import NEVER, Entry, RequestQueue
from accel.serve.scheduling import LengthBatching, Scheduling
from accel.signature import numpy_dtype

if TYPE_CHECKING:
    from accel.signature import Signature

# How many of the waiting requests are looked at: the queue's lock is held meanwhile.
_WINDOW = 64

# A late request gives way to those that can still be in time, until it has waited for so many delay bounds, or half
# of its own timeout or deadline.
_PATIENCE = 3


def best_cut(
    lengths: Sequence[int], rows: Sequence[int], limit: int, costs: Callable[[int], np.ndarray]
) -> list[tuple[int, int]]:
    """The cheapest cut of requests, sorted by length, into consecutive batches of at most ``limit`` rows.

    ``costs(length)[n]``: what a batch of n rows padded to ``length`` costs. Gives (begin, end) of each batch.
    """
    count = len(lengths)
    ends = np.concatenate([[0], np.cumsum(rows)])
    least = np.zeros(count + 1)
    cut_at = np.zeros(count + 1, dtype=int)
    low = 0
    for i in range(1, count + 1):
        while ends[i] - ends[low] > limit:
            low += 1
        total = least[low:i] + costs(lengths[i - 1])[ends[i] - ends[low:i]]
        best = int(total.argmin())
        least[i] = total[best]
        cut_at[i] = low + best
    found = []
    end = count
    while end:
        found.append((int(cut_at[end]), end))
        end = int(cut_at[end])
    return found[::-1]


class LengthBatchingRows(RowBatching):
    """``RowBatching`` for a signature with one further dim that may differ inside a batch."""

    def __init__(
        self, signature: Signature, scheduling: Scheduling, options: LengthBatching, *, name: str, costs: CostTable
    ) -> None:
        super().__init__(signature, scheduling, name=name)
        self.options = options
        self.costs = costs
        self._axes = {spec.name: _axes(spec.shape, options.dim) for spec in signature.inputs}
        self._cut_axes = {spec.name: _axes(spec.shape, options.dim) for spec in signature.outputs}
        self._cut_axes |= {output: (axis,) for output, axis in options.outputs.items()}
        self._by_length: dict[tuple[int, Any], np.ndarray] = {}

    def admit(self, request: InferenceRequest) -> int:
        rows = super().admit(request)
        sizes = {
            request.inputs[name].shape[axis]
            for name, axes in self._axes.items()
            if name in request.inputs
            for axis in axes
            if axis < request.inputs[name].ndim
        }
        if len(sizes) != 1:
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"the dim '{self.options.dim}' has the sizes {sorted(sizes)} in one request for model '{self.name}'",
            )
        return rows

    def _length(self, request: InferenceRequest) -> int:
        for name, value in request.inputs.items():
            if axes := self._axes.get(name):
                return int(value.shape[axes[0]])
        return 0

    def describe(self, entry: Entry) -> None:
        entry.length = self._length(entry.request)
        key = []
        for name, value in sorted(entry.request.inputs.items()):
            if name != self.options.mask:
                axes = self._axes.get(name, ())
                shape = tuple(-1 if axis in axes else size for axis, size in enumerate(value.shape) if axis)
                key.append((name, value.dtype.str, shape))
        entry.key = tuple(key)

    def choose(self, queue: RequestQueue, now: float, *, hurry: bool = False) -> Choice:
        if not self.options.grouped:
            return super().choose(queue, now, hurry=hurry)
        head = queue.head()
        if head is None:
            return Choice([], NEVER)
        window = max(_WINDOW, 2 * self.limit)
        found = list(islice((entry for entry in queue if entry.key == head.key), window))
        eager = self.scheduling.eager
        # Or company enough has come.
        go = eager or hurry or sum(entry.rows for entry in found) >= self.limit_of(found)
        if not go:
            # No cut costs more than each request by itself: what follows needn't be computed for each that comes.
            soonest = min(map(self.due, found)) - sum(self._seconds([entry]) for entry in found) - self._delay / 2
            if now < soonest:
                return Choice([], soonest)
        batches = sorted(self._batches(found), key=self._urgency)
        if eager:
            return Choice(self._first(batches, now), now)
        latest = now if go else self._latest(batches)
        return Choice(batches[0], now) if now >= latest else Choice([], latest)

    def _first(self, batches: Sequence[list[Entry]], now: float) -> list[Entry]:
        """Which of ``batches``, sorted by urgency, begins under a delay bound. Wherever one of them would begin late,
        what costs most for each of its requests up to there is put off: for batches of one request that leaves the
        fewest late (Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs").
        Only those of the first priority are put off for one another."""
        if not self._delay:
            return batches[0]
        level = self._urgency(batches[0])[0]
        in_time: list[list[Entry]] = []
        end = now
        for batch in batches:
            if self._urgency(batch)[0] != level:
                break
            due = min(map(self.due, batch))
            if due < now:
                if any(now >= self.due(entry, _PATIENCE) for entry in batch):
                    return batch
                continue
            in_time.append(batch)
            if end > due:
                dearest = max(in_time, key=lambda one: self._seconds(one) / len(one))
                in_time.remove(dearest)
                end -= self._seconds(dearest)
            end += self._seconds(batch)
        return in_time[0] if in_time else batches[0]

    def _latest(self, batches: Sequence[Sequence[Entry]]) -> float:
        """When the first of ``batches`` has to begin so that none of them, run in this order, is late."""
        latest, end = NEVER, 0.0
        for batch in batches:
            seconds = self._seconds(batch)
            latest = min(latest, min(map(self.due, batch)) - end - min(seconds, self._delay / 2))
            end += seconds
        return latest

    def _urgency(self, batch: Sequence[Entry]) -> tuple[int, float, int]:
        """What the batch of the most urgent request sorts by."""
        return min((entry.level, self.due(entry), entry.seq) for entry in batch)

    def _seconds(self, batch: Sequence[Entry]) -> float:
        """What it costs to run them together."""
        longest = max(entry.length for entry in batch)
        return float(self._cost(longest, batch[0])[sum(entry.rows for entry in batch)])

    def _batches(self, found: Sequence[Entry]) -> list[list[Entry]]:
        by_length = sorted(found, key=lambda entry: entry.length)
        lengths = [entry.length for entry in by_length]
        rows = [entry.rows for entry in by_length]
        cuts = best_cut(lengths, rows, self.limit, lambda length: self._cost(length, found[0]))
        return [by_length[begin:end] for begin, end in cuts]

    def _cost(self, length: int, one: Entry) -> np.ndarray:
        """By rows, those that fill up an allowed size included, of a batch of requests like ``one``."""
        key = (length, one.key if self._fitting is not None else None)
        found = self._by_length.get(key)
        if found is None:
            costs = self.costs.by_rows(length, self.limit)
            sizes = self.sizes if self._fitting is None else self._fitting.of(self._shapes_at(one, length))
            found = costs[[next((size for size in sizes if size >= n), n) for n in range(self.limit + 1)]]
            if self._fitting is not None:
                found[max(sizes, default=0) + 1 :] = np.inf  # off the profiles: never the cheapest
            if len(self._by_length) < 4096:
                self._by_length[key] = found
        return found

    def _shapes_at(self, one: Entry, length: int) -> Shapes:
        return tuple(
            (
                name,
                tuple(length if axis in self._axes.get(name, ()) else n for axis, n in enumerate(value.shape) if axis),
            )
            for name, value in one.request.inputs.items()
        )

    def sizes_of(self, entries: Sequence[Entry]) -> Sequence[int]:
        """The sizes that the model takes of ``entries``, padded to the longest of them."""
        if self._fitting is None:
            return self.sizes
        return self._fitting.of(self._shapes_at(entries[0], max(self._length(entry.request) for entry in entries)))

    def stack(self, entries: Sequence[Entry]) -> Mapping[str, np.ndarray]:
        rows = sum(entry.rows for entry in entries)
        size = self.size_of(entries)
        feeds = [self._with_mask(entry) for entry in entries]
        if len(entries) == 1 and size == rows:
            return feeds[0]
        length = max(self._length(entry.request) for entry in entries)
        return {name: self._stacked(name, [feed[name] for feed in feeds], size, length) for name in feeds[0]}

    def _with_mask(self, entry: Entry) -> Mapping[str, np.ndarray]:
        """The inputs, and a mask of ones where the model takes one and the caller sent none."""
        inputs, mask = entry.request.inputs, self.options.mask
        if mask is None or mask in inputs:
            return inputs
        spec = self.signature.input(mask)
        length = self._length(entry.request)
        shape = [size if isinstance(size, int) else length if size == self.options.dim else entry.rows
                 for size in spec.shape]  # fmt: skip
        return {**inputs, mask: np.ones(shape, numpy_dtype(spec.dtype))}

    def _stacked(self, name: str, parts: Sequence[np.ndarray], size: int, length: int) -> np.ndarray:
        axes = self._axes.get(name, ())
        first = parts[0]
        shape = [length if axis in axes else n for axis, n in enumerate(first.shape)]
        fill: Any = b"" if first.dtype.hasobject else 0
        whole = np.full([size, *shape[1:]], self.options.pad.get(name, fill), first.dtype)
        row = 0
        for part in parts:
            whole[(slice(row, row + len(part)), *(slice(n) for n in part.shape[1:]))] = part
            row += len(part)
        whole[row:] = whole[row - 1]  # rows that fill up an allowed size
        return whole

    def split(self, outputs: Mapping[str, np.ndarray], entries: Sequence[Entry]) -> list[Mapping[str, np.ndarray]]:
        parts = super().split(outputs, entries)
        if len(entries) == 1:
            return parts
        lengths = [self._length(entry.request) for entry in entries]
        longest = max(lengths)
        for name, value in outputs.items():
            for axis in self._cut_axes.get(name, ()):
                if axis >= value.ndim or value.shape[axis] != longest:
                    raise NotBatched(f"output '{name}' has shape {list(value.shape)}, axis {axis} should be {longest}")
        return [
            {name: value[self._own(name, length)] for name, value in part.items()}
            for part, length in zip(parts, lengths, strict=True)
        ]

    def _own(self, output: str, length: int) -> tuple[slice, ...]:
        axes = self._cut_axes.get(output, ())
        return tuple(slice(length) if axis in axes else slice(None) for axis in range(max(axes, default=-1) + 1))

    def tokens(self, entries: Sequence[Entry]) -> tuple[int, int]:
        lengths = [self._length(entry.request) for entry in entries]
        real = sum(entry.rows * length for entry, length in zip(entries, lengths, strict=True))
        return self.size_of(entries) * max(lengths) - real, real


def _axes(shape: Sequence[int | str], dim: str) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(shape) if size == dim)


def check_lengths(signature: Signature, scheduling: Scheduling, options: LengthBatching, *, name: str) -> None:
    """Raise ``BadConfig`` where length-aware batching can't be done as it says."""
    if not scheduling.dynamic:
        raise BadConfig(f"model '{name}': batching by length needs dynamic batching; set both")
    if options.dim not in signature.dims or options.dim == signature.batch_dim:
        others = ", ".join(dim for dim in signature.dims if dim != signature.batch_dim) or "none"
        raise BadConfig(f"model '{name}': no dim called '{options.dim}' to batch lengths of; there is: {others}")
    inputs = {spec.name: spec for spec in signature.inputs}
    if options.mask is not None:
        if options.mask not in inputs:
            raise BadConfig(f"model '{name}': the mask '{options.mask}' is not one of its inputs")
        for size in inputs[options.mask].shape[1:]:
            if isinstance(size, str) and size != options.dim:
                raise BadConfig(f"model '{name}': the mask {inputs[options.mask]} can't be made; let clients send it")
    for what, names, known in (
        ("padding", options.pad, set(inputs)),
        ("an output", options.outputs, {spec.name for spec in signature.outputs}),
    ):
        for one in names:
            if known and one not in known:
                raise BadConfig(f"model '{name}': {what} is given for '{one}', which it doesn't have")
    if any(axis < 1 for axis in options.outputs.values()):
        raise BadConfig(f"model '{name}': an output is cut back along an axis from 1 on; axis 0 is the batch")
