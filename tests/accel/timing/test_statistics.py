"""Proves that the verdicts are right on simulated machines with drift, heavy tails and randomly faster processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.timing.statistics import (
    MIN_FLOOR,
    MIN_ROUNDS,
    Ratio,
    floor_of,
    is_narrow,
    judge,
    round_medians,
    sign_interval,
    speedup,
    student_quantile,
    summarize,
    tail_probability,
)

ROUNDS = 9
RUNS = 200  # the number of simulated benchmarks per test


class Machine:
    """Simulates a machine with a drifting speed, slow rounds, single slow runs, and processes of different speeds."""

    def __init__(self, seed: int, rounds: int, *, process_luck: float = 0.005, block_noise: float = 0.01) -> None:
        self.rng = np.random.default_rng(seed)
        self.process_luck, self.block_noise = process_luck, block_noise
        position = np.linspace(0, 1, rounds)
        drift = self.rng.uniform(-0.2, 0.2) * position + 0.05 * np.sin(2 * np.pi * (position + self.rng.uniform()))
        busy = np.where(self.rng.uniform(size=rounds) < 0.2, self.rng.uniform(1.1, 1.8, rounds), 1.0)
        self.rounds = np.exp(drift) * busy  # the slowdown is the same for all processes in a round

    def run(self, milliseconds: float, iterations: int = 40) -> list[np.ndarray]:
        """Returns the run times of a process in nanoseconds as int64, one array per round. An undisturbed run takes
        ``milliseconds``."""
        own = 1 + self.rng.normal(0, self.process_luck)
        found = []
        for slow in self.rounds:
            base = milliseconds * own * slow * (1 + self.rng.normal(0, self.block_noise))
            times = base * np.exp(np.abs(self.rng.normal(0, 0.02, iterations)))
            spikes = self.rng.uniform(size=iterations) < 0.03
            times[spikes] *= 1 + self.rng.pareto(1.5, spikes.sum())
            found.append((times * 1e6).astype(np.int64))
        return found


def baseline(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the values of a baseline of two processes, and the noise floor."""
    return np.sqrt(first * second), floor_of(speedup(first, second))


def verdict_of(machine: Machine, slower_by: float, milliseconds: float = 5.0) -> tuple[str, Ratio]:
    """Returns the verdict on a candidate that takes (1 + slower_by) times as long as the baseline."""
    first, second = (round_medians(machine.run(milliseconds)) for _ in range(2))
    candidate = round_medians(machine.run(milliseconds * (1 + slower_by)))
    both, floor = baseline(first, second)
    ratio = speedup(both, candidate)
    return judge(ratio, floor), ratio


@pytest.mark.parametrize("rounds", [MIN_ROUNDS, 7, ROUNDS, 20])
def test_a_model_against_itself_is_called_different_at_most_once_in_twenty(rounds: int) -> None:
    """Fails if the verdict ignores the baseline's own noise and depends on the interval alone."""
    verdicts = Counter(verdict_of(Machine(seed, rounds), 0.0)[0] for seed in range(RUNS))
    assert RUNS - verdicts["no measurable difference"] <= RUNS / 20, verdicts


def test_on_a_machine_without_luck_or_floor_the_interval_alone_is_wrong_at_most_as_often_as_it_says() -> None:
    """Checks that the 95% interval contains the true ratio in at least 94% of the benchmarks. With 7 rounds, an
    interval of plain percentiles (2.5% and 97.5%) would contain the true ratio in only 88% of the benchmarks."""
    outside = 0
    for seed in range(600):
        machine = Machine(seed, 7, process_luck=0.0)
        ratio = speedup(round_medians(machine.run(5.0)), round_medians(machine.run(5.0)))
        outside += not ratio.low <= 1 <= ratio.high
    assert outside / 600 <= 0.06, outside


