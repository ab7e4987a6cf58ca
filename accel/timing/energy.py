"""Measures the energy of runs with the machine's RAPL counters, if the kernel allows reading the counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Zone:
    """A CPU package's energy counter. The counter counts microjoules up to ``wraps``, and then restarts at 0."""

    counter: Path
    wraps: int


class EnergyCounter:
    """Measures the energy of all CPU packages. The energy includes the work of other processes, but not the energy of
    memory and GPUs.

    Linux reads Intel's and AMD's counters for the Running Average Power Limit, RAPL
    (Documentation/power/powercap/powercap.rst).
    """

    def __init__(self, zones: tuple[Zone, ...]) -> None:
        self._zones = zones

    @classmethod
    def find(cls, root: Path = POWERCAP) -> EnergyCounter | None:
        """Returns the energy counter of this machine, or None if there is no counter that this user may read."""
        zones = []
        # Only CPU packages are counted, because a package's counter (intel-rapl:0) includes its subzones
        # (intel-rapl:0:0).
        for folder in sorted(root.glob("intel-rapl:*")):
            if folder.name.count(":") > 1:
                continue
            try:
                wraps = int((folder / "max_energy_range_uj").read_text())
                int((folder / "energy_uj").read_text())
            except (OSError, ValueError):
                continue
            zones.append(Zone(folder / "energy_uj", wraps))
        return cls(tuple(zones)) if zones else None

    def read(self) -> tuple[int, ...]:
        """Returns the current value of each package's counter in microjoules."""
        return tuple(int(zone.counter.read_text()) for zone in self._zones)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Returns the joules used between two readings. The result is wrong if a counter restarted more than once
        between the readings."""
        pairs = zip(self._zones, before, after, strict=True)
        return sum((b - a) % (zone.wraps + 1) for zone, a, b in pairs) / 1e6
