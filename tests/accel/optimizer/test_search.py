"""Proves that the search of accel optimize chooses session options and candidates within the time budget. Each test
sets the candidates' times itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.api.optimize import optimize
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.optimizer import search as module
from accel.optimizer.budget import Budget
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.judge.comparison import Judgement
from accel.optimizer.measure.timing import Effort
from accel.optimizer.measure.workload import Workload
from accel.optimizer.recipes.session_variants import variants
from accel.optimizer.search import Search, faster_than
from tests.support.fake_sessions import FakeClock

WORK = Workload(objective="latency", mix=({},), repeats=1, note="")
LOAD = Workload(objective="throughput", mix=({},), repeats=8, note="")


class Timed:
    """Replaces ``measured``. Reports each candidate's time from ``ms``, with a relative jitter of ``noise``. Records
    the candidates' names and the argument ``effort`` of each call."""

    def __init__(self, ms: Mapping[str, float], *, noise: float = 0.0, clock: FakeClock | None = None) -> None:
        self.ms, self.noise, self.clock = ms, noise, clock
        self.calls: list[tuple[list[str], Effort]] = []

    def __call__(
        self, source: CandidateResult, rows: Sequence[CandidateResult], work: Any, threads: int, effort: Effort, _: Any
    ) -> dict[str, Any]:
        self.calls.append(([row.name for row in rows], effort))
        if self.clock is not None:
            self.clock.now += 3.0 * (len(rows) + 2)
        for number, row in enumerate((source, *rows)):
            jitter = 1 + self.noise * np.sin(np.arange(9) * (number + 2))
            medians = self.ms[row.name] * jitter
            ratio = self.ms["source"] / self.ms[row.name]
            row.measured = {
                "median_ms": float(np.median(medians)),
                "round_medians_ms": medians.tolist(),
                "speedup": ratio,
                "verdict": "faster" if ratio > 1.02 else "slower" if ratio < 0.98 else "no measurable difference",
            }
        return {"noise_floor": 0.02}


class Judging:
    """Replaces the judge. ``drops`` maps part of an option's text to an accuracy drop. The drop is 0 if no key of
    ``drops`` occurs in a candidate's options."""

    def __init__(self, drops: Mapping[str, float] | None = None) -> None:
        self.drops = drops or {}
        self.seen: list[Mapping[str, Any]] = []

    def key(self, artifact: Any, options: Mapping[str, Any]) -> str:
        return repr(sorted(options.items()))

    def judge(self, artifact: Any, options: Mapping[str, Any]) -> Judgement:
        self.seen.append(options)
        drop = max((d for words, d in self.drops.items() if words in repr(sorted(options.items()))), default=0.0)
        return Judgement(drop=drop, metric=None, reference_metric=None, max_abs_diff=0.0, judged_on="x")


def row(name: str, runtime: str = "openvino", **options: Any) -> CandidateResult:
    return CandidateResult(
        name=name, runtime=runtime, options={"threads": 2, **options}, artifact=Artifact.__new__(Artifact)
    )