def test_an_injected_ten_percent_delay_is_found() -> None:
    """Checks that a delay of 10% is found in 95% of the benchmarks. The delay is missed if rounds aren't compared as
    pairs, or if the noise floor is too high. Also fails if the slower candidate is called faster."""
    verdicts = Counter(verdict_of(Machine(seed, ROUNDS), 0.10)[0] for seed in range(RUNS))
    assert verdicts["slower"] >= 0.95 * RUNS, verdicts
    assert verdicts["faster"] == 0


def test_a_faster_candidate_is_found_and_its_speedup_is_right() -> None:
    """Fails if the speedup is the inverse ratio (candidate / baseline), or if the drift of the machine biases the
    speedup."""
    found = [verdict_of(Machine(seed, ROUNDS), -0.5) for seed in range(20)]
    assert {verdict for verdict, _ in found} == {"faster"}
    assert np.median([ratio.value for _, ratio in found]) == pytest.approx(2.0, rel=0.01)


def test_a_noisy_machine_widens_the_floor_instead_of_inventing_differences() -> None:
    """Checks that the noise floor rises with the difference between two processes of the baseline."""
    quiet, noisy = ([], [])
    for seed in range(40):
        for found, luck, noise in ((quiet, 0.0, 0.002), (noisy, 0.03, 0.08)):
            machine = Machine(seed, ROUNDS, process_luck=luck, block_noise=noise)
            found.append(baseline(round_medians(machine.run(5.0)), round_medians(machine.run(5.0)))[1])
    assert np.median(quiet) == MIN_FLOOR
    assert np.median(noisy) > 0.04


def test_one_unlucky_process_of_the_baseline_makes_nothing_faster() -> None:
    """Fails if the baseline's times come from a single process. If the baseline ran in only one process, and this
    process were 4% slower by chance, every candidate would seem 4% faster."""
    verdicts = Counter()
    for seed in range(50):
        machine = Machine(seed, ROUNDS, process_luck=0.0, block_noise=0.003)
        unlucky, other = round_medians(machine.run(5.2)), round_medians(machine.run(5.0))
        both, floor = baseline(unlucky, other)
        verdicts[judge(speedup(both, round_medians(machine.run(5.0))), floor)] += 1
    assert verdicts == {"no measurable difference": 50}


def test_a_verdict_needs_both_the_interval_and_the_floor() -> None:
    """Fails if the verdict is "faster" or "slower" although the interval contains 1 or the effect is below the noise
    floor."""
    assert judge(Ratio(value=1.20, low=1.10, high=1.30), 0.05) == "faster"
    assert judge(Ratio(value=1.20, low=0.99, high=1.30), 0.05) == "no measurable difference"
    assert judge(Ratio(value=1.04, low=1.03, high=1.05), 0.05) == "no measurable difference"
    assert judge(Ratio(value=0.80, low=0.75, high=0.85), 0.05) == "slower"
    assert judge(Ratio(value=0.80, low=0.75, high=1.01), 0.05) == "no measurable difference"
    assert judge(Ratio(value=0.97, low=0.96, high=0.98), 0.05) == "no measurable difference"


def test_above_a_noise_floor_of_100_percent_it_is_too_noisy() -> None:
    """Tests noise floors above 100%. If the effect is below the noise floor, the verdict must be "too noisy". If the
    effect is above the noise floor, the verdict must be "faster" or "slower"."""
    assert judge(Ratio(value=189.8, low=10.2, high=3655.8), 401.923) == "too noisy"
    assert judge(Ratio(value=1.0, low=0.9, high=1.1), 1.01) == "too noisy"
    assert judge(Ratio(value=1.0, low=0.9, high=1.1), 1.0) == "no measurable difference"
    assert judge(Ratio(value=4.0, low=3.0, high=5.0), 1.5) == "faster"
    assert judge(Ratio(value=0.2, low=0.1, high=0.3), 1.5) == "slower"


@pytest.mark.parametrize("count", [6, 9, 12, 24, 36])
def test_the_interval_of_a_sign_test_contains_the_median_as_often_as_it_says(count: int) -> None:
    """Fails if the interval contains the median of a skewed distribution in less than 93% or more than 97% of cases. An
    interval that is too wide misses differences. The exact distribution of the ranks proves the coverage without the
    interpolation, so a simulation is needed."""
    rng = np.random.default_rng(count)
    samples = np.sort(rng.exponential(size=(2000, count)), axis=1)
    ends = np.array([sign_interval(sample) for sample in samples])
    inside = np.mean((ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1]))
    assert 0.93 <= inside <= 0.97, inside


