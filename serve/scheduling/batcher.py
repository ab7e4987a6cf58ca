"""Dynamic batching: chooses the waiting requests that run together. The choice depends only on the queue and the time.

The candidates are the first request of the queue, and all later requests with the inputs, dtypes and shapes of the
first request. Only the rows may differ. Candidates are taken in the order of service, up to the model's largest batch
size.

The first n candidates become a batch at once if their rows add up to a preferred batch size. Of several possible n, the
batcher takes the largest. In all other cases, the candidates become a batch when no further request fits or the oldest
candidate has waited ``max_delay_us``. A request with a queue timeout or a deadline spends at most half of the allowed
time waiting, so that the other half is left for the run.

If the model takes only certain batch sizes, requests are removed from the end of the batch until the rest has an
allowed size. If the batch would lose more than half of its rows, no request is removed. Copies of the last row then pad
the batch to the next allowed size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from accel.errors import AccelError
from accel.signature import is_sum

from ..protocol.inference import InferenceRequest
from ..protocol.tensors import invalid
from .options import Scheduling
from .profiles import FittingRows, Shapes
from .queue import NEVER, Entry, RequestQueue

if TYPE_CHECKING:
    from accel.signature import Signature


class Choice(NamedTuple):
    """The ``batch`` to run now. If ``batch`` is empty, the instance calls ``choose`` again at the time ``wake``, or
    earlier if a request comes."""

    batch: list[Entry]
    wake: float


class NotBatched(AccelError):
    """Raised if the outputs of a batch can't be split by their first dim."""


class Batching(Protocol):
    """Combines requests into one run of the session and splits the run's outputs into answers."""

    def admit(self, request: InferenceRequest) -> int:
        """Returns the number of rows in the request. Raises ``ServeError`` INVALID_ARGUMENT if the request can't be
        run."""
        ...

    def describe(self, entry: Entry) -> None:
        """Fills in the fields of ``entry`` that ``choose`` reads. Called once, before ``entry`` is queued."""
        ...

    def choose(self, queue: RequestQueue, now: float, *, hurry: bool = False) -> Choice:
        """Returns the batch that an idle instance runs at ``now``, or the time until which the instance waits. Changes
        nothing. ``hurry`` is True if no further request will come."""
        ...

    def stack(self, entries: Sequence[Entry]) -> Mapping[str, np.ndarray]:
        """Returns the feeds of one run."""
        ...

    def split(self, outputs: Mapping[str, np.ndarray], entries: Sequence[Entry]) -> list[Mapping[str, np.ndarray]]:
        """Returns the outputs of each entry. Raises ``NotBatched`` if the outputs of the run can't be split."""
        ...

    def tokens(self, entries: Sequence[Entry]) -> tuple[int, int]:
        """Returns the number of padding positions in one run, and the number of positions that callers sent. Positions
        are counted along the dim that differs between requests."""
        ...


