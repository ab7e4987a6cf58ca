"""Makes one candidate by running its stages with their gates, and judges the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.decoder.lower_cache import CacheNotLowered
from accel.decoders.decoder import special_tokens
from accel.decoders.proof import DecoderGate
from accel.errors import (
    AccelError,
    CannotWrite,
    GateFailed,
    StageFailed,
    UnsupportedHere,
    UsageError,
    one_line,
)
from accel.progress import report
from accel.proof.gates import OutputGate, gate_runtime
from accel.stage import Gate, run_stage

from .budget import Budget, OutOfTime
from .candidate import LARGE_MEGABYTES, CandidateResult, megabytes
from .judge.comparison import Judge, Judgement
from .mixed.search import assign
from .recipes.recipe import Recipe

# No new step begins once the share ``_BUILDING`` of the time budget is spent. The running step is stopped once the
# share ``_GIVING_UP`` is spent. If the measurement needs more time, ``Budget.over`` lowers ``_BUILDING`` and
# ``_GIVING_UP``.
_BUILDING = 0.6
_GIVING_UP = 0.75
# The stages that reduce the precision.
_ROUNDING = ("quantize", "cast", "pack_weights", "lower_cache")
# A candidate is made without a stage of these if the stage fails.
_OPTIONAL = ("fuse_decoder",)
# The stages after which a decoder keeps its cache in another way.
_PROVED_IN_STEPS = ("fuse_decoder", "lower_cache", "stateful_from_onnx")
# The number of samples on which the gate of a stage compares a large model. The judge compares it on further samples.
_SAMPLES_IF_LARGE = 8
# The tokens that a decoder is proved with if nothing records its context.
_USUAL_CONTEXT = 128


def attempt(
    recipe: Recipe,
    src: Artifact,
    data: Path | None,
    judge: Judge,
    max_drop: float,
    cache: StageCache,
    budget: Budget,
) -> CandidateResult:
    """Makes one candidate and judges it. Returns the candidate's row, with the reason if the candidate fails.

    Doesn't catch ``UsageError`` and ``CannotWrite``, because every other candidate would fail with the same error.
    After a Ctrl-C, raises ``KeyboardInterrupt`` if there is no result yet.
    """
    row = CandidateResult(
        name=recipe.name,
        target=recipe.target.name,
        precision=recipe.precision,
        recipe=recipe,
        runtime=recipe.target.runtime,
        options=dict(recipe.options),
    )
    work = _Attempt(row=row, src=src, data=data, judge=judge, max_drop=max_drop, cache=cache, budget=budget)
    try:
        with budget.within(_GIVING_UP if recipe.runnable else math.inf):
            work.run(recipe)
    except KeyboardInterrupt as error:
        budget.interrupt(error)
        row.skip(budget.reason(work.unfinished or "it was begun"), out_of_time=True)
    except OutOfTime:
        row.skip(budget.reason(work.unfinished), out_of_time=True)
    except UnsupportedHere as error:  # other candidates may still be supported
        row.reject(str(error), error)
        row.unsupported = True
    except (UsageError, CannotWrite):
        raise
    except GateFailed as error:
        advice = row.recipe.gate_advice.get(work.stage, "") if row.recipe else ""
        row.reject("; ".join(filter(None, (error.finding or str(error), advice))), error)
        row.over_budget = True
    except CacheNotLowered as error:
        row.skip(str(error))
    except AccelError as error:
        row.reject(str(error), error)
    return row


@dataclass(kw_only=True)
class _Attempt:
    """The steps of an attempt. ``stage`` is the running stage. ``unfinished`` completes the message about a stopped
    step. For example, the message ends in "before it was judged" if ``unfinished`` is "it was judged"."""

    row: CandidateResult
    src: Artifact
    data: Path | None
    judge: Judge
    max_drop: float
    cache: StageCache
    budget: Budget
    stage: str = ""
    unfinished: str = ""

    def run(self, recipe: Recipe) -> None:
        """Runs the stages and judges the result. First searches for the layers that stay float, if the recipe requires
        a search."""
        share = _BUILDING if recipe.runnable else 1.0
        if recipe.search:
            found = self._searched(recipe, share)
            if found is None:
                return
            recipe = found
        runnable = self._built(recipe, share)
        if runnable is None:
            return
        if self._late(share, "it was judged"):
            return
        self.unfinished = "it was judged"
        report(f"{recipe.name}: judging")
        options = recipe.options if runnable is self.row.artifact else _rounding(recipe)
        with self.budget.spending(f"{recipe.name}: judging"):
            judged(self.row, self.judge, runnable, options, self.max_drop, self.cache)
        if recipe.runnable and self.row.passed:
            self.budget.built()

    def _searched(self, recipe: Recipe, share: float) -> Recipe | None:
        """Returns ``recipe`` with the layers to keep in float, or None if the time is over."""
        if self._late(share, "its precisions were searched"):
            return None
        self.unfinished = "the layers that stay float were found"
        with self.budget.spending(f"{recipe.name}: which layers stay float"):
            recipe, self.row.trajectory = assign(
                recipe, self.src, self.judge, self.max_drop, self.cache, lambda: self.budget.over(share)
            )
        self.row.recipe, self.row.options = recipe, dict(recipe.options)
        return recipe

    def _built(self, recipe: Recipe, share: float) -> Artifact | None:
        """Runs the stages in order and returns the last result that this machine can run. Returns None if the time is
        over."""
        artifact = runnable = self.src
        data = None
        for stage, config, limit in recipe.stages:
            # An exact stage keeps to its small limit on random inputs, too. A rounding stage suits only real values.
            data = self.data if stage in _ROUNDING else data
            if self._late(share, f"its stage {stage}"):
                return None
            self.stage, self.unfinished = stage, f"its stage {stage} was over"
            report(f"{recipe.name}: {stage}")
            try:
                with self.budget.spending(f"{recipe.name}: {stage}", quantizing=stage == "quantize"):
                    gates = gates_of(stage, self.src, limit, data)
                    artifact = run_stage(stage, artifact, config, gates=gates, cache=self.cache)
            except (StageFailed, GateFailed) as error:
                if stage not in _OPTIONAL:
                    raise
                self.row.notes.append(f"the stage {stage} was left out: {one_line(error)}")
                continue
            if gate_runtime(artifact) is not None:
                runnable = artifact
        self.stage = ""
        self.row.artifact = artifact
        self.row.megabytes = megabytes(artifact)
        return runnable

    def _late(self, share: float, step: str) -> bool:
        """Tells whether the time for ``step`` is over. Writes the reason into the row if the time is over."""
        if not self.budget.over(share):
            return False
        self.row.skip(self.budget.reason(step), out_of_time=True)
        return True


def _rounding(recipe: Recipe) -> Mapping[str, Any]:
    """Returns the options that make the graph of an engine round as the engine does. Only TF32 isn't in the graph."""
    return {"precision": "tf32"} if recipe.precision == "tf32" else {}


