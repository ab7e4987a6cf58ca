"""Defines the result of ``accel optimize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.artifact import Artifact

from .candidate import CandidateResult


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The published model and the results of every candidate.

    ``artifact`` is the published file. ``chosen`` is the name of the chosen candidate. ``candidates`` lists all rows,
    the source first. ``max_drop`` is the largest allowed drop in quality. ``environment`` describes the machine of the
    measurement, and is empty if nothing was measured. ``command`` is the command line that repeats the request.
    ``warnings`` holds the notes with advice on how to get a better result.
    """

    artifact: Artifact
    chosen: str
    candidates: tuple[CandidateResult, ...]
    max_drop: float
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    objective: str = "latency"
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the result in the format of ``optimize.json``."""
        return {
            "chosen": {"name": self.chosen, "file": self.artifact.path.name},
            "max_drop": self.max_drop,
            "objective": self.objective,
            "command": self.command,
            "candidates": [c.to_json() for c in self.candidates],
            "environment": dict(self.environment),
            "notes": list(self.notes),
        }
