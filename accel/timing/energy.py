"""The energy of a run, from the machine's RAPL counters if the kernel allows reading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Zone:
    """A CPU package's counter of microjoules, which restarts at 0 after ``wraps``."""

    counter: Path
    wraps: int


class EnergyCounter:
    """The energy of all CPU packages. The energy excludes memory and GPUs, and includes the work of other processes.

    Linux reads the counters of Intel's and AMD's Running Average Power Limit
    (Documentation/power/powercap/powercap.rst).
    """

    def __init__(self, zones: tuple[Zone, ...]) -> None:
        self._zones = zones

    @classmethod
    def find(cls, root: Path = POWERCAP) -> EnergyCounter | None:
        """Returns the counter of this machine, or None if there is no counter that this user may read."""
        zones = []
        # intel-rapl:0 is a package, which includes its subzone intel-rapl:0:0.
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
        """Returns the current microjoules of each package."""
        return tuple(int(zone.counter.read_text()) for zone in self._zones)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """Returns the joules used between two readings. The counters may wrap only once in between."""
        pairs = zip(self._zones, before, after, strict=True)
        return sum((b - a) % (zone.wraps + 1) for zone, a, b in pairs) / 1e6