@pytest.fixture
def searching(own_cache: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(
        timed: Timed, *, seconds: float | None = None, clock: FakeClock | None = None, work: Workload = WORK
    ) -> Search:
        monkeypatch.setattr(module, "measured", timed)
        timed.clock = clock
        budget = Budget(seconds, clock or FakeClock())
        source = row("source", "onnxruntime")
        return Search(source=source, workload=work, threads=2, rounds=9, cache=StageCache(), budget=budget)

    return make


def test_options_have_to_be_measurably_faster(searching: Any) -> None:
    """Checks that the search chooses measurably faster session options, and no options that only seem faster."""
    for ms, taken in ((5.9, "a"), (4.0, "a, 1 thread")):
        search = searching(Timed({"source": 10, "a": 6, "a, 1 thread": ms}, noise=0.05))
        rows = [row("a")]
        best = search.best(rows)
        chosen, made = search.vary_sessions(best, rows, Judging(), 0.01, vary_threads=True)
        assert chosen.name == taken
        assert [r.name for r in made] == ["a, 1 thread"]
        loser = made[0] if taken == "a" else best
        assert loser.reason in ("not measurably faster than a", "slower than a, 1 thread")
    assert chosen.options == {"threads": 1}


def test_options_of_what_is_not_taken_stand_against_the_source(searching: Any) -> None:
    """Checks that the search chooses a candidate with other session options if the candidate is measurably faster than
    the source. In this test, the best candidate of the first measurement turns out to be as slow as the source in the
    second measurement."""
    timed = Timed({"source": 10, "a": 6, "b": 7, "b, 1 thread": 6.9, "a, 1 thread": 9.9}, noise=0.01)
    search = searching(timed)
    rows = [row("a"), row("b")]
    best = search.best(rows)
    assert best.name == "a"
    timed.ms |= {"a": 10, "b": 9.9, "b, 1 thread": 9.0}  # when measured again, a and b seem as slow as the source
    chosen, made = search.vary_sessions(best, rows, Judging(), 0.01, vary_threads=True)
    assert chosen.name == "b, 1 thread", [r.reason for r in made]


def test_options_are_judged_like_candidates(searching: Any) -> None:
    """Fails if the search chooses fast session options although their outputs exceed the accuracy budget."""
    ms = {"source": 10, "a": 6, "a, 1 thread": 5, "a, extended graph level": 1, "a, no spinning": 5.5}
    search = searching(Timed(ms))
    rows = [row("a", "onnxruntime")]
    judge = Judging({"extended": 0.5})
    chosen, made = search.vary_sessions(search.best(rows), rows, judge, 0.01, vary_threads=True)
    assert chosen.name == "a, 1 thread"
    wrong = next(r for r in made if "extended" in r.name)
    assert (wrong.status, wrong.measured) == ("rejected", None)
    assert "over the budget" in wrong.reason
    assert len(judge.seen) == 3


def test_the_source_may_be_the_one_with_other_options(searching: Any) -> None:
    """If no candidate is faster than the source, the search must try other session options for the source. The search
    must keep the default options if no other options are faster."""
    ms = {"source": 10, "a": 11, "source, 1 thread": 7, "source, extended graph level": 10, "source, no spinning": 12}
    search = searching(Timed(ms))
    rows = [row("a")]
    chosen, _ = search.vary_sessions(search.best(rows), rows, Judging(), 0.01, vary_threads=True)
    assert chosen.name == "source, 1 thread"
    search = searching(Timed(ms | {"source, 1 thread": 10}))
    rows = [row("a")]
    chosen, made = search.vary_sessions(search.best(rows), rows, Judging(), 0.01, vary_threads=True)
    assert chosen is search.source
    assert all(r.reason for r in made)


def test_which_options_are_tried() -> None:
    """Fails if the search varies the number of threads although the user fixed it, or tries fewer threads on a single
    core."""
    ort, ov = row("a", "onnxruntime"), row("b", "openvino")
    assert [v.options for v in variants(ov, "latency", cores=8, vary_threads=True)] == [{"threads": 4}]
    assert variants(ov, "latency", cores=8, vary_threads=False) == []
    assert [v.options["streams"] for v in variants(ov, "throughput", cores=8, vary_threads=False)] == [8, 4]
    assert all(not v.options["spinning"] for v in variants(ort, "throughput", cores=2, vary_threads=True))
    assert [v.name for v in variants(ort, "latency", cores=1, vary_threads=True)] == ["a, extended graph level"]
    assert variants(row("c", "tensorrt"), "throughput", cores=8, vary_threads=True) == []


def test_streams_for_throughput(searching: Any) -> None:
    """Checks that the search for throughput tries several streams."""
    search = searching(Timed({"source": 10, "a": 6, "a, 2 streams": 4}), work=LOAD)
    rows = [row("a")]
    chosen, _ = search.vary_sessions(search.best(rows), rows, Judging(), 0.01, vary_threads=True)
    assert chosen.options == {"threads": 2, "streams": 2}


def test_halving(searching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that successive halving keeps the fastest candidate, gives dropped candidates a reason, and doesn't time
    every candidate for the full time."""
    monkeypatch.setattr(module, "_BLOCK_SECONDS", 0.2)
    names = [f"c{i}" for i in range(8)]
    ms = {"source": 10.0} | {name: 9.0 - i for i, name in enumerate(names)}
    clock = FakeClock()
    timed = Timed(ms)
    search = searching(timed, seconds=110, clock=clock)
    rows = [row(name) for name in names]
    best = search.best(rows)
    assert best.name == "c7"
    assert [len(called) for called, _ in timed.calls] == [8, 4, 2]
    assert [effort.rounds for _, effort in timed.calls] == [5, 5, 9]
    assert timed.calls[0][1].block_seconds < timed.calls[1][1].block_seconds < timed.calls[2][1].block_seconds
    assert all(r.reason for r in rows if r is not best)
    assert sum("short measurement" in r.reason for r in rows) == 6


@pytest.mark.parametrize("gigabytes", [12, 5, 1])
def test_what_does_not_fit_into_memory_at_once_is_timed_in_parts(
    searching: Any, monkeypatch: pytest.MonkeyPatch, gigabytes: int
) -> None:
    """Checks that the search never loads more models at once than fit into memory, and that the search gives a result
    even with too little memory. Also checks that the search finds the fastest model if it times the models in several
    groups."""
    names = [f"c{i}" for i in range(5)]
    ms = {name: 9.0 - i % 4 for i, name in enumerate(names)}
    timed = Timed({"source": 10.0} | ms | {f"{name}, 1 thread": value / 2 for name, value in ms.items()})
    search = searching(timed)
    search.source.megabytes = 500.0
    rows = [row(name) for name in names]
    for one in rows:
        one.megabytes = 500.0
    monkeypatch.setattr(module, "available_memory", lambda: gigabytes * 10**9)
    best = search.best(rows)
    assert best.name == "c3"
    counts = {12: [5], 5: [2, 2, 1, 2], 1: [1] * 8}
    assert [len(called) for called, _ in timed.calls] == counts[gigabytes]
    assert timed.calls[-1][1].rounds == 9
    assert all(r.reason for r in rows if r is not best)
    assert sum("memory" in r.reason for r in rows) == {12: 0, 5: 3, 1: 4}[gigabytes]
    chosen, made = search.vary_sessions(best, rows, Judging(), 0.01, vary_threads=True)
    if gigabytes == 1:
        assert chosen is best
        assert [(r.status, "memory" in r.reason) for r in made] == [("not tried", True)]
    else:
        assert chosen.name == "c3, 1 thread"


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.floats(0.5, 300),
    times=st.lists(st.floats(0.5, 30), min_size=0, max_size=9),
    spent=st.floats(0, 300),
)
def test_nothing_unmeasured_or_slower_is_taken(seconds: float, times: list[float], spent: float) -> None:
    """Hypothesis draws the times and the remaining budget. Checks that the search only chooses a measured candidate
    that is faster than the source, and gives every other candidate a reason."""
    ms = {"source": 10.0} | {f"c{i}": t for i, t in enumerate(times)}
    clock = FakeClock()
    timed = Timed(ms, clock=clock)
    source = row("source", "onnxruntime")
    budget = Budget(seconds, clock)
    clock.now = spent
    search = Search(source=source, workload=WORK, threads=2, rounds=9, cache=None, budget=budget)  # type: ignore[arg-type]
    rows = [row(f"c{i}") for i in range(len(times))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measured", timed)
        best = search.best(rows)
    if best is not source:
        assert best.measured is not None
        assert best.measured["verdict"] == "faster"
    for other in rows:
        if other is not best:
            assert other.reason
            assert other.status in ("passed", "not tried")
    if budget.limited and spent >= seconds:
        assert timed.calls == []
        assert all(r.status == "not tried" and "of the budget of" in r.reason for r in rows)


def test_no_time_for_options(searching: Any) -> None:
    """Checks that session options are not measured if no time is left, and that the report lists these options as not
    tried."""
    clock = FakeClock()
    timed = Timed({"source": 10, "a": 6})
    search = searching(timed, seconds=14, clock=clock)
    rows = [row("a")]
    best = search.best(rows)
    chosen, made = search.vary_sessions(best, rows, Judging(), 0.01, vary_threads=True)
    assert chosen is best
    assert [(r.status, "before its session options" in r.reason) for r in made] == [("not tried", True)]


def test_options_that_fit_the_time_left_are_tried(searching: Any) -> None:
    """Fails if all session options are skipped because there is no time for all of them. Also fails if the note about
    the others hides that seconds are left, or names options that were tried."""
    clock = FakeClock()
    timed = Timed({"source": 10, **{f"source, {words}": 9 for words in ("1 thread", "extended graph level")}})
    search = searching(timed, seconds=30, clock=clock)
    clock.now = 13.0  # 17 s are left: two processes of the source and two more
    chosen, made = search.vary_sessions(search.source, [], Judging(), 0.01, vary_threads=True)
    assert chosen.name == "source, 1 thread"
    assert timed.calls[0][0] == ["source, 1 thread", "source, extended graph level"]
    assert [(row.name, row.out_of_time) for row in made][2:] == [("source, no spinning", True)]
    note = search.budget.note([row.name for row in made if row.out_of_time])
    said = (
        "was too short to try or measure source, no spinning: measuring took 12 s, and measuring a candidate usually "
    )
    assert f"{said}takes more than the 5.0 s left;" in note


@pytest.mark.parametrize(("left", "calls"), [(5.0, [["a"]]), (1.9, [])])
def test_a_short_budget_measures_one_candidate(searching: Any, left: float, calls: list[list[str]]) -> None:
    """Fails if a small model with a budget of a few seconds is never measured, because most models take longer, or if
    a measurement begins with hardly any time left."""
    clock = FakeClock()
    timed = Timed({"source": 10, "a": 6, "b": 5})
    search = searching(timed, seconds=9, clock=clock)
    search.budget.built()
    clock.now = 9 - left
    rows = [row("a"), row("b")]
    search.best(rows)
    assert [names for names, *_ in timed.calls if names] == calls
    late = [one for one in rows if one.out_of_time]
    assert [one.name for one in late] == ["a", "b"][len(calls) :]
    assert ("the rest was kept for measuring" in late[-1].reason) == bool(calls)


def test_faster_than_needs_the_same_rounds() -> None:
    """Checks that the search only compares times of candidates that were measured in the same rounds."""
    one, other = row("a"), row("b")
    one.measured = {"round_medians_ms": [1.0] * 9}
    other.measured = {"round_medians_ms": [2.0] * 5}
    assert not faster_than(one, other, 0.02)
    other.measured = {"round_medians_ms": [2.0] * 9}
    assert faster_than(one, other, 0.02)
    assert not faster_than(other, one, 0.02)


def test_beside_other_work_medians_compare_no_options() -> None:
    """Fails if session options are compared by medians that other work disturbed. The noise floor is then the floor of
    the fastest runs, so that disturbed medians would pass for a difference. Also fails if overlapping intervals count
    as a difference."""
    common = {"statistic": "fast runs"}
    one, other = row("a"), row("b")
    one.measured = {**common, "round_medians_ms": [120.0] * 9, "speedup": 2.0, "ci95": (1.9, 2.1)}
    other.measured = {**common, "round_medians_ms": [1.0] * 9, "speedup": 1.5, "ci95": (1.4, 1.6)}
    assert faster_than(one, other, 0.02)
    assert not faster_than(other, one, 0.02)
    other.measured = {**other.measured, "ci95": (1.4, 2.0)}
    assert not faster_than(one, other, 0.02)


def test_beside_other_work_options_are_compared_by_what_decided() -> None:
    """Fails if session options are compared by disturbed medians, although the CPU time decided their speedups over the
    source."""
    one, other = row("a"), row("b")
    common = {"statistic": "cpu time", "speedup": 1.0, "ci95": (1.0, 1.0)}
    one.measured = {**common, "round_medians_ms": [120.0] * 9, "round_cpu_ms": [1.0] * 9}
    other.measured = {**common, "round_medians_ms": [1.0] * 9, "round_cpu_ms": [1.5] * 9}
    assert faster_than(one, other, 0.02)
    assert not faster_than(other, one, 0.02)


@pytest.mark.parametrize(("statistic", "tried"), [("median", True), ("fast runs", False), ("cpu time", False)])
def test_beside_other_work_no_options_are_tried(
    statistic: str, tried: bool, searching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a session with fewer threads is chosen because other work takes the cores."""
    timed = Timed({"source": 10.0, "a": 5.0, "a, 1 thread": 1.0})
    search = searching(timed)
    monkeypatch.setattr(module, "measured", lambda *given: timed(*given) | {"statistic": statistic, "lost": 0.5})
    rows = [row("a")]
    best = search.best(rows)
    chosen, made = search.vary_sessions(best, rows, Judging(), 0.01, vary_threads=True)
    assert "a, 1 thread" in [row.name for row in made]
    assert all(("beside it" in row.reason) is not tried for row in made)
    assert (chosen is best) is not tried


BUDGET, MARGIN = 10.0, 8.0  # optimize.md names the work that may run after the budget's end


def test_a_real_search_ends_with_its_budget(
    digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path, own_cache: Path
) -> None:
    """Fails if the search makes, loads and times real candidates long after the end of the budget. Also checks that the
    report lists the untried candidates. Without a budget, this search takes a minute."""
    begun = time.monotonic()
    result = optimize(digits, out=tmp_path / "out", data=digits_data[0], budget_seconds=BUDGET)
    assert time.monotonic() - begun <= BUDGET + MARGIN
    assert result.artifact.path.is_file()
    assert any(f"of the budget of {BUDGET:g} s were spent" in row.reason for row in result.candidates)
