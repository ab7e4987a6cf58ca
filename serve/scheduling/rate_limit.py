"""Limits the use of resources that models share. A run waits until the resources that the run needs are free.

As in Triton, the field ``rate_limiter`` of an instance group sets how much of each resource a run takes. The server's
options set the available amount of each resource. By default, a resource has the amount that the most demanding model
needs. Stride scheduling decides which waiting model runs next. Each run advances its model by ``priority``, and the
model that has advanced least runs next. A busy model of priority 2 gets half as many runs as a busy model of priority
1. An idle model can't save up runs.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from accel.errors import BadConfig


class RateLimiter:
    """Shares resources between all models of a process. ``limits`` maps a resource to the amount that exists."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._lock = threading.Lock()
        self._gates: set[Gate] = set()
        self._waiting: set[Gate] = set()
        self._used: Counter[str] = Counter()
        self._turn = 0  # how far the model that ran last had advanced before the run
        self._arrivals = itertools.count()

    def gate(self, need: Mapping[str, int], priority: int, wake: Callable[[], None], *, name: str) -> Gate:
        """Returns the ``Gate`` of one model. The limiter calls ``wake`` when ``enter`` may succeed.

        Raises ``BadConfig`` if the model needs more of a resource than exists.
        """
        for resource, count in need.items():
            limit = self._limits.get(resource)
            if limit is not None and count > limit:
                raise BadConfig(
                    f"model '{name}' needs {count} of the resource '{resource}', but the limit is {limit}; raise the "
                    f"limit with --rate-limit-resource {resource}:{count}"
                )
        made = Gate(self, need, max(1, priority), wake)
        with self._lock:
            self._gates.add(made)
        return made

    def _amount(self, resource: str) -> int:
        limit = self._limits.get(resource)
        return max((gate.need.get(resource, 0) for gate in self._gates), default=0) if limit is None else limit

    def enter(self, gate: Gate) -> bool:
        """Takes the resources of ``gate``. Returns False if other models hold the resources or wait ahead of
        ``gate``."""
        with self._lock:
            self._wait(gate)
            if gate not in self._next():
                return False
            self._waiting.remove(gate)
            self._used.update(gate.need)
            self._turn = gate.turn[0]
            gate.turn = (gate.turn[0] + gate.priority, gate.turn[1])
            return True

    def _wait(self, gate: Gate) -> None:
        if gate not in self._waiting:
            gate.turn = (max(gate.turn[0], self._turn), next(self._arrivals))
            self._waiting.add(gate)

    def _next(self) -> list[Gate]:
        """Returns the waiting gates that can enter together, most urgent first. A gate that can't enter yet reserves
        its resources, so that later gates leave the resources free."""
        free = {r: self._amount(r) - self._used[r] for gate in self._waiting for r in gate.need}
        found = []
        for gate in sorted(self._waiting, key=lambda gate: gate.turn):
            if all(free[resource] >= count for resource, count in gate.need.items()):
                found.append(gate)
            for resource, count in gate.need.items():
                free[resource] -= count
        return found

    def leave(self, gate: Gate, *, again: bool) -> None:
        """Gives back the resources that ``gate`` took.

        If ``again`` is True, the model of ``gate`` has more requests to run, so ``gate`` waits for the next run.
        """
        with self._lock:
            self._used.subtract(gate.need)
            if again:
                self._wait(gate)
        self.pass_on()

    def withdraw(self, gate: Gate) -> bool:
        """Ends the wait of ``gate``. Returns True if ``gate`` waited and the caller therefore has to call
        ``pass_on``."""
        with self._lock:
            if gate not in self._waiting:
                return False
            self._waiting.remove(gate)
            return True

    def forget(self, gate: Gate) -> None:
        """Removes the gate of an unloaded model. Runs that have called ``enter`` still have to call ``leave``."""
        with self._lock:
            self._gates.discard(gate)
            self._waiting.discard(gate)
        self.pass_on()

    def pass_on(self) -> None:
        """Wakes the models that can enter. The caller must not hold a lock that a ``wake`` callback acquires."""
        with self._lock:
            found = self._next()
        for gate in found:
            gate.wake()


class Gate:
    """The rate limit of one model. Each run calls ``enter`` before the run and ``leave`` after the run."""

    def __init__(self, limiter: RateLimiter, need: Mapping[str, int], priority: int, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self.need, self.priority, self.wake = dict(need), priority, wake
        self.turn = (0, 0)

    def enter(self) -> bool:
        """Takes the resources of a run, or returns False if the run has to wait.

        The limiter calls ``wake`` as soon as a waiting run may enter.
        """
        return self._limiter.enter(self)

    def leave(self, *, again: bool = False) -> None:
        """Ends a run. ``again`` is True if the model has more requests to run."""
        self._limiter.leave(self, again=again)

    def withdraw(self) -> bool:
        """Ends the wait of a model without work. Returns True if the caller has to call ``pass_on``."""
        return self._limiter.withdraw(self)

    def pass_on(self) -> None:
        self._limiter.pass_on()

    def close(self) -> None:
        self._limiter.forget(self)


def parse_limit(text: str) -> tuple[str, int]:
    """Returns the name and the count in a text of the form ``NAME:COUNT``. Raises ``ValueError`` if ``text`` is no
    valid limit."""
    name, _, count = text.rpartition(":")
    if not name or not count.isdigit() or int(count) < 1:
        raise ValueError(text)
    return name, int(count)
