"""Does the same still come out?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.export import check_writable, open_cache
from accel.artifact import Artifact
from accel.errors import BadData
from accel.sources import open_source

if TYPE_CHECKING:
    from accel.verify.reproduce import Remade


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """``stages``: what became of each. ``artifact``: what was made now, where it was to be kept. ``intact``: the files
    of the artifact are still those that its manifest records, which is what the stages are compared with."""

    stages: tuple[Remade, ...]
    artifact: Artifact | None = None
    intact: bool = True

    @property
    def passed(self) -> bool:
        """No stage came out different, and the artifact is what the manifest says."""
        return self.intact and all(row.status != "different" for row in self.stages)

    @property
    def identical(self) -> bool:
        """Every stage gave the same bytes as the artifact has."""
        return self.intact and all(row.status == "identical" for row in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "identical": self.identical,
            "intact": self.intact,
            "stages": [row.to_json() for row in self.stages],
            "path": str(self.artifact.path) if self.artifact else None,
        }


def reproduce(
    artifact: str | Path | Artifact, *, data: Sequence[str | Path] = (), out: str | Path | None = None
) -> Reproduction:
    """Make ``artifact`` again from its source by the stages in its manifest, nothing taken from the cache, and compare
    what each stage makes with the recorded sha256; where the bytes differ, by the gate that it passed then.

    ``data``: the files that stages were given (calibration), found by their sha256. ``out``: where to keep the result.
    Raises ``ChainBroken`` where the source is gone or changed, ``UsageError`` where a file is missing in ``data``.
    """
    from accel.verify.reproduce import remake

    given = [Path(path) for path in data]
    for path in given:
        if not path.exists():
            raise BadData(f"{path} does not exist; check --data")
    if out is not None:
        check_writable(Path(out))
    found = open_source(artifact)
    with ExitStack() as stack:
        made, rows = remake(found, given, open_cache(stack, use_cache=False))
        kept = made.copy_to(Path(out)) if out is not None else None
    assert found.manifest is not None  # else there was nothing to run again
    intact = found.hashes() == dict(found.manifest.files)
    return Reproduction(stages=tuple(rows), artifact=kept, intact=intact)
