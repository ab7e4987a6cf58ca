"""The queue of one model: priorities, bounds, timeouts. No thread and no clock in it: every method is told the time.

Within a priority level the order is that of arrival; requests whose timeout says ``delay`` go behind those that are in
time. Nothing here calls an ``Answer``: what has to be refused is raised or handed back.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel.serve.inference import Answer, Code, Durations, InferenceRequest, InferenceResponse, ServeError
from accel.serve.scheduling import QueuePolicy, Scheduling
from accel.serve.statistics import ns

if TYPE_CHECKING:
    import numpy as np

NEVER = math.inf

# The heap of instants is built anew when it holds this many times more than what waits.
_STALE = 4


class Entry:
    """A request that was taken, from its arrival to its answer; the ``Ticket`` that ``submit`` gives.

    ``rows``: of the batch, 1 where the model has none. ``key``: entries of one key may be run together. ``level``: of
    priority. ``expires``: when its queue timeout ends. ``deadline``: when nobody waits any more. Both in seconds on the
    server's clock. ``done``: it has its one answer, kept in ``result`` until that was delivered. ``unwanted``:
    cancelled while it streams.
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
        """Waited until ``started``, then ran with others for what was ``spent``."""
        durations = self.durations
        durations.queue = ns(started - self.arrived)
        durations.compute_input = spent.compute_input
        durations.compute_infer = spent.compute_infer
        durations.compute_output = spent.compute_output

    def cancel(self) -> None:
        """Nobody waits any more: it is answered with CANCELLED, and not run where it hasn't been."""
        if self.owner is not None:
            self.owner(self)


def queue_full() -> ServeError:
    """What a request gets that a bound of the queue keeps out, in Triton's words."""
    return ServeError(Code.UNAVAILABLE, "Exceeds maximum queue size")


def timed_out() -> ServeError:
    """What a request gets that waited longer than its queue timeout, in Triton's words."""
    return ServeError(Code.UNAVAILABLE, "Request timeout expired")


def too_late() -> ServeError:
    """What a request gets whose client has stopped waiting."""
    return ServeError(Code.DEADLINE_EXCEEDED, "Deadline exceeded before the request was run")


def request_bytes(inputs: Mapping[str, np.ndarray]) -> int:
    """What the inputs hold in memory. For strings numpy counts the pointers only, so they are counted here."""
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
    """What waits, over every priority level. Not thread-safe: its owner holds a lock."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # the levels there are, most urgent first
        self._live: dict[int, Entry] = {}
        # Instants at which something has to be done, each with a number: an entry that left leaves no reference here.
        self._instants: list[tuple[float, int]] = []
        self._next_seq = 0
        self.rows = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __bool__(self) -> bool:
        return bool(self._live)

    def __iter__(self) -> Iterator[Entry]:
        """In the order of service."""
        for number in self._order:
            level = self._levels[number]
            yield from level.in_time.values()
            yield from level.delayed.values()

    def __contains__(self, entry: Entry) -> bool:
        return self._live.get(entry.seq) is entry

    def head(self) -> Entry | None:
        """Who is served next."""
        return next(iter(self), None)

    def level_of(self, priority: int) -> int:
        """The level for a priority asked for; like Triton, what isn't one of the model's levels is its default."""
        levels = self._scheduling.priority_levels
        return priority if 1 <= priority <= levels else self._scheduling.default_priority if levels else 0

    def policy_of(self, level: int) -> QueuePolicy:
        return self._scheduling.policies.get(level, self._scheduling.default_policy)

    def put(self, entry: Entry) -> None:
        """Take ``entry`` in, waiting from ``entry.arrived`` on; raises ``ServeError`` UNAVAILABLE where a bound is
        reached."""
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
        """Let ``entry`` go, to be run or because it is cancelled."""
        level = self._levels[entry.level]
        del (level.delayed if entry.delayed else level.in_time)[entry.seq]
        del self._live[entry.seq]
        self.rows -= entry.rows
        self.nbytes -= entry.nbytes

    def expire(self, now: float) -> list[tuple[Entry, ServeError]]:
        """Take out what may not wait any longer, each with what it gets; put behind what a timeout delays."""
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
        """When ``expire`` will next have something to do; ``NEVER`` where nothing that waits has a limit."""
        instants = self._instants
        if len(instants) > 64 and len(instants) > _STALE * len(self._live):
            instants[:] = [row for row in instants if row[1] in self._live]
            heapq.heapify(instants)
        while instants and instants[0][1] not in self._live:
            heapq.heappop(instants)
        return instants[0][0] if instants else NEVER


def _timeout_us(policy: QueuePolicy, asked: int) -> int:
    """The queue timeout in microseconds; a request may shorten it where the policy lets it, 0 is none."""
    if asked > 0 and policy.allow_override:
        return min(asked, policy.timeout_us) if policy.timeout_us else asked
    return policy.timeout_us
