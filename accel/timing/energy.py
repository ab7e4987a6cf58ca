"""What the machine's own counter says a run costs: RAPL, where the kernel lets it be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Zone:
    """A CPU package's counter: microjoules so far, beginning again at 0 behind ``wraps``."""

    counter: Path
    wraps: int


class EnergyCounter:
    """The CPU packages together, memory and GPUs not among them. Other processes' work counts as well.

    (Intel's and AMD's Running Average Power Limit as Linux shows it: Documentation/power/powercap/powercap.rst.)
    """

    def __init__(self, zones: tuple[Zone, ...]) -> None:
        self._zones = zones

    @classmethod
    def find(cls, root: Path = POWERCAP) -> EnergyCounter | None:
        """The counter of this machine; None where there is none, or only root may read it."""
        zones = []
        # intel-rapl:0 is a package; intel-rapl:0:0 a part of it that is counted there already.
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
        """Microjoules of each package now."""
        return tuple(int(zone.counter.read_text()) for zone in self._zones)

    def joules(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        """What was used between two readings, at most one wrap of the counter apart."""
        pairs = zip(self._zones, before, after, strict=True)
        return sum((b - a) % (zone.wraps + 1) for zone, a, b in pairs) / 1e6
