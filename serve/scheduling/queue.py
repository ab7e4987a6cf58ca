"""Queues the requests of one model, with priorities, limits and timeouts. The queue has no thread and no clock, so the
caller passes the time.

Requests of the same priority level are served in the order of arrival. If the policy of an expired request says
``delay``, the request is served after the requests that are in time. The queue raises or returns errors, and never
calls an ``Answer``.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel.errors import BadFeeds, SizeBeyond

from ..protocol.inference import Answer, Code, Durations, InferenceRequest, InferenceResponse, ServeError
from .options import QueuePolicy, Scheduling
from .statistics import ns

if TYPE_CHECKING:
    import numpy as np

NEVER = math.inf

# The heap of expiry times is rebuilt once it is more than _STALE times as long as the queue.
_STALE = 4


class Entry:
    """An accepted request, from arrival to answer. ``submit`` returns the entry as the request's ``Ticket``.

    ``rows`` is the size of the request's batch dim, or 1 without a batch dim. Entries with equal ``key`` may run
    together. ``level`` is the priority level. ``expires`` is the end of the queue timeout, in seconds on the server's
    clock. ``deadline`` is the time on the server's clock after which the client no longer waits. ``done`` is True once
    the entry has an answer, and ``result`` is the undelivered answer. ``unwanted`` is True if the request was canceled
    during the stream.
    """

    __slots__ = (
        "answer", "arrived", "deadline", "delayed", "done", "durations", "expires", "key", "length", "level", "nbytes",
        "owner", "request", "result", "rows", "seq", "unwanted",
    )  # fmt: skip

    def __init__(
        self,
        request: InferenceRequest,
        answer: Answer,
        *,
        rows: int,
        arrived: float,
        owner: Callable[[Entry], None] | None = None,
    ) -> None:
        self.request = request
        self.answer = answer
        self.rows = rows
        self.arrived = arrived
        self.owner = owner
        self.key: object = None
        self.length = 0
        self.level = 0
        self.nbytes = 0
        self.expires = NEVER
        self.deadline = NEVER if request.deadline is None else request.deadline
        self.delayed = False
        self.done = False
        self.unwanted = False
        self.seq = -1
        self.durations = Durations()
        self.result: InferenceResponse | ServeError | None = None

    def book(self, started: float, spent: Durations) -> None:
        """Records that the request waited until ``started`` and then ran in a batch with the durations ``spent``."""
        durations = self.durations
        durations.queue = ns(started - self.arrived)
        durations.compute_input = spent.compute_input
        durations.compute_infer = spent.compute_infer
        durations.compute_output = spent.compute_output

    def cancel(self) -> None:
        """Answers the request with CANCELLED, and removes a waiting request from the queue."""
        if self.owner is not None:
            self.owner(self)


Result = InferenceResponse | ServeError
Settled = list[tuple[Entry, Result]]


def queue_full() -> ServeError:
    """Returns the error, in Triton's words, of a request that exceeds a bound of the queue."""
    return ServeError(Code.UNAVAILABLE, "Exceeds maximum queue size")


def timed_out() -> ServeError:
    """Returns the error, in Triton's words, of a request that waited longer than its queue timeout."""
    return ServeError(Code.UNAVAILABLE, "Request timeout expired")


def too_late() -> ServeError:
    """Returns the error of a request if the client has stopped waiting."""
    return ServeError(Code.DEADLINE_EXCEEDED, "Deadline exceeded before the request was run")


