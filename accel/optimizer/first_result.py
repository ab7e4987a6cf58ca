"""Publishes the first candidate that is right and faster than the source, while the search goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accel.progress import report

from .budget import Budget
from .candidate import CandidateResult
from .search import Search

# The candidates are measured for a first result only if the remaining ones probably take longer than this to make.
_LONG_SECONDS = 30.0


@dataclass(kw_only=True)
class FirstResult:
    """Looks for a first result after each candidate of one run.

    ``publish`` writes a candidate to the output folder. After the first result, the search goes on for as long as
    ``budget`` allows.
    """

    search: Search
    budget: Budget
    publish: Callable[[CandidateResult], None]
    published: CandidateResult | None = None

    def look(self, rows: Sequence[CandidateResult], left: int) -> None:
        """Measures the unmeasured candidates among ``rows`` briefly, and publishes the fastest one if it is faster than
        the source. Does nothing if there is a result already, or if the ``left`` remaining candidates probably take
        little time, because the search is over soon then."""
        if self.published is not None or self.budget.building / max(len(rows), 1) * left < _LONG_SECONDS:
            return
        new = [row for row in rows if row.passed and row.measured is None and row.recipe and row.recipe.runnable]
        if not new:
            return
        best = self.search.glance(new)
        if best is self.search.source:
            return
        self.published = best
        self.publish(best)
        self.budget.improve()
        speedup = (best.measured or {})["speedup"]
        more = f"; the search for a faster one takes up to {self.budget.left:.0f} s more, and Ctrl-C ends it"
        report(f"published {best.name}, {speedup:.2f}x as fast as the source{more if self.budget.limited else ''}")
