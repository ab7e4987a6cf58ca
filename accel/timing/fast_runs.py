"""Compares the fastest runs of two models, for a machine on which other work slows down most runs.

Other work stops a thread of a run for milliseconds, and thread pools that spin make such a run up to a hundred times
as long. The median of a block is then either the time of an undisturbed run or a multiple of it, by chance. But even
beside four busy processes on two cores, some runs are undisturbed, and these are the fastest runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from .statistics import Ratio, bootstrapped, floor_of

if TYPE_CHECKING:
    import numpy as np

# The share of the runs that count as undisturbed. The slowest of these runs stands for a model. A long run is more
# likely to be disturbed than a short run. With a share of 5%, beside busy processes on two cores, a model with twice
# the work seemed three times as slow.
SHARE = 0.005
# The very fastest run depends on chance, so at least ``_FEWEST`` runs count as undisturbed, but no more than
# ``_MOST`` of the runs.
_FEWEST = 3
_MOST = 0.05
# If the median block of the baseline is this many times as slow as the undisturbed runs, the median of another model
# may be disturbed less, and would make this model seem faster.
_STALLED = 5.0
_RESAMPLES = 2000
# To save time, only the fastest runs of a block are looked at, and at most ``_POINTS`` quantiles of them.
_LOOKED_AT = 0.15
_POINTS = 50


@dataclass(frozen=True, kw_only=True)
class FastRuns:
    """The runs of two processes of the baseline. ``first`` and ``second`` hold an array for each round, with the
    nanoseconds of each run."""

    first: Sequence[np.ndarray]
    second: Sequence[np.ndarray]
    seed: int = 0

    @cached_property
    def itself(self) -> Ratio:
        """The speedup of the second process of the baseline over the first process."""
        draws = self._draws(len(self.first))
        ratios = _fast(self.first, draws) / _fast(self.second, draws)
        return bootstrapped(float(ratios[0]), ratios[1:], len(self.first))

    @property
    def floor(self) -> float:
        """Returns the noise floor as a fraction, computed as for medians (see ``statistics.floor_of``)."""
        return floor_of(self.itself)

    @property
    def stalled(self) -> bool:
        """Tells whether most blocks of the baseline are so slow that no block median can be trusted."""
        import numpy as np

        rounds = [*self.first, *self.second]
        undisturbed = np.quantile(np.concatenate(rounds), _MOST)
        return bool(np.median([np.median(times) for times in rounds]) > _STALLED * undisturbed)

    def speedup(self, rounds: Sequence[np.ndarray]) -> Ratio:
        """Returns the speedup of a candidate over the baseline, with its 95% interval. ``rounds`` holds the candidate's
        runs in the first rounds of the baseline.

        The time of a model is the ``SHARE`` quantile of all its runs, or, if there are few runs, the time of the third
        fastest run. The time of the baseline is the geometric mean of the times of its two processes. The interval is a
        bootstrap interval in which each resample draws whole rounds, because the runs of a round are disturbed
        together.
        """
        import numpy as np

        count = len(rounds)
        draws = self._draws(count)
        baseline = np.sqrt(_fast(self.first[:count], draws) * _fast(self.second[:count], draws))
        ratios = baseline / _fast(rounds, draws)
        return bootstrapped(float(ratios[0]), ratios[1:], count)

    def _draws(self, rounds: int) -> np.ndarray:
        """Returns int64[resamples + 1, rounds], which counts how often each resample draws each round. The first row
        draws each round once."""
        import numpy as np

        drawn = np.random.default_rng(self.seed).integers(0, rounds, size=(_RESAMPLES, rounds))
        counts = np.zeros((_RESAMPLES + 1, rounds), dtype=np.int64)
        np.add.at(counts, (np.arange(1, _RESAMPLES + 1)[:, None], drawn), 1)
        counts[0] = 1
        return counts


def _fast(rounds: Sequence[np.ndarray], draws: np.ndarray) -> np.ndarray:
    """Returns float64[resamples + 1], the time in nanoseconds of the slowest undisturbed run in each resample."""
    import numpy as np

    found = [_fastest_of(times) for times in rounds]
    weights = np.concatenate([np.full(len(own), weight) for own, weight in found])
    owner = np.repeat(np.arange(len(rounds)), [len(own) for own, _ in found])
    values = np.concatenate([own for own, _ in found])
    order = np.argsort(values)
    reached = np.cumsum(draws[:, owner[order]] * weights[order], axis=1)
    runs = draws @ np.array([len(times) for times in rounds])
    wanted = np.maximum(SHARE * runs, np.minimum(_FEWEST, _MOST * runs))
    return np.asarray(values[order][np.argmax(reached >= wanted[:, None], axis=1)])


def _fastest_of(times: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the fastest runs of a block, or quantiles of them, and the number of runs for which each value stands."""
    import numpy as np

    count = max(min(len(times), _FEWEST), ceil(_LOOKED_AT * len(times)))
    fastest = np.sort(np.asarray(times, float))[:count]
    if count <= _POINTS:
        return fastest, 1.0
    return fastest[((np.arange(_POINTS) + 0.5) * count / _POINTS).astype(int)], count / _POINTS
