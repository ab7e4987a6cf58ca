"""Represents a candidate of ``accel optimize`` as a row of the table of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from accel.artifact import Artifact
from accel.errors import library_text

from .judge.comparison import Judgement
from .mixed.trajectory import Trajectory
from .recipes.recipe import NotTried, Recipe


class Status(StrEnum):
    """The status of a candidate, spelled as in ``optimize.json``."""

    CHOSEN = "chosen"
    PASSED = "passed"  # passed the gates and the judge, but was not chosen
    REJECTED = "rejected"
    NOT_TRIED = "not tried"


# A run of a model of at least this size may take a second, so there are fewer runs before the first result.
LARGE_MEGABYTES = 100.0


@dataclass(kw_only=True)
class CandidateResult:
    """One row of the table.

    ``reason`` is the reason why the candidate isn't chosen. ``options`` holds the session options. ``base`` is the name
    of the same candidate with the default session options. ``base`` is empty if ``options`` are the default options.
    ``detail`` is the text of a library's error behind the reason, for ``optimize.json``.
    ``trajectory`` is the record of the search for the layers that stay float, or None without a search.
    ``missed_final`` is set if the candidate was eliminated after a short measurement. ``hidden_by_noise`` is set if the
    candidate seems faster than the chosen candidate, but the noise is too large to tell. ``unsupported`` is set if the
    attempt raised ``UnsupportedHere``. ``over_budget`` is set if the candidate's outputs differ too much from the
    source's outputs. ``out_of_time`` is set if there was too little time to try or measure the candidate. ``notes`` are
    for the user, about stages that were left out.
    """

    name: str
    target: str = ""
    precision: str = ""
    status: str = Status.PASSED
    reason: str = ""
    detail: str = ""
    megabytes: float | None = None
    judgement: Judgement | None = None
    measured: Mapping[str, Any] | None = None
    artifact: Artifact | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    runtime: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    trajectory: Trajectory | None = None
    missed_final: bool = False
    hidden_by_noise: bool = False
    unsupported: bool = False
    over_budget: bool = False
    out_of_time: bool = False
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the row in the format of ``optimize.json``."""
        return {
            "name": self.name,
            "target": self.target,
            "precision": self.precision,
            "status": str(self.status),
            "reason": self.reason,
            **({"detail": self.detail} if self.detail else {}),
            "runtime": self.runtime,
            "options": dict(self.options),
            "megabytes": self.megabytes,
            "judgement": self.judgement.to_json() if self.judgement else None,
            "measured": dict(self.measured) if self.measured else None,
            **({"hidden_by_noise": True} if self.hidden_by_noise else {}),
            **({"mixed": self.trajectory.to_json()} if self.trajectory else {}),
        }

    def bench_row(self) -> dict[str, Any]:
        """Returns the measured figures as a row for ``accel.timing.columns``. The verdict of the row is the status and
        the reason."""
        judged, measured = self.judgement, self.measured or {}
        noisy = measured.get("verdict") == "too noisy"
        return {
            **measured,
            "name": self.name,
            "too_noisy": noisy,
            "speedup": None if noisy else measured.get("speedup"),
            "ci95": None if noisy or measured.get("verdict") == "baseline" else measured.get("ci95"),
            "drop": judged.drop if judged else None,
            "metric": judged.metric if judged else None,
            "megabytes": self.megabytes,
            "error": None,
            "verdict": f"{self.status}: {self.reason}" if self.reason else str(self.status),
        }

    @property
    def passed(self) -> bool:
        """Tells whether the candidate has passed every check so far and may be chosen."""
        return self.status == Status.PASSED

    @property
    def is_faster(self) -> bool:
        """Tells whether the candidate was measured to be faster than the source."""
        return self.measured is not None and self.measured["verdict"] == "faster"

    def reject(self, reason: str, cause: BaseException | None = None) -> None:
        """Marks the candidate as rejected, because it is wrong or can't be made. ``cause`` is the error behind the
        reason, if any."""
        self.status, self.reason = Status.REJECTED, reason
        self.detail = library_text(cause) if cause else ""

    def skip(self, reason: str, *, out_of_time: bool = False) -> None:
        """Marks the candidate as not tried or not measured."""
        self.status, self.reason, self.out_of_time = Status.NOT_TRIED, reason, out_of_time


def not_tried(item: NotTried) -> CandidateResult:
    """Returns the row of a precision that was left out."""
    return CandidateResult(
        name=item.name, target=item.target, precision=item.precision, status=Status.NOT_TRIED, reason=item.reason
    )


def megabytes(artifact: Artifact) -> float:
    """Returns the size of all files of ``artifact`` in MB (10^6 bytes)."""
    return round(sum(f.stat().st_size for f in artifact.files) / 1e6, 2)
