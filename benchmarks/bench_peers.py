"""Computes verdicts with the statistics of other benchmark tools, from the samples of `accel bench`.

Each function takes the samples of a baseline and of a candidate: one array for each block, with the nanoseconds of each
run. The functions return ``faster`` or ``slower``, as the tool would judge the candidate, or ``no measurable
difference``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

Samples = Sequence[np.ndarray]
_SAME = "no measurable difference"


def _verdict(candidate_over_baseline: float, *, significant: bool) -> str:
    if not significant:
        return _SAME
    return "slower" if candidate_over_baseline > 1 else "faster"


def pyperf(baseline: Samples, candidate: Samples) -> str:
    """Compares the means of the blocks with Student's t-test at 95%, as ``pyperf compare_to`` does. pyperf's values are
    means over the loops of one measurement, which is a block here."""
    ours, theirs = ([float(block.mean()) for block in side] for side in (candidate, baseline))
    found = stats.ttest_ind(ours, theirs)
    return _verdict(float(np.mean(ours) / np.mean(theirs)), significant=bool(found.pvalue < 0.05))


def hyperfine(baseline: Samples, candidate: Samples) -> str:
    """Compares the mean times of all runs. The difference counts if the ratio differs from 1 by more than the standard
    deviation that hyperfine prints beside the ratio, which is propagated from the two standard deviations."""
    ours, theirs = np.concatenate(list(candidate)), np.concatenate(list(baseline))
    ratio = float(ours.mean() / theirs.mean())
    spread = ratio * float(np.hypot(ours.std(ddof=1) / ours.mean(), theirs.std(ddof=1) / theirs.mean()))
    return _verdict(ratio, significant=abs(ratio - 1) > spread)


def asv(baseline: Samples, candidate: Samples) -> str:
    """Compares the means of the blocks with the Mann-Whitney U test at p < 0.002, as ``asv compare`` does. The medians
    have to differ by a factor of 1.1, which is asv's default."""
    ours, theirs = ([float(block.mean()) for block in side] for side in (candidate, baseline))
    p = stats.mannwhitneyu(ours, theirs, alternative="two-sided").pvalue
    ratio = float(np.median(ours) / np.median(theirs))
    return _verdict(ratio, significant=bool(p < 0.002) and not 1 / 1.1 < ratio < 1.1)


def criterion(baseline: Samples, candidate: Samples) -> str:
    """Compares the means of the blocks with a bootstrapped t-test at 95%, as criterion does. The change of the mean has
    to be above criterion's noise threshold of 1%, with its whole bootstrap interval."""
    rng = np.random.default_rng(0)
    ours, theirs = (np.array([block.mean() for block in side]) for side in (candidate, baseline))

    def t_values(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        error = np.sqrt(first.var(ddof=1, axis=-1) / first.shape[-1] + second.var(ddof=1, axis=-1) / second.shape[-1])
        return np.asarray((first.mean(axis=-1) - second.mean(axis=-1)) / error)

    pooled = np.concatenate([ours, theirs])
    drawn = rng.choice(pooled, size=(10_000, len(pooled)))
    under_null = t_values(drawn[:, : len(ours)], drawn[:, len(ours) :])
    p = float(np.mean(np.abs(under_null) >= abs(float(t_values(ours, theirs)))))
    means = [rng.choice(side, size=(10_000, len(side))).mean(axis=1) for side in (ours, theirs)]
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    ratio = float(ours.mean() / theirs.mean())
    return _verdict(ratio, significant=p < 0.05 and bool(low > 1.01 or high < 0.99))


PEERS: dict[str, Callable[[Samples, Samples], str]] = {
    "pyperf": pyperf,
    "hyperfine": hyperfine,
    "asv": asv,
    "criterion": criterion,
}
