"""How much memory there is, and giving back what was freed."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

_INFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Of a control group, in version 2 and 1: what it may take, what it has, and what of that are files it could drop.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available() -> int | None:
    """Bytes that processes may take before the system has none left, or the limit of this container (Linux control
    groups) is reached; None where the system doesn't say."""
    found = _number(_INFO, r"MemAvailable:\s+(\d+) kB")
    rooms = [] if found is None else [found * 1024]
    for limit, usage, statistics, cached in _GROUP_FILES:
        most, taken = _number(_CGROUP / limit, r"(\d+)$"), _number(_CGROUP / usage, r"(\d+)$")
        if most is not None and taken is not None:
            rooms.append(max(0, most - taken + (_number(_CGROUP / statistics, rf"{cached} (\d+)") or 0)))
    return min(rooms, default=None)


def _number(file: Path, pattern: str) -> int | None:
    """The first number that a line of the kernel's has by this pattern."""
    try:
        found = re.search("^" + pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def trim() -> None:
    """Give back what the C library keeps of freed memory, where it can (glibc, malloc_trim(3)).

    Weights come in pieces below the size from which glibc maps memory apart: after a model is closed about its size
    stays with the process, and with the next model that lies elsewhere as much again.
    """
    if (function := _malloc_trim()) is not None:
        function(0)


@cache
def _malloc_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library; a system that has no "the program itself"
        return None