def run_error(model: str, error: BaseException) -> ServeError:
    """Converts the error of a run to the client's error."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, BadFeeds):
        return ServeError(Code.INVALID_ARGUMENT, str(error))
    # A size beyond its range is the client's fault.
    code = Code.INVALID_ARGUMENT if isinstance(error, SizeBeyond) else Code.INTERNAL
    return ServeError(code, f"model '{model}' failed: {error or type(error).__name__}")


def request_bytes(inputs: Mapping[str, np.ndarray]) -> int:
    """Returns the number of bytes that the inputs take in memory. For strings, numpy counts only the pointers, so the
    bytes of the strings are added."""
    total = 0
    for value in inputs.values():
        total += int(value.nbytes)
        if value.dtype.hasobject:
            total += sum(len(item) if isinstance(item, bytes | str) else 8 for item in value.flat)
    return total


@dataclass(slots=True)
class _Level:
    in_time: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    delayed: OrderedDict[int, Entry] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)


class RequestQueue:
    """The waiting requests of all priority levels. The queue is not thread-safe, so the owner has to hold a lock."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # numbers of the existing levels, most urgent first
        self._live: dict[int, Entry] = {}
        # A heap of expiry times, each with the number of its entry. The heap holds numbers, because a heap of entries
        # would keep answered entries in memory.
        self._instants: list[tuple[float, int]] = []
        self._next_seq = 0
        self.rows = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __bool__(self) -> bool:
        return bool(self._live)

    def __iter__(self) -> Iterator[Entry]:
        """Yields the waiting requests in the order of service."""
        for number in self._order:
            level = self._levels[number]
            yield from level.in_time.values()
            yield from level.delayed.values()

    def __contains__(self, entry: Entry) -> bool:
        return self._live.get(entry.seq) is entry

    def head(self) -> Entry | None:
        """Returns the request that is served next, or None if the queue is empty."""
        return next(iter(self), None)

    def level_of(self, priority: int) -> int:
        """Returns the level for a request's priority. If the model has no level with the number ``priority``, returns
        the default level, as in Triton."""
        levels = self._scheduling.priority_levels
        return priority if 1 <= priority <= levels else self._scheduling.default_priority if levels else 0

    def policy_of(self, level: int) -> QueuePolicy:
        return self._scheduling.policies.get(level, self._scheduling.default_policy)

    def put(self, entry: Entry) -> None:
        """Queues ``entry``. The entry's queue timeout begins at ``entry.arrived``.

        Raises ``ServeError`` UNAVAILABLE if a bound of the queue is reached.
        """
        request = entry.request
        entry.level = self.level_of(request.priority)
        policy = self.policy_of(entry.level)
        level = self._levels.get(entry.level)
        if policy.max_queue_size and level is not None and len(level) >= policy.max_queue_size:
            raise queue_full()
        limits = self._scheduling
        entry.nbytes = request_bytes(request.inputs)
        if limits.queue_rows and self.rows + entry.rows > limits.queue_rows:
            raise queue_full()
        if limits.queue_bytes and self.nbytes + entry.nbytes > limits.queue_bytes:
            raise queue_full()
        if level is None:
            level = self._levels[entry.level] = _Level()
            bisect.insort(self._order, entry.level)
        entry.seq = self._next_seq
        self._next_seq += 1
        level.in_time[entry.seq] = entry
        self._live[entry.seq] = entry
        self.rows += entry.rows
        self.nbytes += entry.nbytes
        if timeout := _timeout_us(policy, request.timeout_us):
            entry.expires = entry.arrived + timeout / 1e6
            heapq.heappush(self._instants, (entry.expires, entry.seq))
        if entry.deadline < NEVER:
            heapq.heappush(self._instants, (entry.deadline, entry.seq))

    def remove(self, entry: Entry) -> None:
        """Removes ``entry`` from the queue, because ``entry`` runs or is canceled."""
        level = self._levels[entry.level]
        del (level.delayed if entry.delayed else level.in_time)[entry.seq]
        del self._live[entry.seq]
        self.rows -= entry.rows
        self.nbytes -= entry.nbytes

    def expire(self, now: float) -> list[tuple[Entry, ServeError]]:
        """Removes the requests that have waited too long and returns each with an error. Moves an expired request
        behind the other requests if its policy says ``delay``."""
        found: list[tuple[Entry, ServeError]] = []
        while self._instants and self._instants[0][0] <= now:
            _, seq = heapq.heappop(self._instants)
            entry = self._live.get(seq)
            if entry is None:
                continue
            if entry.deadline <= now:
                self.remove(entry)
                found.append((entry, too_late()))
            elif entry.expires <= now and not entry.delayed:
                if self.policy_of(entry.level).timeout_action == "delay":
                    level = self._levels[entry.level]
                    level.delayed[seq] = level.in_time.pop(seq)
                    entry.delayed = True
                else:
                    self.remove(entry)
                    found.append((entry, timed_out()))
        return found

    def next_instant(self) -> float:
        """Returns the time at which the next request expires, or ``NEVER`` if no waiting request has a timeout or
        deadline."""
        instants = self._instants
        if len(instants) > 64 and len(instants) > _STALE * len(self._live):
            instants[:] = [row for row in instants if row[1] in self._live]
            heapq.heapify(instants)
        while instants and instants[0][1] not in self._live:
            heapq.heappop(instants)
        return instants[0][0] if instants else NEVER


class AnswerOrder:
    """Puts the answers into the order of the requests. Only one thread delivers at a time. The delivering thread also
    delivers the results that other threads produce in the meantime. The owner has to hold a lock."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._delivering = False

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def begin(self, settled: Settled) -> Entry | None:
        """Keeps the results. Returns the first entry to deliver, or None if there is none or another thread
        delivers."""
        for entry, result in settled:
            entry.result = result
        if self._delivering:
            return None
        self._delivering = True
        return self.next()

    def next(self) -> Entry | None:
        """Returns the next entry to deliver, or None if its result isn't there yet, which ends the delivery."""
        if self._entries and self._entries[0].result is not None:
            return self._entries.popleft()
        self._delivering = False
        return None


def _timeout_us(policy: QueuePolicy, asked: int) -> int:
    """Returns the queue timeout in microseconds, or 0 for no timeout. A request may shorten the timeout if the policy
    allows."""
    if asked > 0 and policy.allow_override:
        return min(asked, policy.timeout_us) if policy.timeout_us else asked
    return policy.timeout_us
