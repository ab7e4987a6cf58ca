"""Tests the script bench_itself.py, which checks the verdicts of accel bench. Proves that the script counts correct and
wrong verdicts without mistakes."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "bench_itself.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # child processes import the script from this folder
    spec = importlib.util.spec_from_file_location("bench_itself", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_itself", module)
    spec.loader.exec_module(module)
    return module


def row(kind: str, verdict: str) -> dict[str, Any]:
    return {
        "kind": kind, "verdict": verdict, "runtime": "onnxruntime", "speedup": 1.0, "ci95": [0.9, 1.1], "rounds": 7,
        "noise_floor": 0.02, "median_ms": 1.0, "block_seconds": 0.08, "seed": 1, "machine": ["a", "b", "c"],
    }  # fmt: skip


def test_the_claims(script: ModuleType) -> None:
    """Fails if the script counts a wrong verdict as right, or a missed delay as found. Of 40 verdicts, the script must
    tolerate two wrong verdicts, but not three."""
    same = "no measurable difference"
    rows = {f"same-{i:02}": row("same", same) for i in range(40)}
    rows |= {f"delayed-{i:02}": row("delayed", "slower") for i in range(20)}
    assert [(claim.right, claim.runs, claim.holds) for claim in script.claims(rows)] == [(40, 40, True), (20, 20, True)]
    rows["same-03"]["verdict"], rows["same-07"]["verdict"] = "faster", "slower"
    assert [claim.holds for claim in script.claims(rows)] == [True, True]
    rows["same-09"]["verdict"] = "faster"
    rows["delayed-04"]["verdict"] = same
    itself, late = script.claims(rows)
    assert (itself.wrong, itself.holds) == (("same-03", "same-07", "same-09"), False)
    assert (late.wrong, late.holds) == (("delayed-04",), False)
    text = script.page({"rows": rows})
    assert text.count("does not hold") == 2
    assert "same-03, same-07, same-09" in text
    assert not any(claim.holds for claim in script.claims({}))  # a benchmark without runs proves no claim


def test_the_delay(script: ModuleType) -> None:
    """Checks that the delayed session runs the model and is at least 10% slower."""
    session = SimpleNamespace(signature="s", run=lambda feeds: (time.sleep(0.05), feeds)[1])
    delayed = script.Delayed(session)
    assert delayed.signature == "s"
    began = time.perf_counter()
    assert delayed.run({"x": 1}) == {"x": 1}
    assert time.perf_counter() - began >= 0.055


def test_both_kinds_are_mixed(script: ModuleType) -> None:
    """Checks that no run is missing or repeated, and that runs with and without a delay are evenly mixed."""
    found = script.names(40, 20)
    assert len(set(found)) == len(found) == 60
    assert 8 <= sum(name.startswith("delayed") for name in found[:30]) <= 12


@pytest.mark.proof
def test_a_run_of_each_kind(script: ModuleType, tmp_path: Path) -> None:
    """Checks that the script runs its model on two runtimes, and that the recorded results contain all measurements."""
    artifacts = script.models(tmp_path)
    for name, runtime in (("delayed-02", "onnxruntime"), ("same-01", "openvino")):
        found = script.run(name, artifacts, {"rounds": 5, "block_seconds": 0.01})
        assert found["runtime"] == runtime
        assert found["median_ms"] > 0
        assert found["rounds"] == 5
        assert {lane: len(medians) for lane, medians in found["round_medians_ms"].items()} == {
            "model": 5, name.partition("-")[0]: 5, "model (again)": 5,
        }  # fmt: skip
        assert found["ci95"][0] <= found["speedup"] <= found["ci95"][1]
        assert name in script.page({"rows": {name: found}})
