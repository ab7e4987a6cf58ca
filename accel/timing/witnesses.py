"""Chooses what decides the verdicts: the medians of the blocks, the fastest runs, or the CPU time.

On a quiet machine, the medians decide. Beside other work, the medians depend on chance. Then the witness with the
smallest noise floor decides. The noise floor comes from the baseline alone, so the choice prefers no candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from .fast_runs import FastRuns
from .statistics import NOISY_FLOOR, Ratio, floor_of, round_medians, speedup

if TYPE_CHECKING:
    import numpy as np

    from .blocks import Block

Statistic = Literal["median", "fast runs", "cpu time"]

# A process that could use this share more or less than one core, as a mean over a block, keeps one core busy.
ONE_CORE = 0.03


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The blocks of a process, one for each round. ``feeds`` is the number of its sets of inputs. ``throughput`` is
    true if the throughputs of concurrent runs are compared. ``on_gpu`` is true if the process has a GPU open."""

    blocks: Sequence[Block]
    feeds: int = 1
    throughput: bool = False
    on_gpu: bool = False

    @property
    def times(self) -> list[np.ndarray]:
        """Returns an array for each round with the nanoseconds of every run."""
        return [block.times for block in self.blocks]

    def values(self) -> np.ndarray:
        """Returns a float64 array with one time in milliseconds for each round: the median time of the round's runs. If
        throughputs are compared, the array has the total time of each round divided by the number of runs in the round.
        """
        import numpy as np

        if not self.throughput:
            return round_medians(self.times)
        return np.array([block.ms_a_run for block in self.blocks])

    def cpu_values(self) -> np.ndarray:
        """Returns a float64 array with the CPU milliseconds of a run in each round."""
        import numpy as np

        return np.array([block.cpu_ms_a_run for block in self.blocks])

    @property
    def keeps_one_core_busy(self) -> bool:
        """Tells whether a run takes as long as its CPU time on a quiet machine.

        This holds if the process could use exactly one core in most blocks. A process with several threads could use
        several cores, and its threads may spin while they wait for one another, which is CPU time without work. A
        process that waits for a GPU, a disk or another process could use less than a core.
        """
        return not (self.on_gpu or self.throughput) and abs(self.cores - 1) <= ONE_CORE

    @property
    def cores(self) -> float:
        """Returns the number of cores that the process could use, as the median of its blocks."""
        import numpy as np

        return float(np.median([block.cores for block in self.blocks]))


class Witness(Protocol):
    """Compares models by one statistic. ``itself`` is the speedup of one process of the baseline over the other."""

    @property
    def statistic(self) -> Statistic: ...

    @property
    def itself(self) -> Ratio: ...

    def speedup(self, candidate: Timed) -> Ratio:
        """Returns the speedup of a candidate over the baseline. A candidate that was given up early is compared in its
        own rounds."""


@dataclass(frozen=True)
class _ByRound:
    """Compares one value of each round. The baseline's value in a round is the geometric mean of the values of both
    processes. If the baseline were a single process, the random speed of this process would affect every ratio."""

    first: Timed
    second: Timed
    statistic: Statistic

    def _values(self, timed: Timed) -> np.ndarray:
        return timed.cpu_values() if self.statistic == "cpu time" else timed.values()

    @cached_property
    def itself(self) -> Ratio:
        return speedup(self._values(self.first), self._values(self.second))

    @cached_property
    def _baseline(self) -> np.ndarray:
        import numpy as np

        return np.asarray(np.sqrt(self._values(self.first) * self._values(self.second)))

    def speedup(self, candidate: Timed) -> Ratio:
        if candidate is self.first:
            return Ratio(value=1.0, low=1.0, high=1.0)
        values = self._values(candidate)
        return speedup(self._baseline[: len(values)], values)


@dataclass(frozen=True)
class _Fast:
    """Compares the fastest runs of all rounds (see ``accel.timing.fast_runs``)."""

    first: Timed
    runs: FastRuns
    statistic: Statistic = "fast runs"

    @property
    def itself(self) -> Ratio:
        return self.runs.itself

    def speedup(self, candidate: Timed) -> Ratio:
        if candidate is self.first:
            return Ratio(value=1.0, low=1.0, high=1.0)
        return self.runs.speedup(candidate.times)


def witness(first: Timed, second: Timed, candidates: Sequence[Timed], *, seed: int = 0) -> Witness:
    """Returns the witness that decides. ``first`` and ``second`` are the two processes of the baseline."""
    by_median = _ByRound(first, second, "median")
    floor = floor_of(by_median.itself)
    if first.throughput:
        return by_median
    # Several feeds have several fastest times.
    runs = FastRuns(first=first.times, second=second.times, seed=seed) if first.feeds == 1 else None
    stalled = runs is not None and runs.stalled
    if floor <= NOISY_FLOOR and not stalled:
        return by_median
    others: list[Witness] = [_Fast(first, runs)] if runs is not None else []
    if all(timed.keeps_one_core_busy for timed in (first, second, *candidates)):
        others.append(_ByRound(first, second, "cpu time"))
    best = min(others, key=lambda one: floor_of(one.itself), default=None)
    return best if best is not None and (stalled or floor_of(best.itself) < floor) else by_median


def lost(timed: Sequence[Timed]) -> float:
    """Returns the share of the cores that other work took from the processes, as the median of all blocks."""
    import numpy as np

    shares = [block.lost for one in timed for block in one.blocks]
    return float(np.median(shares)) if shares else 0.0
