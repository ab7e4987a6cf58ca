"""The time budget of a run. The class ``Budget`` decides when the run has to stop a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from accel.cancel import Terminated, cancelled_by, forget_interrupt
from accel.errors import AccelError
from accel.progress import report
from accel.spelling import option

# A note names at most this many steps, and at most this many candidates.
_NAMED = 4
# The number of seconds that one process takes in a short measurement, including loading, warm-up and five short blocks.
SECONDS_A_CANDIDATE = 4.0
# The least time in seconds for which the search goes on after its first result.
IMPROVING_SECONDS = 60.0
# The number of processes that run the source in a measurement.
SOURCES = 2


class OutOfTime(AccelError):
    """The work inside a ``with`` block was stopped, to leave time for measuring the candidates."""


class Budget:
    """A time budget that starts now and is spent after ``seconds``. If ``seconds`` is None, there is no limit until the
    first result. ``thorough`` removes the limit after the first result, too. ``chosen_by_accel`` tells whether
    ``seconds`` was set after the first result. ``exported`` tells whether accel made the source of the candidates,
    which is a result even if no candidate is built.

    Callers check ``over`` before each step. ``within`` stops the work inside its ``with`` block as soon as ``over`` is
    true. ``clock`` returns the current time in seconds.
    """

    def __init__(
        self, seconds: float | None, clock: Callable[[], float] = time.monotonic, *, thorough: bool = False
    ) -> None:
        self.seconds = seconds
        self._thorough = thorough
        self._clock = clock
        self._begun = clock()
        self._taken: dict[str, float] = {}
        self._quantizing: set[str] = set()
        self._built = 0
        self._improving = False
        self.chosen_by_accel = False
        self.exported = False
        self.interrupted = False

    def interrupt(self, error: KeyboardInterrupt) -> None:
        """Ends the building of candidates, and leaves time for a short measurement of the candidates that are built.

        Raises ``error`` if there is no result yet, if this is the second interrupt, or if the signal was SIGTERM.
        """
        if self.interrupted or not (self._built or self.exported) or isinstance(error, Terminated):
            raise error
        forget_interrupt()
        self.interrupted = True
        self.seconds = self.spent + (self._built + SOURCES + 1) * SECONDS_A_CANDIDATE
        report("interrupted: measuring what is made for a few seconds; another Ctrl-C ends at once")

    def improve(self) -> None:
        """Sets a limit after the first result, if there is none yet: twice as long as the first result took, and at
        least ``IMPROVING_SECONDS``."""
        self._improving = True
        if self.seconds is None and not self._thorough:
            self.chosen_by_accel = True
            self.seconds = round(self.spent + max(IMPROVING_SECONDS, 2 * self.spent))

    def built(self) -> None:
        """Counts one more candidate to measure. Building ends early enough to measure all candidates, because an
        unmeasured candidate is never chosen."""
        self._built += 1

    @property
    def limited(self) -> bool:
        """Tells whether the budget has a time limit."""
        return self.seconds is not None

    @property
    def spent(self) -> float:
        """Returns the seconds since the budget was made."""
        return self._clock() - self._begun

    @property
    def left(self) -> float:
        """Returns the seconds that are left, at least 0. Returns infinity if the budget has no limit."""
        return math.inf if self.seconds is None else max(0.0, self.seconds - self.spent)

    def over(self, share: float) -> bool:
        """Tells whether ``share`` of the budget is spent, or whether the measurement needs the rest of the time. The
        measurement needs time for the source, for the candidates that are built, and for one more candidate. After a
        first result, only the time for the measurement counts.
        """
        if self.seconds is None or self.interrupted:
            return self.interrupted
        kept = (self._built + 1 + SOURCES) * SECONDS_A_CANDIDATE if self._built else 0.0
        share = 1.0 if self._improving else share
        return self.spent >= min(share * self.seconds, self.seconds - kept)

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Raises ``OutOfTime`` inside the ``with`` block as soon as ``over(share)`` is true. See
        ``accel.cancel``."""
        if not self.limited:
            yield
            return

        def check() -> None:
            if self.over(share):
                raise OutOfTime(f"{self.reason('the work was over')}; give more seconds")

        with cancelled_by(check):
            yield

    def reason(self, what: str) -> str:
        """Returns the reason why a step was skipped or stopped. The reason ends in "before" and ``what``, as in "before
        it was measured"."""
        if self.interrupted:
            return f"Ctrl-C came before {what}"
        if self.chosen_by_accel:
            return f"the search ended after {self.seconds:g} s, before {what}"
        rest = ", and the rest was kept for measuring" if self._built and self.left >= SECONDS_A_CANDIDATE else ""
        return f"{_in_words(self.spent)} of the budget of {self.seconds:g} s were spent before {what}{rest}"

    @contextmanager
    def spending(self, what: str, *, quantizing: bool = False) -> Iterator[None]:
        """Measures how long the ``with`` block runs, and adds the time to the total of the step ``what``, even if the
        block fails.

        ``quantizing`` is True if the block would take less time with fewer calibration samples.
        """
        begun = self._clock()
        if quantizing:
            self._quantizing.add(what)
        try:
            yield
        finally:
            self._taken[what] = self._taken.get(what, 0.0) + self._clock() - begun

    def note(self, missed: Sequence[str]) -> str:
        """Returns a note that names the longest steps, the skipped candidates ``missed``, and the options that save
        time or extend the budget. Returns an empty text if ``missed`` is empty."""
        if not missed or self.seconds is None:
            return ""
        least = 0.05 * sum(self._taken.values())
        longest = sorted((item for item in self._taken.items() if item[1] > least), key=lambda item: -item[1])[:_NAMED]
        took = ", ".join(f"{what} took {_in_words(seconds)}" for what, seconds in longest)
        steps = took or "no step was begun"
        names = ", ".join(missed[:_NAMED])
        more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        if self.interrupted:
            return f"Ctrl-C came before {names}{more}: {steps}; run it again to go on from there"
        if self.chosen_by_accel:
            ended = f"the search ended after {self.seconds:g} s, before {names}{more} ({steps})"
            return f"{ended}; {option('thorough', True)} tries all candidates"
        quantized = any(what in self._quantizing for what, _ in longest)
        fewer = f", or calibrate on fewer samples ({option('quantize', ['samples=32'])})" if quantized else ""
        return (
            f"the budget of {self.seconds:g} s was too short to try or measure {names}{more}: "
            f"{steps}{self._left_words()}; give more {option('budget_seconds')}, or try fewer precisions with "
            f"{option('precision')}{fewer}"
        )

    def _left_words(self) -> str:
        """Returns the reason why the seconds that are left weren't used, or "" if hardly any are left."""
        usual = (SOURCES + 1) * SECONDS_A_CANDIDATE
        if self.left < 1:
            return ""
        if self.left < usual:
            return f", and measuring a candidate usually takes more than the {_in_words(self.left)} left"
        return f", and the {_in_words(self.left)} left were kept for measuring"


def _in_words(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"
