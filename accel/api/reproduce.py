"""Makes an artifact again from its source, and compares the result of each stage with the recorded result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.errors import BadData
from accel.sources.source import Model, Source
from accel.spelling import option

from .export import check_writable, open_cache

if TYPE_CHECKING:
    from accel.proof.reproduce import Remade


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Holds the result of ``reproduce``.

    ``stages`` holds the result of each stage. ``artifact`` is the new artifact, or None without ``out``. ``intact``
    is True if the files of the given artifact still have their recorded hashes.
    """

    stages: tuple[Remade, ...]
    artifact: Artifact | None = None
    intact: bool = True

    @property
    def passed(self) -> bool:
        """Tells whether the artifact is intact and no stage gave a different result."""
        return self.intact and all(row.status != "different" for row in self.stages)

    @property
    def identical(self) -> bool:
        """Tells whether the artifact is intact and every stage gave the same bytes again."""
        return self.intact and all(row.status == "identical" for row in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "identical": self.identical,
            "intact": self.intact,
            "stages": [row.to_json() for row in self.stages],
            "path": str(self.artifact.path) if self.artifact else None,
        }


def reproduce(artifact: Model, *, data: Sequence[str | Path] = (), out: str | Path | None = None) -> Reproduction:
    """Makes ``artifact`` again from its source. Runs the stages in the manifest again, without the cache.

    Compares the result of each stage with the recorded sha256. If the bytes of a result differ, runs the recorded gate
    of the stage again. ``data`` lists the files that the stages read, such as calibration data. Each file of ``data``
    is recognized by its sha256. ``out`` is the path of the new artifact. Raises ``ChainBroken`` if the source is gone
    or has changed, and ``UsageError`` if ``data`` lacks a file.
    """
    from accel.proof.reproduce import remake

    given = [Path(path) for path in data]
    for path in given:
        if not path.exists():
            raise BadData(f"{path} does not exist; check {option('data')}")
    if out is not None:
        check_writable(Path(out))
    found = Source.of(artifact).open()
    with ExitStack() as stack:
        made, rows = remake(found, given, open_cache(stack, use_cache=False))
        kept = made.copy_to(Path(out)) if out is not None else None
    assert found.manifest is not None  # the function remake raises an error if the manifest is missing
    intact = found.hashes() == dict(found.manifest.files)
    return Reproduction(stages=tuple(rows), artifact=kept, intact=intact)