def gates_of(stage: str, src: Artifact, limit: float, data: Path | None) -> list[Gate]:
    """Returns the gates of a stage. A stage that changes the cache of a decoder is proved step by step, as a generation
    runs."""
    if stage in _PROVED_IN_STEPS:
        gate = DecoderGate(limit=limit, context=special_tokens(src).context or _USUAL_CONTEXT)
        return [gate, *(replace(gate, adapter=name) for name in src.adapters)]
    samples = _SAMPLES_IF_LARGE if megabytes(src) >= LARGE_MEGABYTES else OutputGate(limit=limit).samples
    return [OutputGate(limit=limit, data=data, samples=samples)]


def judged(
    row: CandidateResult,
    judge: Judge,
    artifact: Artifact,
    options: Mapping[str, Any],
    max_drop: float,
    cache: StageCache,
) -> None:
    """Judges ``artifact`` in a session with ``options``, and rejects ``row`` if the drop is over ``max_drop``."""
    row.judgement = _judgement(judge, artifact, options, cache)
    if row.judgement.problem:
        row.reject(row.judgement.problem)
        row.over_budget = True
    elif row.judgement.drop > max_drop:
        row.reject(f"drop {row.judgement.drop:.2g} is over the budget {max_drop:g}")
        row.over_budget = True


def _judgement(judge: Judge, artifact: Artifact, options: Mapping[str, Any], cache: StageCache) -> Judgement:
    """Returns the judgement of ``artifact``, from the cache if possible."""
    key = judge.key(artifact, options)
    found = cache.get_record("judgement", key)
    if found is not None:
        return Judgement(**{**found, "drop": math.inf if found["drop"] is None else found["drop"]})
    made = judge.judge(artifact, options)
    if not made.problem:
        cache.put_record("judgement", key, made.to_json())
    return made
