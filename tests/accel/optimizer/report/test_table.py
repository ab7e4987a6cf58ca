"""Proves that the table of candidates fits into 100 columns, and gives a reason for each rejected candidate."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from accel.optimizer.candidate import CandidateResult, Status
from accel.optimizer.report.table import table

MEASURED = {"median_ms": 12345.678, "p90_ms": 2.5, "p99_ms": 23456.7, "speedup": 1.25, "ci95": (1.2, 1.3)}


def printed(*, wide: bool) -> list[str]:
    late = "8 s of the budget of 9 s were spent before it was measured"
    rows = [
        CandidateResult(name="source", measured={**MEASURED, "verdict": "baseline"}, megabytes=1234.5),
        CandidateResult(name="ort-cpu int8 static", status=Status.CHOSEN, measured=MEASURED, megabytes=310.2),
        CandidateResult(name="wrong", status=Status.REJECTED, reason=f"drop 0.4 {'is over the budget ' * 4}"),
        *(CandidateResult(name=f"late {i}", status=Status.NOT_TRIED, reason=late, out_of_time=True) for i in "ab"),
        CandidateResult(name="no data", status=Status.NOT_TRIED, reason="int8 needs data"),
    ]
    result: Any = SimpleNamespace(
        artifact=SimpleNamespace(path=Path("out/model.onnx")), chosen="x", objective="latency", candidates=rows,
        notes=("measured at x [1, 2]",),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=4000 if wide else 100)
    console.print(table(result, wide=wide))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_a_narrow_table() -> None:
    """Checks that no line is longer than 100 columns, that no reason or name is lost, and that untried candidates have
    no row."""
    lines = printed(wide=False)
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert f"wrong: drop 0.4 {'is over the budget ' * 4}".strip() in text
    assert "not tried: late a; late b: out of time" in text
    assert "not tried: no data: int8 needs data" in text
    assert not [line for line in lines if "│" in line and "late" in line]


def test_a_wide_table() -> None:
    """Fails if ``--wide`` leaves out a column with values, or wraps a reason."""
    lines = printed(wide=True)
    assert [line for line in lines if "p90 ms" in line and "95% interval" in line]
    assert [
        line for line in lines if "late b" in line and "of the budget of 9 s were spent before it was measured" in line
    ]
    assert [line for line in lines if "wrong" in line and "rejected: drop 0.4" in line]
