"""A candidate of ``accel optimize``: made, judged, and a row of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.preflight import NEEDS_FLOAT64, NEEDS_OWN_SCALES
from accel.errors import AccelError, CannotWrite, GateFailed, UnsupportedHere, UsageError
from accel.optimizer.budget import Budget, OutOfTime
from accel.optimizer.judge import Judge, Judgement
from accel.optimizer.mixed_precision import Trajectory, assign
from accel.optimizer.recipes import STAGE_LIMITS, NotTried, Recipe
from accel.progress import report
from accel.stage import run_stage
from accel.verify.gates import OutputGate, gate_runtime


@dataclass(kw_only=True)
class CandidateResult:
    """One row of the table. ``status``: ``chosen``, ``passed`` (right, but not the one taken), ``rejected``,
    ``not tried``; ``reason`` says why it isn't chosen. ``options``: of its session; ``base``: the candidate that it is
    but for those."""

    name: str
    target: str = ""
    precision: str = ""
    status: str = "passed"
    reason: str = ""
    megabytes: float | None = None
    judgement: Judgement | None = None
    measured: Mapping[str, Any] | None = None
    artifact: Artifact | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    runtime: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    trajectory: Trajectory | None = None  # of the search for the layers that stay float
    missed_final: bool = False  # a short measurement was enough to leave it
    hidden_by_noise: bool = False  # it may be faster than what was taken
    unsupported: bool = False  # it was refused for what was asked, not for what came out
    over_budget: bool = False  # it can be made, and is too far off
    out_of_time: bool = False  # it is missing for the budget of time

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "precision": self.precision,
            "status": self.status,
            "reason": self.reason,
            "runtime": self.runtime,
            "options": dict(self.options),
            "megabytes": self.megabytes,
            "judgement": self.judgement.to_json() if self.judgement else None,
            "measured": dict(self.measured) if self.measured else None,
            **({"hidden_by_noise": True} if self.hidden_by_noise else {}),
            **({"mixed": self.trajectory.to_json()} if self.trajectory else {}),
        }

    def bench_row(self) -> dict[str, Any]:
        """Its figures as a row of ``accel.bench.columns``; the verdict is this table's own."""
        judged, measured = self.judgement, self.measured or {}
        return {
            **measured,
            "name": self.name,
            "ci95": None if measured.get("verdict") == "baseline" else measured.get("ci95"),
            "drop": judged.drop if judged else None,
            "metric": judged.metric if judged else None,
            "megabytes": self.megabytes,
            "error": None,
            "verdict": f"{self.status}: {self.reason}" if self.reason else self.status,
        }

    def missed(self, reason: str) -> None:
        """It is not tried, for want of time: for this reason."""
        self.status, self.reason, self.out_of_time = "not tried", reason, True


# The rest of a budget is for measuring, or more of it (``Budget.built``). Nothing is begun after the first
# share of it, and what is under way then is given up at the second.
_BUILDING = 0.6
_GIVING_UP = 0.75


def attempt(
    recipe: Recipe,
    src: Artifact,
    data: Path | None,
    judge: Judge,
    max_drop: float,
    cache: StageCache,
    budget: Budget,
) -> CandidateResult:
    """Make one candidate and judge it. What goes wrong with it is its row's reason, not the end of the run."""
    row = CandidateResult(
        name=recipe.name,
        target=recipe.target.name,
        precision=recipe.precision,
        recipe=recipe,
        runtime=recipe.target.runtime,
        options=dict(recipe.options),
    )
    artifact = src
    last_runnable = src
    share = _BUILDING if recipe.runnable else 1.0
    doing = "the layers that stay float were found"
    try:
        with budget.within(_GIVING_UP if recipe.runnable else math.inf):
            if recipe.search:
                if budget.over(share):
                    row.missed(budget.reason("its precisions were searched"))
                    return row
                with budget.spending(f"{recipe.name}: which layers stay float"):
                    recipe, row.trajectory = assign(recipe, src, judge, max_drop, cache, lambda: budget.over(share))
                row.recipe, row.options = recipe, dict(recipe.options)
            for stage, config, limit in recipe.stages:
                if budget.over(share):
                    row.missed(budget.reason(f"its stage {stage}"))
                    return row
                doing = f"its stage {stage} was over"
                report(f"{recipe.name}: {stage}")
                gates = [OutputGate(limit=limit, data=data)]
                with budget.spending(f"{recipe.name}: {stage}"):
                    artifact = run_stage(stage, artifact, config, gates=gates, cache=cache)
                if gate_runtime(artifact) is not None:
                    last_runnable = artifact
            row.artifact = artifact
            row.megabytes = megabytes(artifact)
            if budget.over(share):
                row.missed(budget.reason("it was judged"))
                return row
            doing = "it was judged"
            report(f"{recipe.name}: judging")
            options = recipe.options if last_runnable is artifact else {}
            with budget.spending(f"{recipe.name}: judging"):
                judged(row, judge, last_runnable, options, max_drop, cache)
            if recipe.runnable and row.status == "passed":
                budget.built()
    except OutOfTime:
        row.missed(budget.reason(doing))
    except UnsupportedHere as error:  # this form of this model for this target; another may do
        row.status, row.reason, row.unsupported = "rejected", str(error), True
        return row
    except (UsageError, CannotWrite):
        raise
    except GateFailed as error:
        row.status, row.reason, row.over_budget = "rejected", _reason(error), True
        if doing == "its stage fit_tensorrt was over":  # no --max-drop reaches this gate
            row.reason += f"; {NEEDS_FLOAT64 if limit == STAGE_LIMITS['fp32'] else NEEDS_OWN_SCALES}"
    except AccelError as error:
        row.status, row.reason = "rejected", _reason(error)
    return row


def _reason(error: AccelError) -> str:
    return str(error).partition("; the file is set aside")[0]


def judged(
    row: CandidateResult,
    judge: Judge,
    artifact: Artifact,
    options: Mapping[str, Any],
    max_drop: float,
    cache: StageCache,
) -> None:
    """Give ``row`` the judgement of ``artifact`` in a session with these options; it is rejected over the budget."""
    row.judgement = _judgement(judge, artifact, options, cache)
    if row.judgement.problem:
        row.status, row.reason, row.over_budget = "rejected", row.judgement.problem, True
    elif row.judgement.drop > max_drop:
        row.status, row.over_budget = "rejected", True
        row.reason = f"drop {row.judgement.drop:.4f} is over the budget {max_drop:g}"


def _judgement(judge: Judge, artifact: Artifact, options: Mapping[str, Any], cache: StageCache) -> Judgement:
    key = judge.key(artifact, options)
    found = cache.get_record("judgement", key)
    if found is not None:
        return Judgement(**{**found, "drop": float("inf") if found["drop"] is None else found["drop"]})
    made = judge.judge(artifact, options)
    if not made.problem:
        cache.put_record("judgement", key, made.to_json())
    return made


def not_tried(item: NotTried) -> CandidateResult:
    """The row of what was left out."""
    target, _, precision = item.name.rpartition(" ")
    return CandidateResult(name=item.name, target=target, precision=precision, status="not tried", reason=item.reason)


def megabytes(artifact: Artifact) -> float:
    """All its files together."""
    return round(sum(f.stat().st_size for f in artifact.files) / 1e6, 2)
