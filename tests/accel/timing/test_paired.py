"""Proves that the benchmark shuffles its runs, pauses idle processes, compares outputs before timing, and reports
misbehaving candidates."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from accel.artifact import Artifact
from accel.errors import AccelError, UnknownName, UsageError
from accel.progress import watched_by
from accel.signature import Signature, TensorSpec
from accel.sources.onnx.file import open_onnx
from accel.timing.paired import BenchReport, Candidate, measure
from accel.timing.report import table
from accel.timing.same_model import is_same_model

SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", 4)),),
    (TensorSpec("y", "float32", ("batch", 4)),),
)
FEEDS = {"x": np.ones((2, 4), np.float32)}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes find this folder's ``bench_sessions`` through the parent's path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def scripted(name: str, *, opener: str = "scripted", signature: Signature = SIGNATURE, **script: Any) -> Candidate:
    artifact = Artifact(path=Path(f"{name}.fake"), kind="fake", signature=signature)
    return Candidate(name, artifact, options=script, opener=f"bench_sessions:{opener}")


def quick(candidates: list[Candidate], **options: Any) -> BenchReport:
    return measure(candidates, options.pop("feeds", FEEDS), **{"rounds": 5, "block_seconds": 0.01, **options})


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Makes four layers of width 256, which take about a millisecond on one thread."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for i in range(4):
        weights.append(numpy_helper.from_array(rng.standard_normal((256, 256)).astype(np.float32) / 16, f"w{i}"))
        out = "y" if i == 3 else f"h{i}"
        nodes += [helper.make_node("MatMul", [name, f"w{i}"], [f"m{i}"]), helper.make_node("Relu", [f"m{i}"], [out])]
        name = out
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 256]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "mlp", value[:1], value[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path_factory.mktemp("mlp") / "mlp.onnx"
    onnx.save(model, path)
    return open_onnx(path, probe=False)


def test_a_row_has_everything_that_was_promised() -> None:
    """Fails if a figure is missing, None, or in another unit. The scripted session takes 0.2 ms per run."""
    report = quick([scripted("base"), scripted("other", off=1.5)])
    assert [row.name for row in report.rows] == ["base", "other"]
    base, other = report.rows
    assert (base.verdict, base.speedup, base.max_abs_diff) == ("baseline", 1.0, 0.0)
    assert other.max_abs_diff == pytest.approx(1.5)
    assert other.max_rel_diff == pytest.approx(0.75)
    assert other.cosine == pytest.approx(1.0)
    for row in report.rows:
        assert 0.15 < row.median_ms <= row.p90_ms <= row.p99_ms
        assert row.rounds == 5 == len(row.round_medians_ms)
        assert row.iterations >= 15
        assert row.load_ms > 0 < row.first_run_ms
        assert 10 < row.peak_rss_mb < 4000
        assert row.error is None
    assert report.sizes == {"batch": 2}
    assert report.baseline == "base"
    assert report.environment["threads"] == len(os.sched_getaffinity(0))


def test_json_and_table_hold_the_report() -> None:
    """Fails if the JSON lacks a documented key or holds NaN or infinity, or if the table drops a candidate or an
    error."""
    report = quick([scripted("base", off=-2), scripted("[odd] name", ms=0.4), scripted("bad", nan=True)])
    body = json.loads(json.dumps(report.to_json(), allow_nan=False))
    needed = {"name", "median_ms", "p99_ms", "speedup", "ci95", "verdict", "max_abs_diff", "error"}
    assert all(needed <= set(row) for row in body["results"])
    assert body["results"][1]["ci95"] == pytest.approx(list(report.rows[1].ci95), rel=1e-4)
    assert body["results"][1]["max_rel_diff"] is None  # a relative difference to outputs of 0 is undefined
    assert body["results"][2]["median_ms"] is None
    assert {"environment", "noise_floor", "baseline", "sizes"} <= set(body)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(report))
    text = console.export_text()
    assert "[odd] name" in text
    assert "NaN" in text
    assert "noise floor" in text
    assert "[odd] name" in report.table()
    assert max(map(len, report.table().splitlines())) <= 100
    assert report._repr_html_().startswith("<pre>")
    assert repr(report).startswith("<accel benchmark against base: base 1x, [odd] name ")


def test_a_copy_of_the_baseline_is_called_identical(mlp: Artifact, tmp_path: Path) -> None:
    """Fails if a copy of the baseline's file is called faster or slower, if the noise floor is below the difference of
    the two files, or if a changed file, other options or a source count as identical."""
    for source in (*mlp.files, mlp.path):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    copied = open_onnx(tmp_path / mlp.path.name, probe=False)
    report = quick(
        [
            Candidate("base", mlp),
            Candidate("copy", copied),
            Candidate("one thread", copied, options={"threads": 1}),
        ],
        feeds={"x": np.ones((1, 256), np.float32)},
        threads=2,
    )
    base, copy, one_thread = report.rows
    assert (base.verdict, copy.verdict) == ("baseline", "identical")
    assert one_thread.verdict != "identical"
    assert report.noise_floor >= abs(math.log(copy.speedup))
    assert is_same_model(Candidate("base", mlp), Candidate("copy", copied))
    sources = [Candidate(name, replace(mlp, kind="torch")) for name in ("base", "copy")]
    assert not is_same_model(*sources)
    copied.path.write_bytes(copied.path.read_bytes().replace(b"mlp", b"mlq"))
    assert not is_same_model(Candidate("base", mlp), Candidate("copy", copied))


def test_slow_runs_are_measured_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a slow model, such as a pipeline of seconds a run, runs three times in each block and once before it."""
    monkeypatch.setattr("accel.timing.lane._SLOW_SECONDS", 0.02)
    report = quick([scripted("base", ms=40), scripted("other", ms=40)])
    assert [row.iterations for row in report.rows] == [10, 5]  # the baseline runs in two processes
    assert all(39 < row.median_ms < 200 for row in report.rows)


