"""Measures how long the tests take, and lists the slowest and the skipped tests.

Usage:

    export PYTEST_ADDOPTS="--durations=100 --durations-min=1 -rs"
    make test > test.log; make proof > proof.log
    python benchmarks/suite_time.py test.log proof.log     # writes the results.

Reads the logs of pytest and writes ``benchmarks/results/suite_time.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from accel.timing.environment import environment

RESULTS = Path(__file__).parent / "results" / "suite_time.md"
_DURATION = re.compile(r"^(\d+\.\d+)s (call|setup|teardown)\s+(\S.*)$", re.MULTILINE)
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?):(?:\d+:)? (.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"^((?:\d+ \w+(?:, )?)+) in (\d+\.\d+)s", re.MULTILINE)


def page(logs: list[str], machine: dict[str, object], slowest: int = 100) -> str:
    """Returns the results as Markdown: a row for each run of pytest in ``logs``, the slowest tests and fixtures, and
    the reasons of the skipped tests."""
    runs = [found for log in logs for found in _SUMMARY.findall(log)]
    if not runs:
        raise SystemExit("no summary of pytest was found in the logs; pass the logs of `make test` and `make proof`")
    rows = sorted((found for log in logs for found in _DURATION.findall(log)), key=lambda row: -float(row[0]))
    lines = ["# How long the tests take", "", f"{machine['cpu']}, {machine['cores']} cores.", ""]
    lines += ["| run of pytest | tests | seconds |", "|---|---|---|"]
    lines += [f"| {number} | {tests} | {float(seconds):.0f} |" for number, (tests, seconds) in enumerate(runs, 1)]
    lines += ["", f"The {min(slowest, len(rows))} slowest tests and fixtures (setup):", ""]
    lines += ["| seconds | what | test |", "|---|---|---|"]
    lines += [f"| {float(seconds):.1f} | {what} | `{test}` |" for seconds, what, test in rows[:slowest]]
    skipped = [found for log in logs for found in _SKIPPED.findall(log)]
    lines += ["", "Skipped tests:", "", "| tests | file | reason |", "|---|---|---|"]
    lines += [f"| {count} | `{file}` | {reason} |" for count, file, reason in skipped]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("pass the log files: python benchmarks/suite_time.py test.log proof.log")
    RESULTS.write_text(page([Path(name).read_text() for name in sys.argv[1:]], dict(environment(0))))
    print(RESULTS)
