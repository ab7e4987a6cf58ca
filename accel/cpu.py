"""What this machine's CPU can do, and how much of it this process may use."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_VNNI = frozenset({"avx512_vnni", "avx_vnni"})


def cpu_flags() -> frozenset[str]:
    """The instruction sets of an x86 CPU by the kernel's names; empty where the system doesn't list them."""
    try:
        lines = _INFO.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == "flags")
    return frozenset(next(found, "").split())


def int8_saturates() -> bool:
    """Whether products of uint8 and int8 may come out wrong here: an x86 CPU without VNNI adds two of them in 16 bits,
    which is too small for the largest (ONNX Runtime, "Quantize ONNX models", on ``reduce_range``). Where the system
    doesn't say what an x86 CPU has, it may."""
    return platform.machine() in ("x86_64", "AMD64") and not cpu_flags() & _VNNI


def available_cores() -> int:
    """Logical cores that this process may use: a taskset may leave it fewer than there are, and a container's limit on
    CPU time as many as that time fills."""
    return cpu_limit() or _cores()


def cpu_limit() -> int:
    """Cores that a limit on this container's CPU time fills, rounded up; 0 where it fills all, or there is none. Linux
    control groups, version 2 (``cpu.max``: microseconds in each period, and the period) or 1 (two files)."""
    try:
        if (file := _CGROUP / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = (_CGROUP.joinpath("cpu", f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        found = math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # not Linux, no control group, or "max"
        return 0
    return found if 0 < found < _cores() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
