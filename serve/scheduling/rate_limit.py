"""Resources that models share: a run takes what its model's config asks for, and waits while others have it.

Triton's ``rate_limiter`` of an instance group. There is as much of a resource as the server was told, else as the model
that needs the most of it asks for. Who runs next among those that wait is decided by stride scheduling: each run moves
a model ``priority`` further, and the one that is furthest behind goes first, so that priority 2 gets half the runs of
priority 1 while both always have work. A model that has been idle has saved up no runs.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from accel.errors import BadConfig


class RateLimiter:
    """``limits``: how much there is, by name. One serves every model of a process."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        self._lock = threading.Lock()
        self._gates: set[Gate] = set()
        self._waiting: set[Gate] = set()
        self._used: Counter[str] = Counter()
        self._turn = 0  # of the run that was let in last
        self._arrivals = itertools.count()

    def gate(self, need: Mapping[str, int], priority: int, wake: Callable[[], None], *, name: str) -> Gate:
        """The way to a run for one model; ``wake`` says that it is worth trying again. ``BadConfig`` where it needs
        more than there is."""
        for resource, count in need.items():
            limit = self._limits.get(resource)
            if limit is not None and count > limit:
                raise BadConfig(
                    f"model '{name}' needs {count} of the resource '{resource}' and there is {limit}; raise "
                    f"--rate-limit-resource {resource}:{count}"
                )
        made = Gate(self, need, max(1, priority), wake)
        with self._lock:
            self._gates.add(made)
        return made

    def _amount(self, resource: str) -> int:
        limit = self._limits.get(resource)
        return max((gate.need.get(resource, 0) for gate in self._gates), default=0) if limit is None else limit

    def enter(self, gate: Gate) -> bool:
        """Take what ``gate`` needs; False where others have it, or where those before it wait for it."""
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
        """Those that wait and can be let in together, the most urgent first; what one of them needs is kept for it."""
        free = {r: self._amount(r) - self._used[r] for gate in self._waiting for r in gate.need}
        found = []
        for gate in sorted(self._waiting, key=lambda gate: gate.turn):
            if all(free[resource] >= count for resource, count in gate.need.items()):
                found.append(gate)
            for resource, count in gate.need.items():
                free[resource] -= count
        return found

    def leave(self, gate: Gate, *, again: bool) -> None:
        """Give back what ``gate`` took. ``again``: it has more to run, and stands in line with those that wait."""
        with self._lock:
            self._used.subtract(gate.need)
            if again:
                self._wait(gate)
        self.pass_on()

    def withdraw(self, gate: Gate) -> bool:
        """``gate`` has nothing to run any more. Whether it waited: then ``pass_on`` is due."""
        with self._lock:
            if gate not in self._waiting:
                return False
            self._waiting.remove(gate)
            return True

    def forget(self, gate: Gate) -> None:
        """The model is gone; what it has taken it still gives back."""
        with self._lock:
            self._gates.discard(gate)
            self._waiting.discard(gate)
        self.pass_on()

    def pass_on(self) -> None:
        """Wake those that can be let in. Not to be called with a lock that a ``wake`` takes."""
        with self._lock:
            found = self._next()
        for gate in found:
            gate.wake()


class Gate:
    """One model's way to its runs."""

    def __init__(self, limiter: RateLimiter, need: Mapping[str, int], priority: int, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self.need, self.priority, self.wake = dict(need), priority, wake
        self.turn = (0, 0)

    def enter(self) -> bool:
        """Before a run; where it is False, ``wake`` will be called."""
        return self._limiter.enter(self)

    def leave(self, *, again: bool = False) -> None:
        """After a run; ``again`` where more is to be run."""
        self._limiter.leave(self, again=again)

    def withdraw(self) -> bool:
        """Nothing is left to run; where it is True, ``pass_on`` has to follow."""
        return self._limiter.withdraw(self)

    def pass_on(self) -> None:
        self._limiter.pass_on()

    def close(self) -> None:
        self._limiter.forget(self)


def parse_limit(text: str) -> tuple[str, int]:
    """``NAME:COUNT``. ``ValueError`` where it is something else."""
    name, _, count = text.rpartition(":")
    if not name or not count.isdigit() or int(count) < 1:
        raise ValueError(text)
    return name, int(count)
