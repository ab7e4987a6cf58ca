"""Proves that the digest of a metric follows the metric's code, also in a notebook."""

from __future__ import annotations

import linecache
from typing import Any

from accel.optimizer.judge.metric_code import metric_digest


def cell(number: int, code: str) -> Any:
    """Defines the function ``metric`` as a notebook does, with source code in no file."""
    name = f"/tmp/ipykernel_1/cell_{number}.py"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), space)
    return space["metric"]


def test_a_metric_of_a_notebook() -> None:
    """Fails if a metric from a cell of a notebook raises an error, has a new digest each time, or keeps its digest when
    its code changes."""
    first = "def metric(outputs, data):\n    return 1.0\n"
    metric = cell(1, first)
    assert metric_digest(metric) == metric_digest(metric)
    assert metric_digest(metric) != metric_digest(cell(2, first.replace("1.0", "2.0")))
