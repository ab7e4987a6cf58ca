"""Describes the machine and the library versions for reports."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accel.machine import available_cores, cpu_flags
from accel.stage import versions

from .energy import EnergyCounter

_PACKAGES = (
    "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", "torch",
    "tensorrt-cu13", "tensorrt-rtx-cu13-bindings",
)  # fmt: skip

# The instruction sets that determine the speed of low precision on a CPU.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def environment(threads: int, *, date: bool = True) -> dict[str, Any]:
    """Returns CPU, GPUs, memory, energy counter, versions and threads for a report, without the machine's name.

    If ``date`` is True, the result includes the time and the load average.
    """
    model, features = _cpu()
    body: dict[str, Any] = {
        "cpu": model,
        "cpu_features": features,
        "cores": available_cores(),
        "threads": threads,
        "memory_gb": _memory_gb(),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "energy": "RAPL" if EnergyCounter.find() else "not available",
        "versions": versions(_PACKAGES),
    }
    if date:
        body["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        body["load_average"] = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return body


def peak_rss_mb(pid: int) -> float | None:
    """Returns the peak resident memory of a running process in MiB, or None if unknown.

    Reads the kernel's ``VmHWM`` instead of ``ru_maxrss``, because a child process inherits ``ru_maxrss`` from its
    parent.
    """
    kib = _field(Path(f"/proc/{pid}/status"), "VmHWM")
    return round(int(kib.split()[0]) / 1024, 1) if kib else None


def _cpu() -> tuple[str, list[str]]:
    info = Path("/proc/cpuinfo")
    name = _field(info, "model name") or platform.processor() or platform.machine()
    flags = cpu_flags()
    return name, [f for f in _FEATURES if f in flags]


def _memory_gb() -> float | None:
    kib = _field(Path("/proc/meminfo"), "MemTotal")
    return round(int(kib.split()[0]) / 1024**2, 1) if kib else None


def _gpus() -> list[str]:
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_field(path, "Model") or "NVIDIA GPU" for path in found]


def _field(path: Path, name: str) -> str | None:
    """Returns the value in the first ``name: value`` line of a kernel file, or None if the file has no such line."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None