def test_the_budget_limits_the_rounds() -> None:
    """Fails if rounds that take longer than the budget are all measured, or if fewer than five are."""
    report = quick([scripted("base", ms=5), scripted("other", ms=5)], rounds=40, budget_seconds=0.1, shorten="budget")
    assert 5 <= len(report.order) < 40
    assert len(quick([scripted("base"), scripted("other")], rounds=7, budget_seconds=30, shorten="budget").order) >= 7


def test_all_processes_but_the_one_being_timed_are_stopped(tmp_path: Path) -> None:
    """Fails if another candidate's process runs while the benchmark times or loads a candidate. The thread pool of
    another running process would slow the timed candidate down."""
    log = tmp_path / "siblings"
    script = {"siblings_log": str(log), "not_siblings": list(children()), "ms": 2, "spins": True}
    quick([scripted(f"c{i}", **script) for i in range(3)])
    states = log.read_text().split()
    assert len(states) > 50
    assert set(states) == {"T"}


def test_the_order_is_shuffled_by_the_seed_and_recorded() -> None:
    """Checks that the rounds have different orders, and that the orders can be reproduced. In a fixed order, a
    candidate that always follows a CPU-heating candidate would seem slower."""
    names = ["a", "b"]
    reports = [quick([scripted(n, ms=0.05) for n in names], rounds=6, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (report.order for report in reports)
    assert first == again != other
    assert len(set(first)) > 1
    assert all(sorted(turn) == ["a", "a (again)", "b"] for turn in first)


def test_what_cant_be_compared_or_run_has_a_row_that_says_why() -> None:
    """Checks that a faulty candidate gets an error instead of a verdict, and that the benchmark still times the other
    candidates. The faulty candidates have wrong outputs, don't open, or crash in their first run or in a later run."""
    faults: dict[str, tuple[dict[str, Any], str]] = {
        "names": (
            {"output": "z"}, "not comparable: the outputs of this model are z, but the outputs of the baseline are y",
        ),
        "shape": ({"shape": True}, "not comparable: output 'y': its shape is [2, 1], not [2, 4]"),
        "nan": ({"nan": True}, "not comparable: output 'y': 8 values are NaN or infinite"),
        "closed": ({"fail_to_open": True}, "no such kernel"),
        "first run": ({"crash_at": 1}, "SIGSEGV"),
        "later run": ({"crash_at": 20, "ms": 1}, "SIGSEGV"),
    }  # fmt: skip
    bad = [scripted(name, **script) for name, (script, _) in faults.items()]
    report = quick([scripted("base", ms=1), *bad, scripted("good", ms=1)])
    for name, (_, reason) in faults.items():
        assert reason in report.row(name).error, name
        assert report.row(name).verdict is None
    assert report.row("good").rounds == 5
    assert report.row("good").error is None


def test_the_worst_output_counts() -> None:
    """Checks that every output is compared, and that the largest difference is reported."""
    report = quick([scripted("base", second_off=0), scripted("a", second_off=3), scripted("b", second_off=0, off=2)])
    assert [row.max_abs_diff for row in report.rows] == [0, 3, 2]


def test_other_input_names_are_not_comparable() -> None:
    """Fails if the benchmark compares a candidate although its inputs have other names than the baseline's inputs."""
    signature = Signature((TensorSpec("pixels", "float32", ("batch", 4)),), SIGNATURE.outputs)
    row = quick([scripted("base"), scripted("bad", signature=signature)]).row("bad")
    assert row.error.startswith("not comparable: the inputs of this model are pixels, but the inputs of the baseline")


def test_inputs_are_cast_to_what_a_candidate_takes() -> None:
    """Checks that a float16 model can be timed against the same model in float32."""
    half = Signature((TensorSpec("x", "float16", ("batch", 4)),), (TensorSpec("y", "float16", ("batch", 4)),))
    row = quick([scripted("base"), scripted("half", signature=half)]).row("half")
    assert (row.error, row.max_abs_diff) == (None, 0.0)


def test_a_candidate_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the benchmark ends even if a candidate hangs."""
    monkeypatch.setattr("accel.timing.lane._PATIENCE_SECONDS", 2.5)
    report = quick([scripted("base", ms=1), scripted("bad", ms=1, hang_at=20)])
    assert "took longer" in report.row("bad").error


def test_a_baseline_that_fails_is_an_error() -> None:
    """Fails if the benchmark returns a report although the baseline failed."""
    with pytest.raises(AccelError, match="no such kernel"):
        quick([scripted("base", fail_to_open=True), scripted("other")])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quick([scripted("a"), scripted("a")]), UsageError, "two candidates are called 'a'"),
        (lambda: quick([]), UsageError, "nothing to time"),
        (lambda: quick([scripted("a")], feeds=[]), UsageError, "nothing to time"),
        (lambda: quick([scripted("a")], rounds=4), UsageError, "at least 5"),
        (lambda: quick([scripted("a")], block_seconds=0), UsageError, "block"),
        (lambda: quick([scripted("a")], baseline="b"), UnknownName, "choose the baseline from a"),
    ],
)
def test_wrong_arguments_say_what_to_change(
    call: Callable[[], BenchReport], error: type[AccelError], words: str
) -> None:
    """Checks that a wrong argument raises an error that names the fix, and starts no processes."""
    with pytest.raises(error, match=words):
        call()


def test_the_baseline_may_be_any_candidate() -> None:
    """Fails if ``baseline`` is ignored, or if it changes the order of the report's rows."""
    slow, base = (scripted(name, opener="simulated", ms=ms) for name, ms in (("slow", 0.4), ("base", 0.1)))
    report = quick([slow, base], baseline="base")
    assert [row.verdict for row in report.rows] == ["slower", "baseline"]
    assert report.row("slow").speedup == pytest.approx(0.25, rel=0.05)


def test_several_feeds_are_run_equally_often() -> None:
    """Fails if only the first of several feeds is run or compared."""
    feeds = [{"x": np.full((2, 4), value, np.float32)} for value in (4, 3, 2, 1)]
    report = quick([scripted("base", ms=0.05), scripted("off", ms=0.05, off=1)], feeds=feeds)
    assert all(row.iterations % 4 == 0 for row in report.rows)
    # The relative difference is largest for the input of ones, because the baseline's output is 2 and the candidate's
    # output is 3.
    assert report.row("off").max_rel_diff == pytest.approx(0.5)


def test_rounds_go_on_while_an_interval_is_wide_and_there_is_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the benchmark runs further rounds if an interval is too wide and the time budget isn't used up."""
    assert len(quick([scripted("a", ms=0.05)], target_width=9.0, budget_seconds=60).order) == 5
    # Even if the target width is 0, the result of ``is_narrow`` depends on the measured times. So the test replaces it.
    monkeypatch.setattr("accel.timing.paired.is_narrow", lambda *_: False)
    assert len(quick([scripted("a", ms=0.05)], target_width=0.0, budget_seconds=60).order) == 20
    assert len(quick([scripted("a", ms=0.05)], target_width=0.0, budget_seconds=0).order) == 5


def test_a_slower_candidate_gets_no_further_rounds() -> None:
    """Fails if a candidate that can't be the fastest is timed in more than the first 5 rounds, or if its speedup is
    then computed from the wrong rounds of the baseline. The sessions' clock is simulated."""
    times = {"base": 4.0, "fast": 1.0, "slow": 2.0}
    candidates = [scripted(name, opener="simulated", ms=ms, seed=seed) for seed, (name, ms) in enumerate(times.items())]
    report = quick(candidates, rounds=7, block_seconds=0.2, shorten="slower")
    assert [row.rounds for row in report.rows] == [7, 7, 5]
    assert report.row("slow").verdict == "faster"
    assert report.row("slow").speedup == pytest.approx(2.0, rel=0.02)
    assert "slow" in report.order[4]
    assert "slow" not in report.order[5]


def children() -> set[int]:
    """Returns the ids of this process's children, including children that earlier tests left running."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"accel.child" in (stat.parent / "cmdline").read_bytes():
                found.add(int(stat.parent.name))
    return found


def test_ctrl_c_leaves_no_process_behind() -> None:
    """Fails if a paused process outlives the benchmark."""

    def interrupt(message: str, fraction: float | None) -> None:
        if message == "bench: round 2":
            raise KeyboardInterrupt

    before = children()
    with watched_by(interrupt), pytest.raises(KeyboardInterrupt):
        quick([scripted("a"), scripted("b", spins=True)])
    assert children() <= before


def test_a_real_model_against_itself_makes_no_claim(mlp: Artifact) -> None:
    """Fails if one of two identical candidates on a real runtime seems more than 25% faster. The processes, the order
    or the warm-up could cause a difference. Runs are timed by the thread's CPU time. The bound is loose because the
    machine may be busy. The tests in ``test_statistics.py`` check the statistics more exactly."""
    feeds = mlp.signature.example_inputs(batch=32)
    candidates = [
        Candidate(name, mlp, runtime="onnxruntime", options={"share": 0.0}, opener="bench_sessions:delayed")
        for name in ("one", "two")
    ]
    report = measure(candidates, feeds, rounds=7, block_seconds=0.1, budget_seconds=3)
    row = report.row("two")
    assert row.runtime == "onnxruntime"
    assert row.verdict == "no measurable difference" or 0.8 < row.speedup < 1.25
    assert row.max_abs_diff == 0.0


def test_a_ten_percent_delay_is_found_and_none_is_not() -> None:
    """Fails if the benchmark misses a delay of 10%, or reports a delay between equally fast candidates. The sessions'
    clock is simulated, so the figures are the same on every machine."""
    times = {"as it is": 2.0, "the same": 2.0, "delayed": 2.2, "doubled": 4.0}
    candidates = [scripted(name, opener="simulated", ms=ms, seed=seed) for seed, (name, ms) in enumerate(times.items())]
    report = quick(candidates, rounds=9, block_seconds=0.2)
    verdicts = {row.name: row.verdict for row in report.rows}
    assert verdicts == {
        "as it is": "baseline",
        "the same": "no measurable difference",
        "delayed": "slower",
        "doubled": "slower",
    }
    assert report.row("delayed").speedup == pytest.approx(1 / 1.1, rel=0.01)
    assert report.row("doubled").speedup == pytest.approx(0.5, rel=0.01)
    assert report.row("doubled").samples_per_second == pytest.approx(2 / 0.004, rel=0.2)


@pytest.mark.slow
def test_the_delay_of_a_real_session_is_found(mlp: Artifact) -> None:
    """Checks that the benchmark finds the delay of a real runtime. The delayed runs take ten times as long, so the
    delay is visible on any machine."""
    feeds = mlp.signature.example_inputs(batch=32)
    candidates = [
        Candidate(name, mlp, options={"share": share}, opener="bench_sessions:delayed")
        for name, share in (("as it is", 0.0), ("ten times", 9.0))
    ]
    report = measure(candidates, feeds, rounds=9, block_seconds=0.05, budget_seconds=10)
    assert report.row("ten times").verdict == "slower", report


@pytest.mark.usefixtures("fresh_interpreters")
def test_first_run_and_peak_memory_are_of_the_candidate_alone() -> None:
    """Fails if peak memory is read from ru_maxrss, which a child inherits from its parent."""
    ballast = np.ones(120_000_000, np.uint8)  # 114 MiB in this process
    rows = quick([scripted("a")]).rows
    assert ballast[0] + rows[0].peak_rss_mb < 114


def test_a_block_of_what_became_slower_ends_with_its_time() -> None:
    """Fails if a block makes all its planned runs although the runs became slower. In this test, a block of 0.2 s is
    planned as 200 runs of 1 ms, but most of the runs take 100 ms of simulated time. Also fails if a figure counts the
    planned runs instead of the actual runs."""
    slow = scripted("slow", opener="simulated", ms=1.0, slow_after=100, slow_by=100)
    report = quick([scripted("base", opener="simulated", ms=1.0), slow], block_seconds=0.2)
    row, rounds = report.row("slow"), report.samples["slow"]
    assert (row.error, row.rounds, len(rounds)) == (None, 5, 5)
    cut = [times for times in rounds if len(times) < 20]
    assert len(cut) >= 3
    for times in rounds:
        assert times.sum() <= 2 * 0.2e9 + times.max()  # no pass begins after the block has taken twice its planned time
    assert all(len(times) > 100 for times in report.samples["base"])
    assert row.iterations == sum(map(len, rounds))
    assert row.samples_per_second == pytest.approx(2 * row.iterations / (sum(t.sum() for t in rounds) / 1e9))
    assert row.round_medians_ms == pytest.approx([float(np.median(times)) / 1e6 for times in rounds])
    assert row.speedup == pytest.approx(0.01, rel=0.2)
