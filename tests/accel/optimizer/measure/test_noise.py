"""Proves that accel optimize tells the user if noise decided whether a candidate is faster. If noise decided a
candidate's verdict, the next run measures the candidate again. Also proves that a run ends when its time budget is
spent."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.graph.simplify import SimplifyConfig
from accel.errors import BadData
from accel.optimizer.attempt import attempt
from accel.optimizer.budget import SECONDS_A_CANDIDATE, SOURCES, Budget, OutOfTime
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.choice import fastest
from accel.optimizer.measure.noise import noise_notes, outcome_is_open, seems_faster
from accel.optimizer.measure.timing import Effort, measured
from accel.optimizer.measure.workload import workload
from accel.optimizer.recipes.recipe import Recipe, Step
from accel.optimizer.search import not_faster
from accel.progress import report, watched_by
from accel.tables.target import Target
from accel.timing import paired
from accel.timing.repeats import Repeats
from accel.timing.report import BenchReport, Row
from tests.support import onnx_builder as build
from tests.support.fake_sessions import FakeClock

HIDDEN = {"verdict": "no measurable difference", "speedup": 1.5, "ci95": [0.9, 2.0], "noise_floor": 0.31}


@pytest.fixture
def small(tmp_path: Path) -> Artifact:
    """Makes a small model. The tests of this file need a model, but never run it."""
    return build.square_root_of_square(tmp_path / "small.onnx")


def row(name: str, ms: float, **measured: Any) -> CandidateResult:
    return CandidateResult(name=name, measured={"median_ms": ms, **measured})


def test_a_row_that_noise_decided_says_so() -> None:
    """If noise decided a verdict, the report must give the noise floor, the confidence interval and advice. The report
    of a clear verdict must not give a noise floor, an interval or advice."""
    source = row("source", 10.0, verdict="baseline")
    hidden = row("int8", 6.7, **HIDDEN)
    same = row("fp32", 10.0, verdict="no measurable difference", speedup=1.01, ci95=[1.0, 1.02], noise_floor=0.31)
    slower = row("bf16", 30.0, verdict="slower", speedup=0.3, ci95=[0.3, 0.3], noise_floor=0.31)
    assert fastest(source, [hidden, same, slower]) is source
    for part in ("1.50x", "0.90 to 2.00", "noise floor 31.0%"):
        assert part in hidden.reason
    assert same.reason == "not measurably faster than the source (no measurable difference)"
    assert [r.hidden_by_noise for r in (hidden, same, slower)] == [True, False, False]
    assert hidden.to_json()["hidden_by_noise"] is True
    (note,) = noise_notes([hidden, same, slower], source, {"noise_floor": 0.31})
    for part in ("int8 may be faster", "31.0%", "rounds=", "quiet machine", "use_cache=False"):
        assert part in note
    assert noise_notes([same, slower], source, {"noise_floor": 0.31}) == []


def test_a_report_says_that_it_compares_the_fastest_runs() -> None:
    """Fails if ``accel optimize`` compares the fastest runs without a word, or always says so."""
    source = row("source", 10.0, verdict="baseline")
    (note,) = noise_notes([], source, {"statistic": "fast runs"})
    assert "other work slows this machine down" in note
    assert noise_notes([], source, {"statistic": "median"}) == []


def test_a_row_that_is_too_noisy_may_still_be_faster() -> None:
    """Checks that accel measures a candidate with the verdict "too noisy" again. The candidate's ``reason`` must not
    name a speedup."""
    source = row("source", 10.0, verdict="baseline")
    measured_row = {"verdict": "too noisy", "speedup": 189.8, "ci95": [10.2, 3655.8], "noise_floor": 401.923}
    noisy = row("int8", 0.05, **measured_row)
    assert fastest(source, [noisy]) is source
    assert noisy.reason == "not measurably faster than the source (too noisy, noise floor 40192.3%)"
    assert noisy.hidden_by_noise
    assert outcome_is_open([measured_row])
    base = CandidateResult(name="base", measured={"round_medians_ms": [10.0] * 9})
    variant = CandidateResult(name="variant", measured={"round_medians_ms": [5.0] * 9})
    not_faster(variant, base, 401.923)
    assert variant.reason == "not measurably faster than base (too noisy, noise floor 40192.3%)"


def test_noise_below_the_choice_is_no_news() -> None:
    """Fails if a note advises to measure a candidate again although the candidate is clearly slower than the chosen
    candidate."""
    source, best = row("source", 10.0, verdict="baseline"), row("a", 3.0, verdict="faster", speedup=3.3)
    hidden = row("b", 6.7, **HIDDEN)
    assert fastest(source, [hidden, best]) is best
    assert not hidden.hidden_by_noise
    assert outcome_is_open([HIDDEN])
    assert not outcome_is_open([HIDDEN, {"verdict": "faster", "speedup": 3.3}, {"verdict": None, "speedup": None}])
    assert not seems_faster({"verdict": "no measurable difference"})


def test_options_that_noise_decided_say_so() -> None:
    """If noise hides the speedup of session options, accel drops the options. Checks that the reason for dropping the
    options names the noise floor."""
    base = row("a", 10.0, round_medians_ms=[10.0] * 9)
    wild = row("a, 1 thread", 8.0, round_medians_ms=[5.0, 15.0, 8.0] * 3)
    not_faster(wild, base, 0.4)
    assert wild.reason.startswith("not measurably faster than a (it seems 1.25x")
    assert "noise floor 40.0%" in wild.reason
    assert wild.hidden_by_noise


def scripted(monkeypatch: pytest.MonkeyPatch, speedup: float, verdict: str) -> list[str]:
    """Replaces the benchmark with a function that reports the given speedup and verdict for the only candidate. Returns
    the list of candidates that the benchmark times."""
    called: list[str] = []

    def measure(candidates: Any, feeds: Any, **_: Any) -> BenchReport:
        called.append(candidates[1].name)
        rows = [
            Row(name=c.name, median_ms=ms, mean_ms=ms, speedup=s, ci95=(s, s), verdict=v, round_medians_ms=(ms,) * 5)
            for c, ms, s, v in zip(candidates, (1.0, 1 / speedup), (1.0, speedup), ("baseline", verdict), strict=True)
        ]
        samples = {c.name: (np.array([1e6]),) for c in candidates}
        return BenchReport(
            rows=tuple(rows), baseline="source", noise_floor=0.3, twin=None, sizes={}, environment={"date": "today"},
            seed=0, block_seconds=0.2, order=(), samples=samples,
        )  # fmt: skip

    monkeypatch.setattr(paired, "measure", measure)
    return called


@pytest.mark.parametrize(
    ("speedup", "verdict", "times"),
    [(1.2, "no measurable difference", 3), (1.2, "faster", 1), (1.0, "no measurable difference", 1)],
)
def test_what_noise_decided_is_not_taken_from_the_cache(
    small: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speedup: float, verdict: str, times: int
) -> None:
    """Fails if the cache is used although noise decided the verdict, or if a candidate with a clear verdict is measured
    again."""
    called = scripted(monkeypatch, speedup, verdict)
    cache = StageCache(tmp_path / "cache")
    work = workload(small.signature, None, objective="latency", sizes={}, batch=None, lengths=None, cores=1)
    for turn in range(3):
        source, other = (
            CandidateResult(name=name, artifact=small, runtime="onnxruntime") for name in ("source", "other")
        )
        environment = measured(source, [other], work, 1, Effort(rounds=5, block_seconds=0.2), cache)
        assert other.measured is not None
        assert other.measured["noise_floor"] == 0.3
        assert environment["cached"] is (turn > 0 and times == 1)
    assert len(called) == times
    notes = noise_notes([other], source, environment)
    assert any("measured today" in note and "30.0%" in note for note in notes) is (times == 1)


def test_what_is_under_way_is_given_up_with_the_budget() -> None:
    """Checks that a task that has used up its share of the time budget ends at its next progress message. The task's
    progress messages must still reach the watcher."""
    clock = FakeClock()
    heard: list[str] = []
    budget = Budget(100.0, clock)

    def work() -> None:
        with watched_by(lambda message, _: heard.append(message)), budget.within(0.75):
            report("half")
            clock.now = 76.0
            report("late")
            report("never")

    with pytest.raises(OutOfTime):
        work()
    assert heard == ["half", "late"]
    with Budget(None, clock).within(0.75):
        report("no end")


@pytest.mark.parametrize(("seconds", "at_least"), [(5.0, 1), (30.0, 2), (60.0, 5), (1000.0, 10)])
def test_building_leaves_the_time_to_measure_what_was_built(
    small: Artifact, own_cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, at_least: int
) -> None:
    """Fails if the search builds more candidates than it has time to measure. Also fails if the search stops building
    while it has time for more candidates."""
    clock = FakeClock()
    budget = Budget(seconds, clock)

    def judging(*_: Any) -> None:
        clock.now += 2.0

    monkeypatch.setattr("accel.optimizer.attempt.judged", judging)
    rows = []
    for index in range(10):
        recipe = Recipe(name=f"c{index}", target=Target.get("ort-cpu"), precision="fp32", stages=())
        rows.append(attempt(recipe, small, None, None, 0.01, StageCache(), budget))  # type: ignore[arg-type]
    built = [row for row in rows if row.status == "passed"]
    assert at_least <= len(built) <= at_least + 3
    assert all(row.out_of_time for row in rows if row not in built)
    assert budget.left >= (len(built) + SOURCES - 1) * SECONDS_A_CANDIDATE or len(built) == 1


def test_a_candidate_that_leaves_no_time_has_a_row_that_says_so(
    small: Artifact, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a stage ends before the time that is reserved for measuring, and that the candidate's row says that
    time ran out. Also fails if the note about the budget leaves out the slow steps, the untried candidates or the
    advice."""
    clock = FakeClock()
    budget = Budget(100.0, clock)

    def endless(*_: Any) -> None:
        clock.now += 80.0
        report("still at it")
        raise AssertionError("not given up")

    monkeypatch.setattr("accel.stage._make", endless)
    recipe = Recipe(
        name="a", target=Target.get("ort-cpu"), precision="fp32", stages=(Step("simplify", SimplifyConfig(), 1.0),)
    )
    made = attempt(recipe, small, None, None, 0.01, StageCache(), budget)  # type: ignore[arg-type]
    assert (made.status, made.out_of_time) == ("not tried", True)
    assert made.reason == "80 s of the budget of 100 s were spent before its stage simplify was over"
    note = budget.note([made.name, *"bcdef"])
    assert "was too short to try or measure a, b, c, d and 2 more: a: simplify took 80 s, and" in note
    assert "the 20 s left were kept for measuring; give more" in note
    assert "budget_seconds=" in note
    assert "precision=" in note
    assert "samples" not in note  # no stage calibrated
    with budget.spending("b: quantize", quantizing=True):
        clock.now += 200.0
    with budget.spending("opening the model"):
        clock.now += 1.0  # the note leaves out a step that took only one second
    assert "b: quantize took 200 s, a: simplify took 80 s; give more" in budget.note(["b"])
    assert "quantize=['samples=" in budget.note(["b"])
    assert budget.note([]) == Budget(None, clock).note(["a"]) == ""


