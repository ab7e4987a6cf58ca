"""How long the tests of training took, said at the end: six minutes on two quiet cores is their limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats, root = terminalreporter.stats, terminalreporter.config.rootpath
    reports = [report for kind in ("passed", "failed", "error", "skipped", "") for report in stats.get(kind, [])]
    here = [r for r in reports if hasattr(r, "duration") and (root / r.nodeid.split("::")[0]).parent == HERE]
    if here:
        seconds = sum(report.duration for report in here)
        terminalreporter.write_line(f"tests/train took {seconds:.0f} s (limit of the whole on two quiet cores: 360 s)")
