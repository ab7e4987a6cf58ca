"""Reads the CPU's instruction sets, and the cores and memory that this process may use."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_VNNI = frozenset({"avx512_vnni", "avx_vnni"})
# The memory files of Linux control groups, first for version 2 and then for version 1. Each row names the file with the
# limit, the file with the memory in use, and the file with the statistics. The last field of a row names the statistic
# that counts droppable file pages.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


# OpenMP's variables for threads that wait. Without them, PyTorch's threads spin while they wait for each other.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_own: dict[str, str] = {}
# Python searches the youngest objects after so many new objects, and older objects after so many searches.
_COLLECTED_AFTER = (50_000, 20, 50)


def share_cores() -> None:
    """Makes PyTorch's threads sleep while they wait for each other, in this process and in its child processes. Does
    nothing if PyTorch is already imported, or if the user's environment sets how threads wait.

    Spinning threads are a little faster on an idle machine. If another program runs on the same cores, a model whose
    threads spin takes ten times longer than a model whose threads sleep.
    """
    if not any(name in os.environ for name in _WAITING):
        _own[_WAITING[0]] = "PASSIVE"
        os.environ.update(_own)


def collect_rarely() -> None:
    """Makes Python search for unreachable objects after every 50,000 new objects instead of after every 700. Does
    nothing if the search is already rarer.

    The imports of torch and transformers, and an export, make millions of objects that stay reachable. Python's usual
    searches take a tenth of the CPU time of an export.
    """
    if gc.get_threshold()[0] < _COLLECTED_AFTER[0]:
        gc.set_threshold(*_COLLECTED_AFTER)


def users_environment() -> dict[str, str]:
    """Returns the environment of this process without the variables that ``share_cores`` has set. Timed candidates run
    in this environment."""
    return {name: value for name, value in os.environ.items() if name not in _own}


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of an x86 CPU, named as in ``/proc/cpuinfo``. Returns an empty set if the system
    lists no flags."""
    lines = _text(_CPU_INFO).splitlines()
    found = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == "flags")
    return frozenset(next(found, "").split())


def int8_saturates() -> bool:
    """Tells whether products of uint8 and int8 may saturate on this CPU. An x86 CPU without VNNI adds two products in
    16 bits, which are too few for the largest sums. ONNX Runtime's page "Quantize ONNX models" explains the saturation
    under ``reduce_range``. Returns True for an x86 CPU whose instruction sets are unknown.
    """
    return platform.machine() in ("x86_64", "AMD64") and not cpu_flags() & _VNNI


def available_cores() -> int:
    """Returns the number of logical cores that this process may use.

    A CPU affinity mask (taskset) or a container's CPU limit can make the number smaller than the machine's core count.
    """
    return cpu_limit() or _cores()


def cpu_limit() -> int:
    """Returns this container's CPU limit in cores, rounded up. Returns 0 if there is no limit, or if the limit covers
    all cores. Reads the files of Linux control groups. Version 2 of control groups has the quota and the period, in
    microseconds, in the file ``cpu.max``. Version 1 of control groups has one file for the quota and one file for the
    period.
    """
    try:
        if (file := _CGROUP / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = (_CGROUP.joinpath("cpu", f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        found = math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # not Linux, no control group, or no limit ("max")
        return 0
    return found if 0 < found < _cores() else 0


def available_memory() -> int | None:
    """Returns the number of bytes that are left before the system or this container (Linux control groups) runs out of
    memory. Returns None if the number is unknown."""
    found = _number(_MEMORY_INFO, r"MemAvailable:\s+(\d+) kB")
    rooms = [] if found is None else [found * 1024]
    for limit, usage, statistics, droppable in _MEMORY_FILES:
        most, taken = _number(_CGROUP / limit, r"(\d+)$"), _number(_CGROUP / usage, r"(\d+)$")
        if most is not None and taken is not None:
            rooms.append(max(0, most - taken + (_number(_CGROUP / statistics, rf"{droppable} (\d+)") or 0)))
    return min(rooms, default=None)


def has_nvidia_gpu() -> bool:
    """Tells whether an NVIDIA driver shows a GPU on this machine."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()


def trim_memory() -> None:
    """Returns freed memory to the system, if the C library has ``malloc_trim`` (as glibc does).

    On its own, glibc does not return small freed blocks, such as most weights, to the system. Without a call of
    ``malloc_trim``, the process keeps most of the memory that closed models took.
    """
    if (function := _malloc_trim()) is not None:
        function(0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(file: Path) -> str:
    """Returns the text of a kernel file, or "" if the file can't be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _number(file: Path, pattern: str) -> int | None:
    """Returns the number that ``pattern`` finds at the start of a line of ``file``, or None if no line matches."""
    found = re.search("^" + pattern, _text(file), re.MULTILINE)
    return int(found[1]) if found else None


@cache
def _malloc_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # ctypes can't open the C library on this platform
        return None
