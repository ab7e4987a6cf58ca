"""Proves that the load benchmark judges its goals correctly, and counts lost and duplicate answers."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "serve_goals.py"


def test_goals(script: ModuleType) -> None:
    """Checks that the ratio of two servers is computed for each round separately, and isn't inverted. Also checks that
    a goal counts as missed if its value is on the wrong side of the bound. MLServer has two setups, and a ratio must
    use the faster setup. Also fails if a ratio compares rates at different concurrencies."""
    rates = {
        # The machine is twice as slow in the second round, for all servers.
        ("mlp", "accel", 32): [7000.0, 3600.0, 7000.0], ("mlp", "accel-one", 32): [4000.0, 2000.0, 4400.0],
        ("mlp", "mlserver", 32): [1000.0, 500.0, 1000.0], ("mlp", "mlserver-workers", 32): [500.0, 600.0, 500.0],
        ("mlp", "triton", 32): [3000.0, 1600.0, 3000.0], ("mlp", "triton-two", 32): [4000.0, 2000.0, 4000.0],
        ("mlp", "accel", 8): [1.0], ("mlp", "triton", 8): [9.0],
        ("image", "accel", 8): [130.0], ("image", "triton", 8): [100.0], ("image", "mlserver", 8): [10.0],
        ("small", "accel", 8): [250.0], ("small", "floor", 8): [100.0],
        ("small", "accel", 32): [300.0], ("small", "floor", 32): [100.0],
    }  # fmt: skip
    found = script.goals(rates, [119.0, 100.0, 119.5], [2.9])
    assert [goal.found for goal in found] == pytest.approx([1.75, 7.0, 1.0, 2.5, 3.0, 1.3, 119.0, 2.9])
    assert [goal.met for goal in found] == [True, True, False, False, True, True, True, True]
    assert found[1].row()["rounds"] == pytest.approx([7.0, 7.2, 7.0])
    assert [goal.met for goal in script.goals(rates, [121.0], [3.1])[-2:]] == [False, False]
    lines = script.table(found)
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["yes", "yes", "no", "no", "yes", "yes", "yes", "yes"]
    assert "7.00 to 7.20" in lines[3]


def test_what_the_goals_need(script: ModuleType) -> None:
    """Fails if a run for the goals alone leaves out a server or a number of callers that a goal compares."""
    rates = {
        (scenario, server, callers): [1.0]
        for scenario in ("mlp", "small", "image")
        for server in (
            "accel",
            "accel-one",
            "triton",
            "triton-two",
            "mlserver",
            "mlserver-workers",
            "floor",
            "litserve",
        )
        for callers in script.needed(scenario, server)
    }
    assert ("mlp", "accel", 1) in rates  # the time over session.run
    assert not any(server == "litserve" for _, server, _ in rates)
    assert all(goal.found is not None for goal in script.goals(rates, [1.0], [1.0]))


def test_what_was_not_measured(script: ModuleType) -> None:
    """Fails if a goal that was not measured counts as met or missed."""
    found = script.goals({("mlp", "accel", 8): [3300.0], ("small", "accel", 8): [1.0]}, [])
    assert {goal.met for goal in found} == {None}
    assert all("not measured |  | - |" in line for line in script.table(found)[2:])
    assert all(goal.row()["found"] is None for goal in found)


@pytest.mark.parametrize(
    ("success", "fail", "agrees"),
    [(100, 0, True), (104, 0, True), (103, 1, True), (99, 0, False), (95, 5, False), (113, 0, False), (100, 9, False)],
)
def test_counts_that_differ(monkeypatch: pytest.MonkeyPatch, success: int, fail: int, agrees: bool) -> None:
    """Fails if a run passes although requests were lost or answered twice. Also fails if a run passes although the load
    generator overlooked failed requests. The load generator counts 100 answers, and up to 8 requests may be unanswered
    when it stops."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    serve_h2load = importlib.import_module("serve_h2load")
    found = iter([(7, 3), (7 + success, 3 + fail)])
    monkeypatch.setattr(serve_h2load, "settled", lambda *_: next(found))
    outcome = nullcontext() if agrees else pytest.raises(RuntimeError, match="h2load counted 100 answers")
    with outcome, serve_h2load.counted(1, "m") as sent:
        sent.append((100, 8))
    assert sent[1:] == [(max(0, 100 - success), max(0, success + fail - 108))]


def test_requests_that_never_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run passes although some requests got no answer."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    serve_h2load = importlib.import_module("serve_h2load")

    def ran(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout="requests: 20 total, 20 started, 19 done, 18 succeeded, 1 failed, 1 errored\n")

    monkeypatch.setattr(serve_h2load, "subprocess", SimpleNamespace(run=ran))
    with pytest.raises(RuntimeError, match="18 of 20 requests were answered"):
        serve_h2load.exactly(1, Path("body"), 20, 8)
    assert serve_h2load.exactly(1, Path("body"), 18, 8) == 18


def test_what_the_page_says_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the table has columns for lost and duplicate answers. For a server that doesn't count answers, these
    columns must show "-" instead of 0. Also fails if the text below the table quotes rates of another run."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    serve_load = importlib.import_module("serve_load")
    run = {"rate": 100.0, "p50": 0.26, "p99": 1.0, "failed": 0.0}
    rows = [
        serve_load.row("mlp", "accel", 8, [{**run, "lost": 1, "twice": 2}, {**run, "lost": 3, "twice": 0}]),
        serve_load.row("mlp", "floor", 1, [run]),
        serve_load.row("mlp", "floor-model", 8, [{**run, "rate": 320.0}] * 2),
        serve_load.row("mlp", "mlserver", 8, [run] * 2),
    ]
    lines = serve_load.markdown(rows, [], []).splitlines()
    assert next(line for line in lines if line.startswith("| mlp | accel")).endswith("| 0 | 4 | 2 |")
    assert next(line for line in lines if line.startswith("| mlp | mlserver")).endswith("| 0 | - | - |")
    assert "reaches 3.2 times MLServer at concurrency 8; accel" in lines[-2]
    assert "takes 0.26 ms (p50)" in lines[-1]
