"""Tests the script bench_itself.py, which checks the verdicts of accel bench. Proves that the script counts correct and
wrong verdicts without mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "bench_itself.py"


def row(kind: str, load: int, verdict: str, peers: str = "slower") -> dict[str, Any]:
    return {
        "kind": kind, "load": load, "verdict": verdict, "runtime": "onnxruntime", "speedup": 1.0, "ci95": [0.9, 1.1],
        "rounds": 7, "noise_floor": 0.02, "median_ms": 1.0, "block_seconds": 0.08, "seed": 1, "machine": ["a", "b"],
        "measured_seconds": 12.0, "statistic": "median", "lost": 0.01,
        "peers": dict.fromkeys(("pyperf", "hyperfine", "asv", "criterion"), peers),
    }  # fmt: skip


def test_the_claims(script: ModuleType) -> None:
    """Fails if the script counts a wrong verdict as right, or a missed delay as found, or if a peer's verdict counts as
    accel's. Of 20 verdicts, the script must tolerate one wrong verdict, but not two."""
    same = "no measurable difference"
    rows = {f"same-4-{i:02}": row("same", 4, same) for i in range(20)}
    rows |= {f"twice-4-{i:02}": row("twice", 4, "slower") for i in range(20)}
    found = script.claims(rows)
    assert [(claim.right, claim.runs, claim.holds) for claim in found] == [(20, 20, True)] * 2
    assert [claim.peers["asv"] for claim in found] == [0, 20]  # a model isn't slower than itself
    rows["same-4-03"]["verdict"] = "faster"
    rows["twice-4-07"]["verdict"] = same
    assert [claim.holds for claim in script.claims(rows)] == [True, True]
    rows["same-4-07"]["verdict"] = "slower"
    rows["twice-4-09"]["verdict"] = "faster"
    itself, late = script.claims(rows)
    assert (itself.wrong, itself.holds) == (("same-4-03", "same-4-07"), False)
    assert (late.wrong, late.holds) == (("twice-4-07", "twice-4-09"), False)
    text = script.page({"rows": rows})
    assert text.count("does not hold") == 2
    assert "same-4-03, same-4-07" in text
    assert script.claims({}) == []  # a benchmark without runs proves no claim


def test_the_peers_verdicts(script: ModuleType) -> None:
    """Fails if a peer's statistic calls two sides of the same distribution different, or doesn't see that the candidate
    takes twice as long, or confuses the two sides."""
    rng = np.random.default_rng(0)
    first, second = ([rng.normal(1e6, 1e4, 50) for _ in range(12)] for _ in range(2))
    slow = [2 * block for block in second]
    for says in script.PEERS.values():
        assert says(first, second) == "no measurable difference"
        assert says(first, slow) == "slower"
        assert says(slow, first) == "faster"


def test_the_delay(script: ModuleType) -> None:
    """Checks that the delayed session runs the model and is at least 10% slower."""
    session = SimpleNamespace(signature="s", run=lambda feeds: (time.sleep(0.05), feeds)[1])
    delayed = script.Delayed(session)
    assert delayed.signature == "s"
    began = time.perf_counter()
    assert delayed.run({"x": 1}) == {"x": 1}
    assert time.perf_counter() - began >= 0.055


def test_the_cases_are_mixed(script: ModuleType) -> None:
    """Checks that each case runs equally often, and that an interrupted series covers all cases."""
    found = script.names(20)
    assert len(found) == 20 * len(script.CASES)
    assert len(set(list(found.values())[: len(script.CASES)])) == len(script.CASES)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_busy_processes_end(script: ModuleType) -> None:
    """Fails if a busy process doesn't run inside the ``with`` block, or outlives the block."""
    before = children()
    with script.busy(2):
        assert len(children() - before) == 2
    assert children() <= before


def test_a_busy_process_ends_without_its_starter(script: ModuleType) -> None:
    """Fails if a busy process goes on after its time, or after the end of the process that started it."""
    code = script._BUSY.replace(str(script._BUSY_SECONDS), "0.1")
    subprocess.run([sys.executable, "-c", code, str(os.getpid())], check=True, timeout=60)
    starter = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())])"
    # Both processes have the pipe, so this returns when both have ended.
    subprocess.run([sys.executable, "-c", starter, script._BUSY], check=True, timeout=60, stdout=subprocess.PIPE)


@pytest.mark.proof
def test_a_run_of_each_kind(script: ModuleType, tmp_path: Path) -> None:
    """Checks that the script runs its models on two runtimes, and that the recorded results contain all
    measurements."""
    artifacts, cases = script.models(tmp_path), script.names(3)
    kinds = (
        ("delayed-0-02", "torch"),
        ("same-1-01", "openvino"),
        ("twice-4-03", "onnxruntime"),
        ("long-third-4-01", "onnxruntime"),
    )
    for name, runtime in kinds:
        found = script.run(name, cases[name], artifacts, {"rounds": 5, "block_seconds": 0.01})
        assert found["runtime"] == runtime
        assert found["median_ms"] > 0
        assert found["rounds"] == 5
        assert found["verdict"] != "identical"  # accel bench must not know that a model is compared with itself
        assert set(found["peers"]) == set(script.PEERS)
        assert found["ci95"][0] <= found["speedup"] <= found["ci95"][1]
        assert name in script.page({"rows": {name: found}})
