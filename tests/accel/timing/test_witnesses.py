"""Proves that the right statistic decides the verdicts beside other work, and that the report says which one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.artifact import Artifact
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.choice import fastest
from accel.signature import Signature, TensorSpec
from accel.timing.blocks import Block
from accel.timing.paired import BenchReport, Candidate, measure
from accel.timing.report import disturbed
from accel.timing.witnesses import Timed, witness

ROUNDS = 12
SPEC = ("float32", ("batch", 4))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets child processes find this folder's ``bench_sessions`` through the parent's path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def scripted(name: str, *, opener: str, **script: Any) -> Candidate:
    signature = Signature((TensorSpec("x", *SPEC),), (TensorSpec("y", *SPEC),))
    artifact = Artifact(path=Path(f"{name}.fake"), kind="fake", signature=signature)
    return Candidate(name, artifact, options=script, opener=f"bench_sessions:{opener}")


def quick(candidates: list[Candidate], **options: Any) -> BenchReport:
    return measure(candidates, {"x": np.ones((2, 4), np.float32)}, **{"rounds": 5, "block_seconds": 0.01, **options})


def timed(ms: Sequence[float], cpu_ms: float, *, cores: float = 1.0, runs: int = 5, **about: Any) -> Timed:
    """Returns the blocks of a process whose runs take ``ms`` in each round, and ``cpu_ms`` of CPU time."""
    blocks = [
        Block(times=np.full(runs, one * 1e6), seconds=runs * one / 1e3, cpu_seconds=runs * cpu_ms / 1e3, cores=cores)
        for one in ms
    ]
    return Timed(blocks=blocks, **about)


def test_on_a_quiet_machine_the_medians_decide() -> None:
    """Fails if the CPU time decides although the times of the clock agree within 5%. Users wait for the times of the
    clock."""
    first, second = timed([10.0] * ROUNDS, 10.0), timed([10.4] * ROUNDS, 10.0)
    slower = timed([12.0] * ROUNDS, 10.0)
    found = witness(first, second, [slower])
    assert found.statistic == "median"
    assert found.speedup(slower).value == pytest.approx(np.sqrt(10.0 * 10.4) / 12.0)
    assert found.speedup(first).value == 1.0


@pytest.mark.parametrize(
    "other",
    [
        {"cores": 2.0},  # its threads may spin
        {"cores": 0.6},  # it waits for something else than a core
        {"on_gpu": True},
    ],
)
def test_one_candidate_without_its_own_core_rules_the_cpu_time_out(other: dict[str, Any]) -> None:
    """Fails if candidates are compared by CPU time although a run of one of them doesn't take as long as its CPU
    time."""
    rng = np.random.default_rng(0)
    first, second = (timed(rng.uniform(20, 90, ROUNDS), 10.0) for _ in range(2))
    fine, bad = timed(rng.uniform(20, 90, ROUNDS), 11.0), timed(rng.uniform(20, 90, ROUNDS), 11.0, **other)
    assert witness(first, second, [fine]).statistic == "cpu time"
    assert witness(first, second, [fine, bad]).statistic != "cpu time"


def test_throughputs_are_compared_by_the_clock() -> None:
    """Fails if the fastest runs or the CPU time decide about concurrent runs."""
    rng = np.random.default_rng(0)
    lanes = [timed(rng.uniform(20, 90, ROUNDS), 10.0, throughput=True) for _ in range(3)]
    assert witness(lanes[0], lanes[1], lanes[2:]).statistic == "median"


def test_the_sentence_names_the_witness_and_the_share_of_other_work() -> None:
    """Fails if a report doesn't say what decided, or names a share of other work that nobody measured."""
    assert disturbed("median", 0.7) == disturbed(None, None) == ""
    assert "takes 70% of the cores' time: the speedups compare the fastest runs" in disturbed("fast runs", 0.7)
    assert "takes" not in disturbed("cpu time", 0.0).partition(":")[0]
    assert "CPU time" in disturbed("cpu time", None)


