"""What the instructions of this machine's CPU decide."""

from __future__ import annotations

import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
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
