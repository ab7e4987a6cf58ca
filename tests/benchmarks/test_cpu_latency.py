"""Tests the results page of cpu_latency.py. Proves that the page counts the goals without mistakes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "cpu_latency.py"


def row(ours: float, theirs: float, chosen: str = "openvino int8", spread: float = 0.01) -> dict[str, Any]:
    """Returns a row in which eager takes 100 ms, accel's choice ``ours`` and another tool ``theirs``. The times of the
    rounds differ by the share ``spread``."""
    rounds = [1 + spread * (i - 4) for i in range(9)]

    def result(name: str, ms: float, times: list[float]) -> dict[str, Any]:
        speedup = 100 / ms
        return {
            "name": name, "median_ms": ms, "speedup": speedup, "ci95": [speedup, speedup], "error": None,
            "round_medians_ms": [ms * time for time in times],
        }  # fmt: skip

    names = (("eager", 100.0, rounds), ("another tool", theirs, rounds[::-1]), ("accel's choice", ours, rounds))
    return {
        "bench": {"results": [result(*one) for one in names], "noise_floor": 0.02, "statistic": "median"},
        "optimize": {"chosen": {"name": chosen}, "candidates": [{"name": chosen, "judgement": None}]},
    }


def every(script: ModuleType, **cases: Any) -> dict[str, Any]:
    return {f"{model}-b{batch}": row(**cases) for model, batch in script.ROWS}


def verdicts(lines: list[str]) -> list[str]:
    return [line.split("|")[3].strip() for line in lines[2:]]


def test_the_goals_are_met(script: ModuleType) -> None:
    """Fails if a goal counts as missed when each row is faster than asked."""
    lines = script.goal_lines(every(script, ours=10.0, theirs=12.0))
    assert verdicts(lines) == ["met"] * 4
    assert "1.20x over 17 rows" in lines[2]
    assert "10.00x over 17 rows" in lines[4]


def test_a_row_that_is_behind(script: ModuleType) -> None:
    """Fails if a row counts as behind when the noise is too large to tell, or doesn't count when it is behind."""
    rows = every(script, ours=10.0, theirs=12.0)
    rows["crnn-b1"] = row(ours=10.0, theirs=9.0)
    lines = script.goal_lines(rows)
    assert verdicts(lines)[1] == "**not met**"
    assert "crnn-b1: accel's choice takes 11.1%" in lines[3]
    rows["crnn-b1"] = row(ours=10.0, theirs=9.0, spread=0.1)
    lines = script.goal_lines(rows)
    assert verdicts(lines)[1] == "met"
    assert "too noisy to tell: crnn-b1" in lines[3]


def test_only_int8_rows_count_for_the_speedup_over_eager(script: ModuleType) -> None:
    """Fails if a row in which another precision was chosen changes the mean of the int8 rows."""
    rows = every(script, ours=10.0, theirs=12.0)
    rows["dlrm-b128"] = row(ours=90.0, theirs=120.0, chosen="onnxruntime fp32")
    assert "10.00x over 16 rows" in script.goal_lines(rows)[4]


def test_a_missing_row_meets_no_goal(script: ModuleType) -> None:
    """Fails if the goals over all rows are met before all rows are measured."""
    rows = every(script, ours=10.0, theirs=12.0)
    del rows["unet-b1"]
    lines = script.goal_lines(rows)
    assert verdicts(lines)[:2] == ["**not met**"] * 2
    assert "not measured: unet-b1" in lines[2]
