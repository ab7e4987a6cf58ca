"""Proves that the fastest runs give the right verdict on simulated machines on which other work disturbs most runs."""

from __future__ import annotations

import numpy as np
import pytest

from accel.timing.fast_runs import FastRuns
from accel.timing.statistics import floor_of, judge, round_medians, speedup

ROUNDS = 12
MACHINES = 100


def disturbed(rng: np.random.Generator, ms: float) -> list[np.ndarray]:
    """Returns the runs of a process beside other work. In two of five rounds, all runs take 120 ms. In the other
    rounds, some of the runs take up to 20 times as long as the others."""
    rounds = []
    for _ in range(ROUNDS):
        if rng.uniform() < 0.4:
            rounds.append(rng.normal(120.0, 1.0, 4) * 1e6)
            continue
        times = ms * np.exp(np.abs(rng.normal(0, 0.03, rng.integers(8, 120))))
        slow = rng.uniform(size=len(times)) < 0.3
        times[slow] *= rng.uniform(1.5, 20, slow.sum())
        rounds.append(times * 1e6)
    return rounds


@pytest.mark.parametrize(("ms", "wanted"), [(1.0, "no measurable difference"), (1.5, "slower"), (0.5, "faster")])
def test_verdicts_beside_other_work(ms: float, wanted: str) -> None:
    """Fails if more than one verdict in twenty is wrong. The medians of the blocks can't give these verdicts, because
    the medians of the same model differ by a factor of 100."""
    right, by_medians = 0, 0
    for seed in range(MACHINES):
        rng = np.random.default_rng(seed)
        first, second, candidate = disturbed(rng, 1.0), disturbed(rng, 1.0), disturbed(rng, ms)
        fast = FastRuns(first=first, second=second)
        ratio = fast.speedup(candidate)
        right += judge(ratio, fast.floor) == wanted
        assert ratio.low <= ratio.value <= ratio.high
        by_medians += floor_of(speedup(round_medians(first), round_medians(second))) < 0.5
    assert right >= 0.95 * MACHINES
    assert by_medians < 0.5 * MACHINES


def test_the_speedup_is_the_ratio_of_the_undisturbed_times() -> None:
    """Fails if the ratio is inverted, or if a long block counts no more than a short block."""
    rng = np.random.default_rng(0)
    first, second, candidate = disturbed(rng, 1.0), disturbed(rng, 1.0), disturbed(rng, 0.5)
    assert FastRuns(first=first, second=second).speedup(candidate).value == pytest.approx(2, rel=0.02)
    # Two fast runs among many aren't the time of a model.
    lucky = [np.full(400, 1e6), *([np.array([1e3])] * 2)]
    usual = [np.full(400, 1e6)] * 3
    assert FastRuns(first=lucky, second=lucky).speedup(usual).value == pytest.approx(1, rel=1e-6)


def test_a_baseline_that_stalls_alike_in_both_processes() -> None:
    """Fails if the benchmark trusts medians because both processes of the baseline stalled in most rounds. The medians
    of the baseline then agree, and a model that stalled less often would seem a hundred times as fast."""
    good, bad = np.full(50, 1e6), np.full(4, 1e8)
    assert FastRuns(first=[bad, bad, bad, good, bad], second=[bad, bad, good, bad, bad]).stalled
    assert not FastRuns(first=[good, bad, good, good, bad], second=[bad, good, good, bad, good]).stalled


def test_a_candidate_with_fewer_rounds_is_compared_in_its_own_rounds() -> None:
    """Fails if a candidate that was given up early is compared with rounds in which it wasn't timed."""
    base = [np.full(50, 1e6)] * 5 + [np.full(50, 1e5)] * 5
    ratio = FastRuns(first=base, second=base).speedup([np.full(50, 1e6)] * 5)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1, 1, 1))


def test_long_runs_are_undisturbed_less_often_and_still_compared_rightly() -> None:
    """Fails if twice the work seems to take more than 2.1 times as long, because other work interrupts a long run more
    often than a short run. The fastest 5% of the runs of the longer model are all disturbed."""
    rng = np.random.default_rng(0)

    def interrupted(ms: float) -> list[np.ndarray]:
        """Interruptions of 1 ms or more come at random, after 0.4 ms in the mean."""
        counts = rng.poisson(ms / 0.4, size=(ROUNDS, 300))
        return list((ms + counts * rng.uniform(1, 2, counts.shape)) * 1e6)

    first, second, twice = interrupted(1.0), interrupted(1.0), interrupted(2.0)
    assert np.quantile(np.concatenate(twice), 0.05) > 1.2 * 2e6
    assert FastRuns(first=first, second=second).speedup(twice).value == pytest.approx(0.5, rel=0.05)