class RowBatching:
    """Batching along the first dim. Runs each request alone if ``max_batch_size`` is 0 or ``dynamic`` is False."""

    def __init__(self, signature: Signature, scheduling: Scheduling, *, name: str) -> None:
        self.name = name
        self.signature = signature
        self.scheduling = scheduling
        self.batched = scheduling.max_batch_size > 0
        self.dynamic = self.batched and scheduling.dynamic
        self.sizes = sorted(
            size for size in scheduling.allowed or () if not self.batched or size <= scheduling.max_batch_size
        )
        self.limit = (self.sizes[-1] if self.sizes else scheduling.max_batch_size) if self.batched else 1
        unit = signature.batch_unit
        fitting = scheduling.profiles and self.batched
        self._fitting = FittingRows(scheduling.profiles, self.limit, unit) if fitting else None
        self._any_size = not self.sizes and self._fitting is None  # a request alone then runs as it came
        self._preferred = {size for size in scheduling.preferred if size <= self.limit}
        self._delay = scheduling.max_delay_us / 1e6
        self._outputs = {spec.name for spec in signature.outputs}
        # The server pads the batch dim to an allowed size. A dim other than the batch dim needs a size that is a
        # multiple of the dim's step. The session checks sums of dims.
        self._stepped = [
            (spec.name, axis, dim, signature.dims[dim])
            for spec in signature.inputs
            for axis, dim in enumerate(spec.shape)
            if isinstance(dim, str) and not is_sum(dim) and not (self.batched and axis == 0)
            if signature.dims[dim].step != 1
        ]

    def admit(self, request: InferenceRequest) -> int:
        if request.outputs is not None and self._outputs:
            for output in request.outputs:
                if output not in self._outputs:
                    raise invalid(f"unexpected inference output '{output}' for model '{self.name}'")
        for name, axis, dim, sizes in self._stepped:
            size = request.inputs[name].shape[axis] if name in request.inputs else 0
            if size % sizes.step:
                raise invalid(
                    f"input '{name}' has the size {size} in dim '{dim}', but model '{self.name}' takes multiples of "
                    f"{sizes.step}; pad or cut the dim to {sizes.beside(size)}"
                )
        if not self.batched:
            return 1
        rows = -1
        for name, value in request.inputs.items():
            first = value.shape[0] if value.ndim else -1
            if first < 1:
                raise invalid(f"the batch dim of input '{name}' has to be at least 1 for model '{self.name}'")
            if rows not in (-1, first):
                raise invalid(f"input '{name}' batch size does not match other inputs for model '{self.name}'")
            rows = first
        if rows > self.limit:
            raise invalid(f"inference request batch-size must be <= {self.limit} for '{self.name}'")
        if self._fitting is not None:
            self._check_profiles(rows, self._fitting.of(_shapes(request)))
        return max(rows, 1)

    def _check_profiles(self, rows: int, sizes: Sequence[int]) -> None:
        if not sizes:
            raise invalid(
                f"the shapes are outside the optimization profiles of model '{self.name}'; pad or cut the inputs"
            )
        if rows > sizes[-1]:
            raise invalid(f"inference request batch-size must be <= {sizes[-1]} at these shapes for '{self.name}'")

    def sizes_of(self, entries: Sequence[Entry]) -> Sequence[int]:
        """Returns the batch sizes that the model takes at the shapes of ``entries``, or () if the model takes every
        size."""
        return self.sizes if self._fitting is None else self._fitting.of(_shapes(entries[0].request))

    def limit_of(self, entries: Sequence[Entry]) -> int:
        """Returns the largest batch size at the shapes of ``entries``."""
        if self._fitting is None:
            return self.limit
        sizes = self.sizes_of(entries)
        return sizes[-1] if sizes else 0

    def describe(self, entry: Entry) -> None:
        if self.dynamic:
            inputs = entry.request.inputs
            entry.key = tuple((name, inputs[name].dtype.str, inputs[name].shape[1:]) for name in sorted(inputs))

    def choose(self, queue: RequestQueue, now: float, *, hurry: bool = False) -> Choice:
        head = queue.head()
        if head is None:
            return Choice([], NEVER)
        if not self.dynamic:
            return Choice([head], now)
        found, full = self._gather(queue, head)
        totals = list(accumulate(entry.rows for entry in found))
        preferred = [i for i, total in enumerate(totals, 1) if total in self._preferred]
        if preferred:
            return Choice(self._cut(found[: preferred[-1]], totals), now)
        due = min(map(self.due, found))
        if full or hurry or now >= due:
            return Choice(self._cut(found, totals), now)
        return Choice([], due)

    def _gather(self, queue: RequestQueue, head: Entry) -> tuple[list[Entry], bool]:
        """Returns the requests that fit into one batch with ``head``, and True if the batch is full."""
        found: list[Entry] = []
        rows, limit = 0, self.limit
        for entry in queue:
            if entry.key != head.key:
                continue
            if self._fitting is not None:
                limit = self.limit_of([*found, entry])
            if rows + entry.rows > limit:
                return found, True
            found.append(entry)
            rows += entry.rows
            if rows == limit:
                return found, True
        return found, False

    def due(self, entry: Entry, bounds: float = 1) -> float:
        """Returns the time at which ``entry`` stops waiting for other requests.

        ``bounds`` is the longest wait, as a multiple of ``max_delay_us``.
        """
        limit = min(entry.deadline, NEVER if entry.delayed else entry.expires)
        slack = (limit - entry.arrived) / 2 if limit < NEVER else NEVER
        return entry.arrived + min(bounds * self._delay, slack)

    def _cut(self, found: list[Entry], totals: Sequence[int]) -> list[Entry]:
        """Returns ``found`` without the last requests, so that the rows add up to an allowed batch size. Returns all of
        ``found`` if more than half of the rows would be left out."""
        if not self.sizes and self._fitting is None:
            return found
        whole = totals[len(found) - 1]
        exact = [i for i in range(1, len(found) + 1) if totals[i - 1] in self.sizes_of(found[:i])]
        return found[: exact[-1]] if exact and 2 * totals[exact[-1] - 1] >= whole else found

    def size_of(self, entries: Sequence[Entry]) -> int:
        """Returns the number of rows in the run of ``entries``, padding included."""
        rows = sum(entry.rows for entry in entries)
        return next((size for size in self.sizes_of(entries) if size >= rows), rows) if self.batched else rows

    def stack(self, entries: Sequence[Entry]) -> Mapping[str, np.ndarray]:
        first = entries[0].request.inputs
        if len(entries) == 1 and self._any_size:
            return first
        rows = sum(entry.rows for entry in entries)
        missing = self.size_of(entries) - rows
        if len(entries) == 1 and not missing:
            return first
        feeds = {}
        for name in first:
            parts = [entry.request.inputs[name] for entry in entries]
            if missing:
                parts.append(np.repeat(parts[-1][-1:], missing, axis=0))
            feeds[name] = np.concatenate(parts)
        return feeds

    def split(self, outputs: Mapping[str, np.ndarray], entries: Sequence[Entry]) -> list[Mapping[str, np.ndarray]]:
        if len(entries) == 1 and self._any_size:
            return [outputs]
        rows = sum(entry.rows for entry in entries)
        size = self.size_of(entries)
        if len(entries) == 1 and size == rows:
            return [outputs]
        for name, value in outputs.items():
            if not value.ndim or value.shape[0] != size:
                raise NotBatched(f"output '{name}' has shape {list(value.shape)} for a batch of {size} rows")
        ends = list(accumulate(entry.rows for entry in entries))
        return [
            {name: value[end - entry.rows : end] for name, value in outputs.items()}
            for entry, end in zip(entries, ends, strict=True)
        ]

    def tokens(self, entries: Sequence[Entry]) -> tuple[int, int]:  # noqa: ARG002 - no dim varies inside a batch
        return 0, 0


def _shapes(request: InferenceRequest) -> Shapes:
    return tuple((name, value.shape[1:]) for name, value in request.inputs.items())
