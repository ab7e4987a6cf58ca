"""Proves that the plan tells the memory of real runs within 5%."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.plan_memory import RESULT, RUNS, launch, planned, table

BODY: dict[str, Any] = json.loads(RESULT.read_text())


def test_the_table_has_all_runs() -> None:
    """Fails if a run has no committed figure, or if the page isn't made from the figures."""
    assert sorted(row["run"] for row in BODY["rows"]) == sorted(RUNS)
    assert len(RUNS) >= 10
    assert RESULT.with_suffix(".md").read_text() == table(BODY)


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_tells_the_measured_peak(name: str) -> None:
    """Fails if the plan of a run differs by over 5% from the committed peak of each repetition, so it fails if a
    formula counts a tensor that isn't there at the peak, or leaves one out."""
    (row,) = (row for row in BODY["rows"] if row["run"] == name)
    world, words = RUNS[name]
    assert (row["ranks"], row["config"]) == (world, words)
    total = planned(world, words).total
    for measured in ("measured_least_bytes", "measured_most_bytes"):
        assert total == pytest.approx(row[measured], rel=0.05)


@pytest.mark.proof
@pytest.mark.slow
def test_ranks_hold_what_is_planned() -> None:
    """Fails if DDP keeps gradients beside its buckets, if a pipeline keeps the outputs of all micro-batches, or if a
    stage of a single data-parallel rank holds its parameters twice."""
    names = ["DDP", "PP 2, 1F1B"]
    for name, measured in launch(names).items():
        assert planned(*RUNS[name]).total == pytest.approx(measured, rel=0.05), name
