"""Batches inputs that differ in one dim, so that a short input is not padded to the length of a long input.

The waiting requests are sorted by length and cut into the batches with the least total cost. The least cost of the
first i requests is ``best(i) = min over j < i of best(j) + cost(rows of requests j + 1 to i, length of request i)``.
Dynamic programming finds the best cut of n requests in O(n * largest batch size) time. The least total cost makes the
last batch end as early as possible, and so keeps the longest wait as short as possible. An idle instance runs the most
urgent batch. If not all batches can begin in time, the instance postpones batches so that as few requests as possible
are late.

With ``Scheduling.eager``, an idle instance runs a batch at once and doesn't wait for a larger batch. Larger batches
form anyway while all instances are busy. With ``eager``, a request is late if its run begins after the delay bound.

Without ``eager``, an idle instance waits until the requests fill a batch. The instance starts earlier if a request
would otherwise be late. The latest time to start is computed as if all batches ran one after the other. Without
``eager``, a request is late if its answer comes after the delay bound. The requests of a long run (more than half of
the delay bound) are late if the run begins after half of the delay bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadConfig
from accel.signature import numpy_dtype

from ..protocol.inference import Code, InferenceRequest, ServeError
from .batcher import Choice, NotBatched, RowBatching
from .cost_table import CostTable
from .options import LengthBatching, Scheduling
from .profiles import Shapes
from .queue import NEVER, Entry, RequestQueue

if TYPE_CHECKING:
    from accel.signature import Signature

# At most _WINDOW waiting requests are divided into batches at once, because the division holds the queue's lock. If
# twice the largest batch size is above _WINDOW, the limit is twice the largest batch size.
_WINDOW = 64

# Requests that can still be in time run before late requests. A late request still runs first once the request has
# waited for ``_PATIENCE`` times the delay bound, or for half of its timeout or deadline.
_PATIENCE = 3


def best_cut(
    lengths: Sequence[int], rows: Sequence[int], limit: int, costs: Callable[[int], np.ndarray]
) -> list[tuple[int, int]]:
    """Cuts requests, sorted by length, into consecutive batches of at most ``limit`` rows with the least total cost.

    Returns (begin, end) of each batch. ``costs(length)[n]`` is the cost of a batch of n rows padded to ``length``.
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
    """Extends ``RowBatching`` to requests that differ in one dim besides the batch dim."""

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
                f"the dim '{self.options.dim}' has the sizes {sorted(sizes)} in one request for model '{self.name}'; "
                "send a single size",
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
        go = eager or hurry or sum(entry.rows for entry in found) >= self.limit_of(found)
        if not go:
            # Running each request alone takes at least as long as the best batches. While enough time is left to run
            # each request alone, the best batches need not be computed.
            soonest = min(map(self.due, found)) - sum(self._seconds([entry]) for entry in found) - self._delay / 2
            if now < soonest:
                return Choice([], soonest)
        batches = sorted(self._batches(found), key=self._urgency)
        if eager:
            return Choice(self._first(batches, now), now)
        latest = now if go else self._latest(batches)
        return Choice(batches[0], now) if now >= latest else Choice([], latest)

    def _first(self, batches: Sequence[list[Entry]], now: float) -> list[Entry]:
        """Returns the batch to run first. ``batches`` are sorted by urgency.

        Goes through ``batches`` in order. When a batch would begin late, the method compares the batch with all earlier
        batches, and postpones the batch with the highest cost per request. If every batch has one request, postponing
        the most expensive batch makes as few requests late as possible (Moore 1968, "An n job, one machine sequencing
        algorithm for minimizing the number of late jobs"). Considers only batches of the most urgent priority level.
        """
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
        """Returns the latest time at which the first batch can begin so that no batch is late. The batches run in the
        order of ``batches``."""
        latest, end = NEVER, 0.0
        for batch in batches:
            seconds = self._seconds(batch)
            latest = min(latest, min(map(self.due, batch)) - end - min(seconds, self._delay / 2))
            end += seconds
        return latest

    def _urgency(self, batch: Sequence[Entry]) -> tuple[int, float, int]:
        """Returns the sort key of a batch, taken from the batch's most urgent request: the request's level, due time
        and sequence number."""
        return min((entry.level, self.due(entry), entry.seq) for entry in batch)

    def _seconds(self, batch: Sequence[Entry]) -> float:
        """Returns the estimated seconds of one run of ``batch``."""
        longest = max(entry.length for entry in batch)
        return float(self._cost(longest, batch[0])[sum(entry.rows for entry in batch)])

    def _batches(self, found: Sequence[Entry]) -> list[list[Entry]]:
        by_length = sorted(found, key=lambda entry: entry.length)
        lengths = [entry.length for entry in by_length]
        rows = [entry.rows for entry in by_length]
        cuts = best_cut(lengths, rows, self.limit, lambda length: self._cost(length, found[0]))
        return [by_length[begin:end] for begin, end in cuts]

    def _cost(self, length: int, one: Entry) -> np.ndarray:
        """Returns an array with the seconds of a run, indexed by the number of rows. All requests of the run have the
        input shapes of ``one``, padded to ``length``. The seconds include the time for the padding rows."""
        key = (length, one.key if self._fitting is not None else None)
        found = self._by_length.get(key)
        if found is None:
            costs = self.costs.by_rows(length, self.limit)
            sizes = self.sizes if self._fitting is None else self._fitting.of(self._shapes_at(one, length))
            found = costs[[next((size for size in sizes if size >= n), n) for n in range(self.limit + 1)]]
            if self._fitting is not None:
                found[max(sizes, default=0) + 1 :] = np.inf  # a batch size outside the profiles has an infinite cost
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
        """Returns the batch sizes that the model takes if ``entries`` are padded to the longest entry."""
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
        """Returns the inputs of ``entry``. Adds a mask of ones if the model takes a mask and the caller sent none."""
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
        whole[row:] = whole[row - 1]  # fills the padding rows with copies of the last row
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
                    raise NotBatched(
                        f"output '{name}' has shape {list(value.shape)}, but axis {axis} needs the size {longest}"
                    )
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
    """Raises ``BadConfig`` if ``options`` don't fit the model or its scheduling."""
    if not scheduling.dynamic:
        raise BadConfig(f"model '{name}': batching by length needs dynamic batching; set the option dynamic")
    if options.dim not in signature.dims or options.dim == signature.batch_dim:
        others = ", ".join(dim for dim in signature.dims if dim != signature.batch_dim) or "none"
        raise BadConfig(f"model '{name}' has no dim '{options.dim}' to batch by length; choose from: {others}")
    inputs = {spec.name: spec for spec in signature.inputs}
    if options.mask is not None:
        if options.mask not in inputs:
            raise BadConfig(
                f"model '{name}': the mask '{options.mask}' is not one of the model's inputs: {', '.join(inputs)}"
            )
        for size in inputs[options.mask].shape[1:]:
            if isinstance(size, str) and size != options.dim:
                raise BadConfig(
                    f"model '{name}': the server can't make the mask {inputs[options.mask]}; let clients send the mask"
                )
    for what, names, known in (
        ("padding", options.pad, set(inputs)),
        ("an output", options.outputs, {spec.name for spec in signature.outputs}),
    ):
        for one in names:
            if known and one not in known:
                raise BadConfig(
                    f"model '{name}': {what} is given for '{one}', but the model has no '{one}'; remove '{one}'"
                )
    if any(axis < 1 for axis in options.outputs.values()):
        raise BadConfig(
            f"model '{name}': the axis along which an output is cut has to be at least 1, because axis 0 is the batch"
        )
