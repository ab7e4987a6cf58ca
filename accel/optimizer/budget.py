"""How much time a search may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from accel.errors import AccelError
from accel.progress import watched_by, watcher

# What is named of what took the time, and of what was missed for it.
_NAMED = 4
# What a short measurement takes for each process (loading it, warming it up, five short blocks), and how many processes
# of the source are in it.
SECONDS_A_CANDIDATE = 4.0
SOURCES = 2
# How the name of a step ends that reads calibration data.
QUANTIZING = ": quantize"


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
        self._taken: dict[str, float] = {}
        self._built = 0

    def built(self) -> None:
        """One more candidate waits to be measured: the time for it is kept, building ends before. What was built and
        not measured is of no use."""
        self._built += 1

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
        """Whether more than this share of it is spent, or no more is left than measuring what is built and
        one more takes."""
        if self.seconds is None:
            return False
        kept = (self._built + 1 + SOURCES) * SECONDS_A_CANDIDATE if self._built else 0.0
        return self.spent >= min(share * self.seconds, self.seconds - kept)

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """What is done inside is given up, with ``OutOfTime``, at the first progress that it reports when more than
        this share of the budget is spent, or what is left is for measuring (``over``)."""
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

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """The time that passes inside is what it took to do ``what``, also where that was given up."""
        begun = self._clock()
        try:
            yield
        finally:
            self._taken[what] = self._taken.get(what, 0.0) + self._clock() - begun

    def note(self, missed: Sequence[str]) -> str:
        """What the budget went to, what was not tried or measured for it (``missed``, names of candidates), and what
        helps; empty where nothing was missed."""
        if not missed or self.seconds is None:
            return ""
        least = 0.05 * sum(self._taken.values())
        longest = sorted((item for item in self._taken.items() if item[1] > least), key=lambda item: -item[1])[:_NAMED]
        took = ", ".join(f"{what} took {seconds:.{0 if seconds >= 10 else 1}f} s" for what, seconds in longest)
        names = ", ".join(missed[:_NAMED])
        more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        quantized = any(what.endswith(QUANTIZING) for what, _ in longest)
        fewer = ", or calibrate on fewer samples (--quantize samples=32)" if quantized else ""
        return (
            f"the budget of {self.seconds:g} s was too short to try or measure {names}{more}: "
            f"{took or 'nothing was begun'}; give more --budget-seconds, name what you want with --precision{fewer}"
        )
