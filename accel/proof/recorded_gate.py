"""Implements the gate that compares models on recorded inputs, such as the user's example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel.artifact import Artifact

from .gates import OutputGate

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class RecordedGate(OutputGate):
    """Runs the inputs of each ``.npz`` file in the folder ``data``, and limits the relative error like ``OutputGate``.

    Unlike the samples of a data set, recorded inputs are used unchanged. An input may be a scalar or have an axis 0 of
    any size.
    """

    name: str = "recorded"

    def _feeds(self, src: Artifact, _: Artifact) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        import numpy as np

        assert self.data is not None
        for file in sorted(self.data.glob("*.npz")):
            with np.load(file, allow_pickle=False) as arrays:
                yield file.stem, {spec.name: arrays[spec.name] for spec in src.signature.inputs}


def write_recorded(calls: Sequence[Mapping[str, np.ndarray]], folder: Path, name: str) -> Path | None:
    """Writes the inputs of each of ``calls`` to a file of ``folder``. Returns ``folder``, or None if an input has a
    dtype that the file format lacks, such as bfloat16."""
    import numpy as np

    if not calls or any(value.dtype.kind in "VOUS" for feeds in calls for value in feeds.values()):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for number, feeds in enumerate(calls, start=1):
        np.savez(folder / f"{name} {number:04d}.npz", **feeds)  # type: ignore[arg-type]
    return folder
