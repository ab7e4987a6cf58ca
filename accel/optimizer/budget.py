"""How much time a search may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accel.errors import AccelError
from accel.progress import watched_by, watcher


class OutOfTime(AccelError):
    """What was under way would have taken the time that measuring needs."""


class Budget:
    """``seconds`` from now on, or without end. It is asked before something is begun, and what is ``within`` it ends
    early.

    ``clock``: seconds, what the budget is counted by.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._begun = clock()

    @property
    def limited(self) -> bool:
        """Whether there is an end."""
        return self.seconds is not None

    @property
    def spent(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._begun

    @property
    def left(self) -> float:
        """Seconds that are left; infinity without an end, never less than 0."""
        return math.inf if self.seconds is None else max(0.0, self.seconds - self.spent)

    def over(self, share: float) -> bool:
        """Whether more than this share of it is spent."""
        return self.seconds is not None and self.spent >= share * self.seconds

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """What is done inside is given up, with ``OutOfTime``, at the first progress that it reports when more than
        this share of the budget is spent."""
        if not self.limited:
            yield
            return
        outside = watcher()

        def pass_on(message: str, fraction: float | None) -> None:
            if outside is not None:
                outside(message, fraction)
            if self.over(share):
                raise OutOfTime(f"{self.spent:.0f} s of the budget of {self.seconds:g} s are spent; give more seconds")

        with watched_by(pass_on):
            yield

    def reason(self, what: str) -> str:
        """Why something was not begun."""
        return f"{self.spent:.0f} s of the budget of {self.seconds:g} s were spent before {what}"
