"""Searches for the fastest candidate by measuring all candidates, or by successive halving if time is short. After the
measurements, the search varies session options. Successive halving measures all candidates briefly, then the faster
half for longer, and so on. The method is described by Jamieson and Talwalkar ("Non-stochastic Best Arm Identification
and Hyperparameter Optimization", AISTATS 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.cache import StageCache
from accel.errors import AccelError
from accel.machine import available_memory
from accel.timing.report import disturbed
from accel.timing.statistics import MIN_FLOOR, MIN_ROUNDS, TOO_NOISY_FLOOR, Ratio, judge, speedup

from .attempt import judged
from .budget import SECONDS_A_CANDIDATE, SOURCES, Budget
from .candidate import CandidateResult
from .choice import fastest
from .judge.comparison import Judge
from .measure.timing import Effort, measured
from .measure.workload import Workload
from .recipes.session_variants import variants

# The expected time in seconds that a process needs to load before it is measured.
_SECONDS_TO_LOAD = 2.0
_BLOCK_SECONDS = 0.2
_SHORT_BLOCK_SECONDS = 0.05
_FINALISTS = 2
# The time in seconds for extra measurement rounds, which run while a confidence interval is too wide. On a noisy
# machine, extra rounds are needed to prove that a candidate is faster.
_SECONDS_OF_CANDIDATES = 20.0
_SECONDS_OF_OPTIONS = 10.0
# A process holds the runtime and two copies of the model in memory: the model from the file, and the runtime's packed
# copy.
_RUNTIME_MB = 200
_COPIES = 2


@dataclass(kw_only=True)
class Search:
    """The measurements of one run. ``environment`` describes the machine of the last measurement, and is empty before
    the first measurement."""

    source: CandidateResult
    workload: Workload
    threads: int
    rounds: int
    cache: StageCache
    budget: Budget
    environment: Mapping[str, Any] = field(default_factory=dict)

    def best(self, rows: Sequence[CandidateResult]) -> CandidateResult:
        """Returns the fastest of the ``rows`` that passed and are measurably faster than the source. Returns the source
        if no row is measurably faster."""
        finalists = self._halved(self._fitting([row for row in rows if row.passed]))
        new = not finalists or any(row.measured is None for row in finalists)
        if self.budget.left >= self._seconds(len(finalists)) or (finalists and new):
            effort = self._long(len(finalists), _SECONDS_OF_CANDIDATES)
            self._measure(finalists, replace(effort, only_fastest=True))
        return fastest(self.source, finalists)

    def glance(self, rows: Sequence[CandidateResult]) -> CandidateResult:
        """Measures ``rows`` briefly, and returns the fastest of them that is measurably faster than the source. Returns
        the source if none is."""
        fitting = self._groups(rows)[0]
        self._measure(fitting, Effort(rounds=MIN_ROUNDS, block_seconds=_SHORT_BLOCK_SECONDS))
        faster = [row for row in fitting if row.passed and row.is_faster]
        return max(faster, key=_speedup, default=self.source)

    def vary_sessions(
        self,
        best: CandidateResult,
        rows: Sequence[CandidateResult],
        judge_of: Judge,
        max_drop: float,
        *,
        vary_threads: bool,
    ) -> tuple[CandidateResult, list[CandidateResult]]:
        """Tries other session options for the candidate ``best``. For the second best candidate, tries only the most
        promising options.

        Returns the new best candidate, and a row for each combination of candidate and options. Tries none beside other
        work, which takes cores, so that fewer threads would seem faster than they are on the machine alone.
        """
        others = [r for r in rows if r is not best and r.passed and r.measured is not None]
        faster = [r for r in others if r.is_faster and not r.missed_final]
        faster.sort(key=_speedup, reverse=True)
        bases = [best, *faster[:1]]
        made = [
            variant
            for base, most in zip(bases, (None, 1), strict=False)
            for variant in variants(base, self.workload.objective, cores=self.threads, vary_threads=vary_threads)[:most]
        ]
        if disturbed(self.environment.get("statistic"), self.environment.get("lost")):
            for row in made:
                row.skip("other work slows this machine down, and session options aren't tried beside it")
            return best, made
        if not made:
            return best, []
        tried = made[: self._fitting_beside(bases)]
        for row in made[len(tried) :]:
            row.skip(self.budget.reason("its session options were tried"), out_of_time=True)
        if not tried:
            return best, made
        for row in tried:
            assert row.artifact is not None
            try:
                judged(row, judge_of, row.artifact, row.options, max_drop, self.cache)
            except AccelError as error:
                row.reject(str(error), error)
        measurable = [base for base in bases if base is not self.source]
        for base in measurable:
            base.reason = ""
        passed = [row for row in tried if row.passed]
        beside = [[base, *(row for row in passed if row.base == base.name)] for base in bases]
        ready, *late = self._groups([row for rows in beside for row in rows if row is not self.source])
        for row in (row for group in late for row in group if row.base):
            row.skip("it doesn't fit into memory beside the others; free some")
        self._measure(ready, self._long(len(ready), _SECONDS_OF_OPTIONS))
        by_name = {base.name: base for base in (self.source, *bases)}
        for row in tried:
            base = by_name[row.base]
            # ``row`` is a copy of the candidate ``base`` with other session options. If ``base`` is faster than the
            # source, or is the source itself, ``row`` has to be faster than ``base``. In any case, ``fastest`` compares
            # ``row`` with the source.
            if row.passed and (base is self.source or base.is_faster):
                not_faster(row, base, self._floor())
        contenders = [row for row in (*measurable, *tried) if row.passed and not row.reason]
        return fastest(self.source, contenders), made

    def _fitting(self, rows: list[CandidateResult]) -> list[CandidateResult]:
        """Returns as many of ``rows`` as fit into memory at once.

        If memory is too small for all candidates, the candidates are timed in groups together with the source. Only the
        faster half of the candidates is kept, and the timing is repeated until the remaining candidates fit.
        """
        while len(rows) > 1 and self.budget.left > 0 and len(groups := self._groups(rows)) > 1:
            limit = self.budget.left if self.budget.limited else None
            for group in groups:
                self._measure(group, Effort(rounds=MIN_ROUNDS, block_seconds=_SHORT_BLOCK_SECONDS, limit=limit))
            ranked = sorted((r for r in rows if r.passed), key=_speedup, reverse=True)
            rows = ranked[: max(1, len(ranked) // 2)]
            for row in ranked[len(rows) :]:
                row.reason = f"slower than {rows[0].name} in a short measurement: they don't all fit in memory at once"
                row.missed_final = True
        return rows

    def _groups(self, rows: Sequence[CandidateResult]) -> list[list[CandidateResult]]:
        """Returns ``rows`` in groups, each of which fits into memory together with the source. A group has at least one
        row."""
        room = available_memory()
        groups: list[list[CandidateResult]] = [[]]
        left = first = math.inf if room is None else room / 1e6 - SOURCES * _megabytes(self.source)
        for row in rows:
            if groups[-1] and _megabytes(row) > left:
                groups.append([])
                left = first
            groups[-1].append(row)
            left -= _megabytes(row)
        return groups

    def _halved(self, rows: list[CandidateResult]) -> list[CandidateResult]:
        """Returns the rows for the long measurement, selected by successive halving if time is short."""
        if self.budget.left >= self._long_seconds(len(rows)):
            return rows
        # One candidate is measured in less time than usual, because a small model loads quickly.
        least = int(self.budget.left >= SECONDS_A_CANDIDATE / 2)
        fitting = max(least, int(self.budget.left // SECONDS_A_CANDIDATE) - SOURCES)
        for row in rows[fitting:]:
            row.skip(self.budget.reason("it was measured"), out_of_time=True)
        left = rows[:fitting]
        block_seconds = _SHORT_BLOCK_SECONDS
        while len(left) > _FINALISTS and self.budget.left > 0:
            self._measure(left, Effort(rounds=MIN_ROUNDS, block_seconds=block_seconds, limit=self.budget.left))
            ranked = sorted((r for r in left if r.passed), key=_speedup, reverse=True)
            kept = ranked[: max(_FINALISTS, -(-len(left) // 2))]
            for row in ranked[len(kept) :]:
                row.reason = f"slower than {kept[0].name} in a short measurement of {len(left)}"
                row.missed_final = True
            left = kept
            block_seconds *= 2
        return left

    def _long(self, count: int, seconds: float) -> Effort:
        """Returns the requested effort, reduced if necessary to fit the time budget."""
        effort = Effort(rounds=self.rounds, block_seconds=_BLOCK_SECONDS, seconds=seconds)
        if not self.budget.limited:
            return effort
        left = self.budget.left
        timing = max(0.0, left - (count + SOURCES) * _SECONDS_TO_LOAD)
        # The warm-up before a block takes half as long as the block.
        a_round = (count + SOURCES) * 2 * effort.block_seconds
        fitting = max(MIN_ROUNDS, min(self.rounds, int(timing / a_round)))
        # If not even the minimum number of rounds fits the time budget, the blocks get shorter.
        share = min(1.0, timing / (MIN_ROUNDS * a_round))
        block = max(_SHORT_BLOCK_SECONDS, share * effort.block_seconds)
        return Effort(rounds=fitting, block_seconds=block, seconds=min(seconds, timing), limit=left)

    def _long_seconds(self, count: int) -> float:
        """Returns the seconds that the requested effort takes for ``count`` candidates, and for their session
        options."""
        lane = _SECONDS_TO_LOAD + self.rounds * 2 * _BLOCK_SECONDS
        return 2 * (count + SOURCES) * lane + _SECONDS_OF_CANDIDATES + _SECONDS_OF_OPTIONS

    def _fitting_beside(self, bases: Sequence[CandidateResult]) -> int | None:
        """Returns how many rows there is time to measure beside ``bases``, or None for any number. After a Ctrl-C,
        there is time for none."""
        if self.budget.interrupted:
            return 0
        if not self.budget.limited:
            return None
        others = sum(base is not self.source for base in bases)
        return max(0, int(self.budget.left // SECONDS_A_CANDIDATE) - SOURCES - others)

    @staticmethod
    def _seconds(count: int) -> float:
        return (count + SOURCES) * SECONDS_A_CANDIDATE

    def _measure(self, rows: Sequence[CandidateResult], effort: Effort) -> None:
        """Measures ``rows``. If Ctrl-C interrupts the measurement, keeps the figures of an earlier measurement. If a
        row has no earlier figures, measures all rows briefly."""
        with self.budget.spending("measuring"):
            try:
                self.environment = measured(self.source, rows, self.workload, self.threads, effort, self.cache)
            except KeyboardInterrupt as error:
                self.budget.interrupt(error)
                if any(row.measured is None for row in (self.source, *rows)):
                    brief = Effort(rounds=MIN_ROUNDS, block_seconds=_SHORT_BLOCK_SECONDS, limit=self.budget.left)
                    self.environment = measured(self.source, rows, self.workload, self.threads, brief, self.cache)

    def _floor(self) -> float:
        return float(self.environment.get("noise_floor") or 0.0)


def _speedup(row: CandidateResult) -> float:
    """Returns the measured speedup of a candidate over the source. Speedups are compared instead of median times,
    because other work on the machine disturbs the median times more."""
    return float((row.measured or {})["speedup"])


def _megabytes(row: CandidateResult) -> float:
    """Returns an estimate of the memory in MB that the process of a candidate takes."""
    return _RUNTIME_MB + _COPIES * (row.megabytes or 0.0)


def faster_than(row: CandidateResult, base: CandidateResult, floor: float) -> bool:
    """Tells whether ``row`` is measurably faster than ``base`` in the rounds that timed both rows."""
    ratio = _compared(row, base)
    return ratio is not None and judge(ratio, floor) == "faster"


def not_faster(row: CandidateResult, base: CandidateResult, floor: float) -> None:
    """Sets the ``reason`` of ``row`` if ``row`` isn't measurably faster than ``base``. Also sets ``hidden_by_noise`` if
    noise may have hidden a speedup."""
    if faster_than(row, base, floor):
        return
    row.reason = f"not measurably faster than {base.name}"
    ratio = _compared(row, base)
    if ratio is not None and ratio.value > 1 + MIN_FLOOR:
        row.hidden_by_noise = True
        seems = f"it seems {ratio.value:.2f}x, {ratio.low:.2f} to {ratio.high:.2f}"
        row.reason += f" ({seems if floor <= TOO_NOISY_FLOOR else 'too noisy'}, noise floor {floor:.1%})"


def _compared(row: CandidateResult, base: CandidateResult) -> Ratio | None:
    """Returns the speedup of ``row`` over ``base``, or None if the rows weren't timed in the same rounds.

    Compares what the speedups over the source compare (see ``accel.timing.witnesses``). The fastest runs are not those
    of single rounds. If they decide, the ratio of the two speedups is returned, with the widest interval that their
    intervals allow.
    """
    import numpy as np

    if row.measured is None or base.measured is None:
        return None
    if row.measured.get("statistic") != base.measured.get("statistic"):  # from measurements beside other work or not
        return None
    values = "round_cpu_ms" if row.measured.get("statistic") == "cpu time" else "round_medians_ms"
    mine, theirs = (np.array(r.measured[values]) for r in (row, base) if r.measured)
    if len(mine) != len(theirs) or not len(mine):
        return None
    if row.measured.get("statistic") == "fast runs":
        (low, high), (base_low, base_high) = row.measured["ci95"], base.measured["ci95"]
        return Ratio(
            value=row.measured["speedup"] / base.measured["speedup"], low=low / base_high, high=high / base_low
        )
    return speedup(theirs, mine)