def test_a_budget_that_is_too_short_is_said(cli: Any, tmp_path: Path) -> None:
    """Checks that the result and stderr say that the budget left no time for any candidate."""
    build.artifact(
        tmp_path / "m.onnx",
        [build.node("Tanh", "x", "y")],
        {"x": (build.FLOAT, ["batch", 4])},
        {"y": (build.FLOAT, ["batch", 4])},
    )
    words = ["optimize", tmp_path / "m.onnx", "--target", "ort-cpu", "--budget-seconds", "0.001"]
    ran = cli(*words, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.stderr
    said = [line for line in ran.stderr.splitlines() if "too short to try or measure ort-cpu" in line]
    assert len(said) == 1
    assert " took " in said[0]
    assert said[0].removeprefix("accel: warning: ") in json.loads(ran.stdout)["notes"]


class Lane:
    """Replaces a candidate's process with a simulated process that returns at once."""

    def __init__(self, name: str) -> None:
        self.name, self.error, self.is_slower = name, None, False

    def time_block(self, block_seconds: float, repeats: Repeats) -> None:
        """Takes no time."""


def test_rounds_end_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rounds continue after the time limit, or if fewer rounds are timed than a verdict needs."""
    lanes: Any = [Lane("a"), Lane("b"), Lane("a (again)")]
    assert len(paired._run_rounds(lanes, 50, 0.2, 0, 0.0, 0.05, ends=0.0, repeats=Repeats(0.0))) == 5
    assert len(paired._run_rounds(lanes, 50, 0.2, 0, 0.0, 0.05, ends=inf, repeats=Repeats(0.0))) == 50


def test_samples_that_the_source_cannot_run_are_found_first(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """Fails if accel makes candidates before it notices a token id beyond the vocabulary. Also checks that the error
    names the sample and the input."""
    import accel

    build.artifact(
        tmp_path / "m.onnx",
        [build.node("Gather", "table ids", "e"), build.node("Tanh", "e", "y")],
        {"ids": (build.INT64, ["batch", "n"])},
        {"y": (build.FLOAT, ["batch", "n", 2])},
        {"table": np.full((11, 2), 0.5, np.float32)},
    )
    ids = np.zeros((40, 5), np.int64)
    ids[13, 3] = 11
    np.savez(tmp_path / "bad.npz", ids=ids)
    np.savez(tmp_path / "good.npz", ids=ids % 11)

    def never(*_: Any) -> None:
        raise AssertionError("a candidate was made")

    monkeypatch.setattr("accel.optimizer.run.attempt", never)
    for given in ({"data": "bad.npz"}, {"data": "good.npz", "eval_data": "bad.npz"}):
        files = {name: tmp_path / file for name, file in given.items()}
        with pytest.raises(
            BadData, match=r"bad\.npz: the model can't run on sample 13: .*'ids' holds 11, it takes 0\.\.10"
        ):
            accel.optimize(tmp_path / "m.onnx", out=tmp_path / "out", **files)  # type: ignore[arg-type]
    ran = cli("optimize", tmp_path / "m.onnx", "--data", tmp_path / "bad.npz", "-o", tmp_path / "out", "-q")
    assert (ran.code, "sample 13" in ran.stderr, "Traceback" in ran.stderr) == (2, True, False)


def test_no_budget_is_named_that_the_user_did_not_give() -> None:
    """Fails if a message of the default search speaks of a budget, although accel chose the time itself."""
    clock = FakeClock()
    budget = Budget(None, clock)
    clock.now = 40.0
    budget.improve()
    clock.now = 200.0
    assert budget.reason("it was judged") == f"the search ended after {budget.seconds:g} s, before it was judged"
    assert "budget" not in budget.note(["a"])
    given = Budget(60.0, clock)
    given.improve()
    assert "of the budget of 60 s" in given.reason("it was judged")
