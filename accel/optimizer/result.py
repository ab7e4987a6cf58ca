"""The result of ``accel optimize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.artifact import Artifact

from .candidate import CandidateResult


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The published choice and what was found about every candidate.

    ``artifact``: the published file. ``chosen``: the name of the chosen candidate. ``candidates``: all rows, the source
    first. ``max_drop``: the budget of quality. ``environment``: the machine that measured; empty if nothing was
    measured. ``command``: the command line that makes the same request again. ``warnings``: the part of ``notes`` that
    says how to get more.
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
        """Returns the result as ``optimize.json`` has it."""
        return {
            "chosen": {"name": self.chosen, "file": self.artifact.path.name},
            "max_drop": self.max_drop,
            "objective": self.objective,
            "command": self.command,
            "candidates": [c.to_json() for c in self.candidates],
            "environment": dict(self.environment),
            "notes": list(self.notes),
        }
