"""Proves that the page about the test suite's run time lists every run of pytest and the skipped tests, and sorts
the slowest tests by time."""

from __future__ import annotations

import pytest

from benchmarks.suite_time import page

LOG = """
...                                                                      [100%]
1.50s setup    tests/a.py::test_one
12.04s call     tests/b.py::test_two[x-1]
SKIPPED [2] tests/c.py:7: needs a GPU
(3 durations < 1s hidden.  Use -vv to show these durations.)
1 failed, 7 passed, 2 skipped in 61.25s (0:01:01)
"""


def test_the_page() -> None:
    """Checks that the page lists every run, failure and slow test, and that the tests are sorted by time."""
    text = page([LOG, LOG.replace("12.04", "2.00")], {"cpu": "a CPU", "cores": 2}, slowest=3)
    assert "| 1 | 1 failed, 7 passed, 2 skipped | 61 |\n| 2 | 1 failed" in text
    assert "| 2 | `tests/c.py` | needs a GPU |" in text
    rows = [line for line in text.splitlines() if "tests/" in line and "GPU" not in line]
    assert rows == [
        "| 12.0 | call | `tests/b.py::test_two[x-1]` |",
        "| 2.0 | call | `tests/b.py::test_two[x-1]` |",
        "| 1.5 | setup | `tests/a.py::test_one` |",
    ]


def test_a_log_without_a_run() -> None:
    """Fails if a log without pytest's summary gives an empty page instead of an error."""
    with pytest.raises(SystemExit, match="no summary of pytest"):
        page(["make: *** error"], {"cpu": "a CPU", "cores": 2})
