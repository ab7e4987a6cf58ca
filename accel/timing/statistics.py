"""Computes percentiles, the paired speedup with its interval, the noise floor and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, exp, log, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["faster", "slower", "no measurable difference", "too noisy", "baseline", "identical"]

# With fewer rounds, even the interval from the smallest to the largest median contains the true value in less than 95%
# of cases.
MIN_ROUNDS = 5
# The speeds of two processes of one model differ by up to 2% for the whole lifetime of the processes. The two processes
# have different memory layouts, and the process loaded last tends to be faster. More rounds in the same processes don't
# average out the difference between the processes. A single pair of processes may happen to differ by less than 2%, so
# the noise floor is set to at least 2%.
MIN_FLOOR = 0.02
# Above this noise floor, a benchmark may miss relevant effects, such as a quantized model that is 10% faster.
NOISY_FLOOR = 0.05
# Above this noise floor, tables show only significant speedups, because other speedups mean nothing.
TOO_NOISY_FLOOR = 1.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The times of all iterations of all rounds, in milliseconds."""

    median_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    iterations: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A speedup with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Returns the width of the interval as ln(high / low). A width of 0.05 means an interval of about ±2.5%."""
        return log(self.high / self.low)


def summarize(rounds: Sequence[np.ndarray]) -> Summary:
    """Returns the summary of ``rounds``, which holds one array per round with the time of each run in nanoseconds."""
    import numpy as np

    times = np.concatenate(list(rounds)) / 1e6
    median, p90, p99 = np.percentile(times, [50, 90, 99])
    return Summary(
        median_ms=float(median),
        p90_ms=float(p90),
        p99_ms=float(p99),
        mean_ms=float(times.mean()),
        iterations=len(times),
    )


def round_medians(rounds: Sequence[np.ndarray]) -> np.ndarray:
    """Returns float64[rounds], the median of each round in ms."""
    import numpy as np

    return np.array([np.median(r) for r in rounds], dtype=np.float64) / 1e6


def speedup(reference: np.ndarray, candidate: np.ndarray) -> Ratio:
    """Returns the paired speedup of ``candidate`` over ``reference``. ``candidate`` and ``reference`` are
    float64[rounds] with one value for each of the same rounds, such as the medians of the blocks.

    The blocks of one round run shortly after each other, so a slow period of the machine affects both values, but not
    their ratio. Rounds are the unit of repetition, as in Kalibera and Jones, Rigorous Benchmarking in Reasonable Time,
    ISMM 2013. The speedup is the median of the ratios, and ``sign_interval`` is its interval.
    """
    import numpy as np

    ratios = np.sort(np.log(reference / candidate))
    low, high = sign_interval(ratios)
    return Ratio(value=exp(np.median(ratios)), low=exp(low), high=exp(high))


def sign_interval(ordered: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the interval of the median of the sorted values ``ordered``: all values that a sign test doesn't reject.

    The interval depends on the ranks of the values alone, so the sizes of outliers don't matter. Between two ranks, the
    ends are interpolated (Hettmansperger and Sheather, Confidence Intervals Based on Interpolated Order Statistics,
    Statistics & Probability Letters 4, 1986). With 5 values, the interval from the smallest to the largest value
    contains the median in 94% of cases, and with fewer values less often.
    """
    count = len(ordered)
    # The values at the ranks ``cut`` and ``count + 1 - cut`` enclose the median with the probability ``inside``.
    cut, inside = 1, 1 - 2 * 0.5**count
    if inside <= confidence:
        return float(ordered[0]), float(ordered[-1])
    while (narrower := inside - 2 * comb(count, cut) * 0.5**count) >= confidence:
        cut, inside = cut + 1, narrower
    share = (inside - confidence) / (inside - narrower)
    weight = (count - cut) * share / (cut + (count - 2 * cut) * share)
    low = (1 - weight) * ordered[cut - 1] + weight * ordered[cut]
    high = (1 - weight) * ordered[-cut] + weight * ordered[-cut - 1]
    return float(low), float(high)


def bootstrapped(value: float, resampled: np.ndarray, rounds: int) -> Ratio:
    """Returns ``value`` with its 95% interval. ``resampled`` is float64[resamples], the value in resamples of
    ``rounds`` rounds. The interval always contains ``value``."""
    import numpy as np

    tail = tail_probability(rounds)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Ratio(value=value, low=min(float(low), value), high=max(float(high), value))


def tail_probability(rounds: int, confidence: float = 0.95) -> float:
    """Returns the tail probability of the bootstrap interval, which is Φ(-√(n/(n-1)) · t(n-1)) for n rounds.

    The plain percentiles (2.5% and 97.5%) give too narrow an interval for small n. With 7 rounds, the interval of the
    plain percentiles contains the true median in 88 of 100 cases. Hesterberg derives the expanded percentile interval
    (What Teachers Should Know About the Bootstrap, The American Statistician 69(4), 2015).
    """
    if rounds < 2:
        return 0.0
    quantile = student_quantile(1 - (1 - confidence) / 2, rounds - 1)
    return NormalDist().cdf(-sqrt(rounds / (rounds - 1)) * quantile)


def student_quantile(probability: float, freedom: int) -> float:
    """Returns a quantile of Student's t distribution by a series in 1/freedom (Abramowitz and Stegun, 26.7.5).

    The relative error is below 0.5% for 4 or more degrees of freedom.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    total: float = z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))
    return total


def floor_of(itself: Ratio) -> float:
    """Returns the noise floor as a fraction. ``itself`` is the speedup of one baseline process over the other.

    The floor is the distance from 1 to the farther end of the interval of ``itself``, and at least ``MIN_FLOOR``.
    Effects inside this interval occur even between identical processes. The ends of the interval are quantiles of the
    rounds, so a few outliers don't move the floor.
    """
    return max(MIN_FLOOR, exp(max(abs(log(itself.low)), abs(log(itself.high)))) - 1)


def judge(ratio: Ratio, floor: float) -> Verdict:
    """Returns ``faster`` or ``slower`` if the interval excludes 1 and the effect is above the noise floor. For any
    other effect, returns ``too noisy`` if the noise floor is above ``TOO_NOISY_FLOOR``, else ``no measurable
    difference``."""
    if ratio.low > 1 and ratio.value > 1 + floor:
        return "faster"
    if ratio.high < 1 and ratio.value < 1 / (1 + floor):
        return "slower"
    return "too noisy" if floor > TOO_NOISY_FLOOR else "no measurable difference"


def is_narrow(ratio: Ratio, target: float) -> bool:
    """Tells whether the width of the interval is at most ``target``, or at most a quarter of the effect. Ignores the
    verdict, because a benchmark that stops at the first verdict reports false verdicts.
    """
    return ratio.width <= max(target, 0.25 * abs(log(ratio.value)))