def test_with_five_rounds_the_interval_is_the_range() -> None:
    """Fails if the interval of the fewest rounds is narrower than the range, which contains the median in 94% of
    cases."""
    assert sign_interval(np.arange(5.0)) == (0.0, 4.0)
    low, high = sign_interval(np.arange(6.0))
    assert 0 < low < 1
    assert 4 < high < 5


@pytest.mark.parametrize(("rounds", "outliers"), [(9, 1), (12, 2), (15, 3), (20, 5), (24, 6)])
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1, 1e6))
def test_outliers_move_neither_the_interval_nor_the_floor(rounds: int, outliers: int, seed: int, factor: float) -> None:
    """Checks that the rounds with the largest ratios may become any factor more extreme. A floor that depends on the
    worst pair of blocks grows to some thousand percent."""
    rng = np.random.default_rng(seed)
    ratios = np.sort(np.exp(rng.normal(0, 0.05, rounds)))
    changed = ratios.copy()
    changed[-outliers:] *= factor
    before, after = (speedup(rng.permutation(values), np.ones(rounds)) for values in (ratios, changed))
    assert (after.low, after.value, after.high) == pytest.approx((before.low, before.value, before.high))
    assert floor_of(after) == pytest.approx(floor_of(before))
    assert before.low <= before.value <= before.high


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=5, max_size=30), st.floats(1, 10))
def test_a_slower_candidate_never_has_a_larger_speedup(rounds: list[tuple[float, float]], factor: float) -> None:
    """Checks that the speedup and both ends of its interval shrink with the candidate's speed, by the same factor, and
    that swapping the models inverts the speedup."""
    reference, candidate = np.array(rounds).T
    ratio, slower = speedup(reference, candidate), speedup(reference, candidate * factor)
    shrunk = [getattr(ratio, name) / factor for name in ("low", "value", "high")]
    assert [slower.low, slower.value, slower.high] == pytest.approx(shrunk)
    swapped = speedup(candidate, reference)
    assert (swapped.low, swapped.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))


def test_summary_is_over_all_iterations_in_milliseconds() -> None:
    """Checks that percentiles are in milliseconds, and are computed from all runs instead of the medians of rounds."""
    rounds = [np.arange(1, 51) * 1_000_000, np.arange(51, 101) * 1_000_000]
    found = summarize(rounds)
    assert found.iterations == 100
    assert found.median_ms == pytest.approx(50.5)
    assert found.p90_ms == pytest.approx(90.1)
    assert found.p99_ms == pytest.approx(99.01)
    assert found.mean_ms == pytest.approx(50.5)
    assert round_medians(rounds).tolist() == [25.5, 75.5]


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776445), (8, 2.306004), (19, 2.093024), (100, 1.983972)])
def test_student_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    """Fails if a term of the series for Student's t quantiles is wrong."""
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=4e-4)


def test_few_rounds_take_a_wider_percentile() -> None:
    """Checks that an interval over few rounds has a tail probability below 2.5%, and is therefore wider. For many
    rounds, the tail probability must be close to 2.5%."""
    assert tail_probability(5) < tail_probability(9) < tail_probability(30) < 0.025
    assert tail_probability(10_000) == pytest.approx(0.025, rel=0.01)


def test_only_the_width_of_an_interval_decides_whether_to_go_on() -> None:
    """Fails if a benchmark with a large, clear effect never stops. Also fails if a benchmark stops as soon as its
    interval excludes 1, because the verdict could then be false."""
    assert not is_narrow(Ratio(value=1.06, low=1.01, high=1.12), 0.05)
    assert is_narrow(Ratio(value=1.0, low=0.99, high=1.01), 0.05)
    assert is_narrow(Ratio(value=4.0, low=3.6, high=4.4), 0.05)
