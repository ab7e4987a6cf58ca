"""Finds child processes that outlive their command."""

from __future__ import annotations

import time
from pathlib import Path


def children_of(pid: int) -> list[bytes]:
    """Finds child processes that were started for the process ``pid``. Searches the command lines, because an orphan's
    parent is another process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"accel.child" in words and str(pid).encode() in words:
            found.append(b" ".join(words))
    return found


def assert_no_children(pid: int, what: str) -> None:
    """Asserts that all children end within a minute. A child may end after its parent."""
    deadline = time.monotonic() + 60
    while left := children_of(pid):
        assert time.monotonic() < deadline, f"{what}, its children live on: {left}"
        time.sleep(0.05)
