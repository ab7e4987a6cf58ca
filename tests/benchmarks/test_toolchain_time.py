"""Tests the script toolchain_time.py. Proves that the script counts memory as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "benchmarks" / "toolchain_time.py"
MIB = 64
# Maps a file, reads all of its pages, starts a second process that does the same, and waits for the end of its input.
MAPPER = """
import mmap, subprocess, sys
first = None
if len(sys.argv) == 2:
    words = [sys.executable, "-c", sys.argv[1].partition("|")[2], sys.argv[1], "child"]
    first = subprocess.Popen(words, stdin=sys.stdin, stdout=subprocess.PIPE)
    first.stdout.readline()
with open(sys.argv[1].partition("|")[0], "rb") as stream:
    pages = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
print(sum(pages[at] for at in range(0, len(pages), 4096)), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="Linux tells which pages are shared")
def test_shared_memory_counts_once(script: ModuleType, tmp_path: Path) -> None:
    """Fails if a page that two processes share counts twice in the memory that is shared once, or if the memory of a
    child process doesn't count."""
    file = tmp_path / "weights"
    file.write_bytes(b"1" * (MIB << 20))
    words = [sys.executable, "-c", MAPPER, f"{file}|{MAPPER}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        resident = script.tree_mib(process.pid)
        once = script.tree_mib(process.pid, "smaps_rollup", "Pss:")
    assert resident > 2 * MIB
    assert MIB <= once <= resident - 0.9 * MIB
    assert script.tree_mib(process.pid) == 0.0  # the process has ended


def test_rows_without_the_second_column(script: ModuleType) -> None:
    """Fails if the page can't show the results of an older version."""
    step = {"command": "accel export", "seconds": 9.0, "peak_mib": 700}
    machine = {"cpu": "a CPU", "cores": 2, "date": "2026-11-28T00:00:00"}
    row = {"title": "accel", "steps": [step], "second": [{**step, "peak_once_mib": 500}], "environment": machine}
    page = script.markdown({"rows": {"accel": row}})
    assert "| 700 |  |" in page
    assert "| 700 | 500 |" in page