def test_the_optimizer_chooses_by_the_speedup_that_was_decided() -> None:
    """Fails if the optimizer chooses by the median of all runs, which depends on chance beside other work."""
    rows = [
        CandidateResult(name=name, measured={"median_ms": ms, "speedup": speedup, "verdict": "faster"})
        for name, ms, speedup in (("fast", 48.0, 2.0), ("lucky", 1.0, 1.2))
    ]
    assert fastest(CandidateResult(name="source"), rows).name == "fast"
    assert rows[1].reason == "slower than fast"


def test_beside_other_work_the_fastest_runs_are_compared(tmp_path: Path) -> None:
    """Fails if runs that other work stalled for 100 times their time hide that one model takes twice as long as the
    other, or make a model seem faster than itself, or if the report doesn't say what it compares."""
    stalls = str(tmp_path / "processes")
    names = {"base": 1.0, "same": 1.0, "twice": 2.0}
    candidates = [scripted(name, opener="simulated", ms=ms, stalls=stalls) for name, ms in names.items()]
    report = quick(candidates, block_seconds=0.2, rounds=20)
    assert (report.statistic, report.to_json()["statistic"]) == ("fast runs", "fast runs")
    assert any("fastest runs" in warning for warning in report.warnings)
    same, twice = report.row("same"), report.row("twice")
    assert (same.verdict, twice.verdict) == ("no measurable difference", "slower")
    assert twice.speedup == pytest.approx(0.5, rel=0.05)
    assert report.noise_floor < 0.05
    quiet = quick([scripted(name, opener="simulated", ms=1.0) for name in ("one", "other")])
    assert quiet.statistic == "median"


def beside_other_work(folder: Path, **script: Any) -> BenchReport:
    """Times a model, the same model and a model with 10% more work, while other work takes most of the core. The
    sessions' clock is simulated."""
    names = {"base": 100.0, "same": 100.0, "more": 110.0}
    candidates = [
        scripted(name, opener="simulated", ms=ms, beside=6.0, processes=str(folder / "processes"), **script)
        for name, ms in names.items()
    ]
    return quick(candidates, block_seconds=1.0, rounds=15)


def test_beside_other_work_the_cpu_time_decides_for_one_thread(tmp_path: Path) -> None:
    """Fails if runs of one thread that wait for their core hide a difference of 10% in their work, or if the report
    doesn't say that the CPU time decided."""
    report = beside_other_work(tmp_path)
    assert (report.statistic, report.to_json()["statistic"]) == ("cpu time", "cpu time")
    assert report.row("same").verdict == "no measurable difference"
    assert report.row("more").verdict == "slower"
    assert report.row("more").speedup == pytest.approx(1 / 1.1, rel=0.02)
    assert report.noise_floor < 0.05
    assert report.row("base").median_ms > 200  # the times in the table are still those of the clock
    assert np.median(report.row("base").round_cpu_ms) == pytest.approx(102, rel=0.02)
    (warning,) = report.warnings
    assert "other work slows this machine down, and takes" in warning
    assert "the speedups compare the CPU time of the runs" in warning


@pytest.mark.parametrize("script", [{"cores": 2}, {"gpu": True}])
def test_the_cpu_time_decides_neither_for_spinning_threads_nor_for_gpus(tmp_path: Path, script: dict[str, Any]) -> None:
    """Fails if the CPU time decides although it includes time in which threads wait for one another or for a GPU."""
    report = beside_other_work(tmp_path, **script)
    assert report.statistic != "cpu time"
    assert report.row("same").verdict in ("no measurable difference", "too noisy")
    advice = any("CPU time can decide" in warning for warning in report.warnings)
    assert advice == ("cores" in script)


def test_spoiled_blocks_are_timed_again_within_the_budget() -> None:
    """Fails if blocks that other work spoiled count although there is time to repeat them, or if they are repeated
    without a budget."""
    spoiled = (150, 500, 900)
    candidates = [scripted(name, opener="simulated", ms=2.0, seed=0, spoiled=spoiled) for name in ("base", "other")]
    with_budget = quick(candidates, block_seconds=0.2, budget_seconds=60.0)
    assert with_budget.repeated >= 6
    assert with_budget.lost == 0.0
    assert max(with_budget.row("other").round_medians_ms) < 2.2
    assert quick(candidates, block_seconds=0.2).repeated == 0
