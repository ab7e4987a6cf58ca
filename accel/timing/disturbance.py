"""Reads how much of a block other work on the machine took: the time that this process's threads waited for a core, and
the time that a hypervisor, a container's CPU limit or the heat took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

# Linux counts steal time in units of 1/100 s on all machines that accel runs on (USER_HZ).
_TICKS = 100
_NS, _US, _MS = 1e9, 1e6, 1e3
# The files of a process that uses a GPU include one of these devices.
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The counters at a moment, all in seconds since their start. A counter that the system lacks is 0.

    ``cpu`` is the CPU time of all threads of this process. ``waited`` is the time that these threads were ready to run
    and had no core. ``stolen`` is the time that the hypervisor gave the cores to other machines, as a mean over the
    cores. ``throttled`` is the time that a container's CPU limit or the heat stopped or slowed the cores.
    """

    cpu: float
    waited: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a block used and missed. ``cpu`` is the CPU time of the process in seconds. ``cores`` is the number of cores
    that the process could have used on a quiet machine, as a mean over the block. ``lost`` is the share of the time of
    these cores that the process didn't get, from 0 to 1.
    """

    cpu: float
    cores: float
    lost: float


def usage(before: Reading, after: Reading, seconds: float) -> Usage:
    """Returns the usage between two readings that are ``seconds`` apart."""
    cpu, waited = after.cpu - before.cpu, max(0.0, after.waited - before.waited)
    wanted = cpu + waited
    outside = (after.stolen - before.stolen + after.throttled - before.throttled) / max(seconds, 1e-9)
    lost = (waited / wanted if wanted else 0.0) + max(0.0, outside)
    return Usage(cpu=cpu, cores=wanted / max(seconds, 1e-9), lost=min(1.0, lost))


class Counters:
    """Reads the counters of this process and of the machine below the folders ``proc`` and ``sys``.

    Linux documents the counters in Documentation/scheduler/sched-stats.rst (the second number of a thread's
    ``schedstat``), Documentation/accounting/psi.rst, proc_stat(5) (``steal``) and admin-guide/cgroup-v2.rst
    (``throttled_usec``). A kernel without ``schedstat`` may have the pressure counter. This counter runs while any
    thread of the machine waits, so it overestimates the wait of this process.
    """

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._threads, self._stat, self._pressure = proc / "self/task", proc / "stat", proc / "pressure/cpu"
        self._files = proc / "self/fd"
        groups = sys / "fs/cgroup"
        # The counter of each file, and what divides the number to get seconds. A container sees its own group as root.
        limits = ((groups / "cpu.stat", "throttled_usec", _US), (groups / "cpu/cpu.stat", "throttled_time", _NS))
        self._limits = [limit for limit in limits if limit[0].is_file()]
        name = "thermal_throttle/package_throttle_total_time_ms"
        self._heat = sorted(sys.glob(f"devices/system/cpu/cpu[0-9]*/{name}"))

    def read(self) -> Reading:
        """Returns the present counters."""
        return Reading(
            cpu=time.process_time(), waited=self._waited(), stolen=self._stolen(), throttled=self._throttled()
        )

    def uses_gpu(self) -> bool:
        """Tells whether this process has a GPU open. The CPU time of such a process says nothing about its speed."""
        try:
            opened = [str(link.readlink()) for link in self._files.iterdir()]
        except OSError:  # not Linux, or a file was closed meanwhile
            return False
        return any(name.startswith(_GPU_DEVICES) for name in opened)

    def _waited(self) -> float:
        try:
            threads = list(self._threads.iterdir())
        except OSError:  # not Linux
            return 0.0
        waits = [_numbers(thread / "schedstat") for thread in threads]
        if found := [numbers[1] for numbers in waits if len(numbers) == 3]:
            return sum(found) / _NS
        return _field(self._pressure, "some", "total=") / _US

    def _stolen(self) -> float:
        """Returns the steal time, which is the eighth number of the first line."""
        try:
            lines = self._stat.read_text(errors="replace").splitlines()
        except OSError:
            return 0.0
        cores = sum(line.startswith("cpu") for line in lines) - 1
        values = lines[0].split() if lines else []
        return int(values[8]) / _TICKS / cores if len(values) > 8 and values[8].isdecimal() and cores > 0 else 0.0

    def _throttled(self) -> float:
        limited = sum(_field(path, name) / unit for path, name, unit in self._limits)
        return limited + max((sum(_numbers(path)[:1]) / _MS for path in self._heat), default=0.0)


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in a file of numbers. Returns [] for a file that can't be read or has other text."""
    try:
        return [int(part) for part in path.read_text(errors="replace").split()]
    except (OSError, ValueError):  # a thread has ended, or the kernel has no such counter
        return []


def _field(path: Path, name: str, prefix: str = "") -> int:
    """Returns the number in the line of ``path`` that begins with ``name``: the last word, without ``prefix``. Returns
    0 if there is no such number."""
    try:
        lines = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return 0
    found = next((words[-1].removeprefix(prefix) for words in lines if words[:1] == [name]), "")
    return int(found) if found.isdecimal() else 0
