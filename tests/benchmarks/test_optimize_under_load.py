"""Tests the script optimize_under_load.py, which compares the choices of accel optimize beside other work with those of
a quiet machine. Proves that the script counts right and wrong choices without mistakes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "optimize_under_load.py"


def all_rows(script: ModuleType, chosen: str = "openvino int8") -> dict[str, Any]:
    """Returns the rows of a series in which each run has the same choice."""
    run = {"chosen": chosen, "file": "model.xml", "speedup": 3.0, "noise_floor": 0.02, "optimize_seconds": 20.0}
    found = {"median_ms": 1.0, "speedup": 1.0, "ci95": [0.99, 1.01], "error": None}
    slow = {**found, "speedup": 0.85}
    near = {**found, "speedup": 0.95}
    compared = {
        "choices": {chosen: found, "source": slow, "openvino bf16": near},
        "quiet": chosen, "noise_floor": 0.02, "machine": ["a", "b"],
    }  # fmt: skip
    return {name: dict(run if load >= 0 else compared) for name, (_, load) in script.names().items()}


def test_the_series(script: ModuleType) -> None:
    """Fails if the series has other than 20 runs beside busy processes, or if a load or a model has few of them, or if
    the files are compared before they are made."""
    cases = script.names()
    loads = Counter(load for _, load in cases.values())
    assert sum(loads[load] for load in script.LOADS) == script.RUNS == 20
    assert min(Counter(case for case in cases.values() if case[1] > 0).values()) >= 3
    numbers = [load for _, load in cases.values()]
    models = len(script.MODELS)
    assert numbers[:models] == [0] * models
    assert numbers[-models:] == [-1] * models


def test_another_choice_counts_by_its_speed(script: ModuleType) -> None:
    """Fails if a choice that is 5% slower counts as wrong, if one that is 15% slower counts as right, or if a second
    wrong choice still meets the goal."""
    rows = all_rows(script)
    loaded = [name for name, (_, load) in script.names().items() if load > 0]
    rows[loaded[0]]["chosen"] = "openvino bf16"
    assert script.judged(rows)[loaded[0]] == (0.95, True)
    rows[loaded[1]]["chosen"] = "source"
    assert script.judged(rows)[loaded[1]] == (0.85, False)
    page = script.page({"rows": rows})
    assert "**Goal met**: right in 19 of 20 compared runs." in page
    rows[loaded[2]]["chosen"] = "source"
    assert "**Goal not met**: right in 18 of 20 compared runs." in script.page({"rows": rows})


def test_a_choice_that_fails_is_wrong(script: ModuleType) -> None:
    """Fails if a file that can't be timed on the quiet machine counts as right."""
    rows = all_rows(script)
    for model in script.MODELS:
        rows[f"{model}-compared"]["choices"]["source"] = {"median_ms": None, "speedup": None, "error": "it crashed"}
    loaded = [name for name, (_, load) in script.names().items() if load > 0]
    rows[loaded[0]]["chosen"] = "source"
    assert script.judged(rows)[loaded[0]] == (None, False)
    assert "it crashed" in script.page({"rows": rows})


def test_an_interrupted_series_meets_no_goal(script: ModuleType) -> None:
    """Fails if runs whose files aren't compared yet count as right, or if files are compared before all runs."""
    rows = all_rows(script)
    rows = {name: row for name, row in rows.items() if not name.endswith("compared")}
    assert "20 not compared yet" in script.page({"rows": rows})
    missing, model = next((name, model) for name, (model, load) in script.names().items() if load == 4)
    del rows[missing]
    with pytest.raises(RuntimeError, match=f"not run yet: {missing}"):
        script.side_by_side(model, rows, Path("nowhere"))
