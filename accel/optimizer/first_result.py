"""Publishes the first candidate that is right and faster than the source, while the search goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accel.progress import report

from .budget import Budget
from .candidate import CandidateResult
from .recipes.order import Expected
from .search import Search

# There is a first result only if the remaining candidates probably take longer than this to make.
_LONG_SECONDS = 30.0
# A run that has taken less than this has found its candidates in the cache.
_SOON_SECONDS = 5.0
# A candidate is published before it is measured if its expected speedup is at least this.
_SURE_SPEEDUP = 1.5


@dataclass(kw_only=True)
class FirstResult:
    """Looks for a first result after each candidate of one run.

    ``publish`` writes a candidate to the output folder. ``expected`` maps the names of candidates to what is expected
    of them. After the first result, the search goes on for as long as ``budget`` allows.
    """

    search: Search
    budget: Budget
    publish: Callable[[CandidateResult], None]
    expected: Mapping[str, Expected]
    published: CandidateResult | None = None

    def look(self, rows: Sequence[CandidateResult]) -> None:
        """Publishes the right candidate with the largest expected speedup, if its speedup is sure. Then measures the
        candidates that aren't measured yet, and publishes the fastest, or the source if no candidate is faster.

        Does nothing if there is a result already. Also does nothing if the remaining candidates probably take little
        time, or if all candidates so far came from the cache, because the search is over soon then.
        """
        done = {row.name for row in rows}
        left = sum(one.seconds for name, one in self.expected.items() if name not in done)
        if self.published is not None or left < _LONG_SECONDS or self.budget.spent < _SOON_SECONDS:
            return
        new = [row for row in rows if row.passed and row.measured is None and row.recipe and row.recipe.runnable]
        if not new:
            return
        sure = max(new, key=self._expected_speedup)
        early = self._expected_speedup(sure) >= _SURE_SPEEDUP
        if early:
            self.publish(sure)
            report(f"published {sure.name}, which is right; its speed is measured next")
        best = self.search.glance(new)
        if best is not self.search.source or early:
            self.publish(best)
        if best is self.search.source:
            return
        self.published = best
        self.budget.improve()
        speedup = (best.measured or {})["speedup"]
        more = f"; the search for a faster one takes up to {self.budget.left:.0f} s more, and Ctrl-C ends it"
        report(f"published {best.name}, {speedup:.2f}x as fast as the source{more if self.budget.limited else ''}")

    def _expected_speedup(self, row: CandidateResult) -> float:
        return self.expected[row.name].speedup if row.name in self.expected else 0.0
