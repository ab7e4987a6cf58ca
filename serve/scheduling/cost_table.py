"""Measures the duration of a run for each number of rows and each length of the longest row. The measurement happens
when a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from accel.errors import BadFeeds

if TYPE_CHECKING:
    from accel.runtimes.base import Session

# A shape whose first run takes less than _REPEAT_BELOW seconds is run again, because first runs are often slower. A
# short run is repeated until the runs together take _ENOUGH seconds, at most _MOST_RUNS times. The shortest time is
# kept, because an interruption by another process may take longer than the run.
_REPEAT_BELOW = 0.25
_ENOUGH = 0.002
_MOST_RUNS = 10


@dataclass(frozen=True)
class CostTable:
    """``seconds[i][j]`` is the duration of one run of ``rows[i]`` rows padded to ``lengths[j]``.

    Values between the measured rows and lengths are interpolated. Beyond the largest measured sizes, the duration grows
    in proportion to the size.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def proportional(cls, overhead: int = 32) -> CostTable:
        """Returns the table of a model that wasn't measured. A run costs ``overhead`` microseconds plus one microsecond
        for each position, padding included."""
        rows, lengths = (1, 4096), (1, 4096)
        return cls(rows, lengths, tuple(tuple((n * length + overhead) * 1e-6 for length in lengths) for n in rows))

    @cached_property
    def _table(self) -> np.ndarray:
        # A smaller input can't really take longer than a larger input. If noise makes the measured time of a smaller
        # input longer, the smaller input gets the time of the larger input.
        table = np.asarray(self.seconds, dtype=float)[::-1, ::-1]
        return np.minimum.accumulate(np.minimum.accumulate(table, axis=0), axis=1)[::-1, ::-1]

    def by_rows(self, length: int, most: int) -> np.ndarray:
        """Returns an array of ``most + 1`` times in seconds. Element n is the time of a run of n rows padded to
        ``length``."""
        beyond = max(1.0, length / self.lengths[-1])
        at_length = np.array([np.interp(length, self.lengths, row) for row in self._table]) * beyond
        n = np.arange(most + 1)
        found: np.ndarray = np.interp(n, self.rows, at_length) * np.maximum(1.0, n / self.rows[-1])
        return found


def measure_costs(
    session: Session,
    *,
    dim: str,
    batch: str,
    sizes: Sequence[int],
    lengths: Sequence[int],
    budget: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measures runs of example inputs at every batch size and length, smallest first, for about ``budget`` seconds.

    The times of unmeasured shapes are computed as ``a + b * positions + c * positions * length``, fitted to the
    measured times. The term ``c * positions * length`` is the cost of attention.
    """
    table = np.full((len(sizes), len(lengths)), np.nan)
    cells = sorted((rows * length, i, j) for i, rows in enumerate(sizes) for j, length in enumerate(lengths))
    end = clock() + budget
    per_token = 0.0
    for count, (tokens, i, j) in enumerate(cells):
        # The three smallest shapes are always measured, because the fit has three coefficients.
        if count >= 3 and clock() + tokens * per_token > end:
            continue
        feeds = session.example_inputs(**{batch: sizes[i], dim: lengths[j]})
        best, runs = np.inf, 0
        try:
            while runs < 2 or (runs * best < _ENOUGH and runs < _MOST_RUNS):
                start = clock()
                session.run(feeds)
                best, runs = min(best, clock() - start), runs + 1
                if best > _REPEAT_BELOW:
                    break
        except BadFeeds:  # no batch has a shape outside the engine's optimization profiles
            continue
        table[i, j] = best
        per_token = best / tokens
    return CostTable(tuple(sizes), tuple(lengths), tuple(map(tuple, _filled(table, sizes, lengths).tolist())))


def _filled(table: np.ndarray, sizes: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    known = ~np.isnan(table)
    if known.all():
        return table
    n, length = np.meshgrid(np.asarray(sizes, float), np.asarray(lengths, float), indexing="ij")
    terms = np.stack([np.ones_like(n), n * length, n * length**2], axis=-1)
    factors, *_ = np.linalg.lstsq(terms[known], table[known], rcond=None)
    return np.where(known, table, np.maximum(terms @ np.maximum(factors, 0.0), table[known].max()))


def grid(low: int, high: int) -> list[int]:
    """Returns ``low``, ``2 * low``, ``4 * low`` and so on below ``high``, and then ``high``."""
    found = [low]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    return found if high <= low else [*found, high]
