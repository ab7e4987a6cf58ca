"""Searches for the layers that have to stay float so that all other layers can be int8.

Each layer's error is measured separately and weighed against the layer's cost. The search keeps the accuracy drop
within ``max_drop`` and confirms its result on held-out samples.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from accel.artifact import Artifact, canonical_json, text_sha256
from accel.cache import StageCache
from accel.converters.cast.stage import CastConfig
from accel.converters.quantize.sensitivity import Sensitivity, sensitivities
from accel.converters.quantize.stage import QuantizeConfig
from accel.errors import GateFailed, NothingPassed
from accel.progress import report
from accel.proof.gates import OutputGate, gate_runtime
from accel.spelling import option
from accel.stage import config_json, run_stage, versions

from ..budget import OutOfTime
from ..judge.comparison import Judge, Judgement
from ..recipes.recipe import Recipe, Step
from .assignment import Assignment, Upgrade, assigned, assigned_after, cost, upgrades
from .halves import Half, halves
from .trajectory import Trajectory, Try

# After the search, at most this many float layers are tried in int8 again, one by one.
_SECOND_LOOKS = 8


def assign(
    recipe: Recipe,
    src: Artifact,
    judge: Judge,
    max_drop: float,
    cache: StageCache,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[Recipe, Trajectory]:
    """Finds the layers that the int8 recipe ``recipe`` has to keep in float. Returns the recipe that keeps the found
    layers in float, and the record of the search.

    Searches in three steps:

    - Bisection finds the shortest prefix of ``upgrades`` that keeps the drop within ``max_drop``.
    - The costliest layers of the prefix are tried in int8 again, one by one.
    - Further upgrades are added until the held-out half of the data confirms the result.

    Raises ``NothingPassed`` if the drop is over ``max_drop`` even with every layer in float. Raises ``OutOfTime`` if
    ``out_of_time()`` is true before an assignment is found.
    """
    search = _Search(recipe, src, max_drop, cache, out_of_time)
    with ExitStack() as stack:
        search_on, held_out, search.trajectory.not_confirmed = halves(judge, stack)
        chosen = search.run(search_on, held_out)
    return search.with_assignment(chosen), search.trajectory


class _Search:
    """One search. Each assignment is built only once, and is judged only once on each half of the data."""

    def __init__(
        self, recipe: Recipe, src: Artifact, max_drop: float, cache: StageCache, out_of_time: Callable[[], bool]
    ) -> None:
        self._recipe = recipe
        self._src = src
        self._max_drop = max_drop
        self._cache = cache
        self._out_of_time = out_of_time
        self._at = next(i for i, step in enumerate(recipe.stages) if isinstance(step[1], QuantizeConfig))
        self._data: Path | None = self._quantization.data
        self._made: dict[Assignment, Artifact | None] = {}
        self._known: dict[tuple[str, Assignment], bool] = {}
        # If all layers are in a 16-bit precision, only the cast stage can keep single layers in float32.
        self._beyond = any(isinstance(config, CastConfig) for _, config, _ in recipe.stages)
        self.trajectory = Trajectory(base=base_precision(recipe))

    @property
    def _quantization(self) -> QuantizeConfig:
        config = self._recipe.stages[self._at][1]
        assert isinstance(config, QuantizeConfig)
        return config

    def with_assignment(self, chosen: Assignment) -> Recipe:
        """Returns the recipe with the layers in ``chosen`` kept in float."""
        steps = list(self._recipe.stages)
        if len(chosen) == len(self.trajectory.layers):  # every layer stays in float
            del steps[self._at]
            return replace(self._recipe, stages=tuple(steps))
        patterns = (*self._quantization.keep, *(glob.escape(node) for node, _ in chosen))
        steps[self._at] = steps[self._at]._replace(config=replace(self._quantization, keep=patterns))
        for index, step in enumerate(steps):
            if isinstance(step.config, CastConfig):
                in_fp32 = (*step.config.keep_fp32, *(glob.escape(node) for node in self._in_fp32(chosen)))
                steps[index] = step._replace(config=replace(step.config, keep_fp32=in_fp32))
        return replace(self._recipe, stages=tuple(steps))

    def run(self, search: Half, held_out: Half | None) -> Assignment:
        """Returns the cheapest assignment found, and records it in the trajectory."""
        found = self.trajectory
        found.layers = self._ranked()
        steps = upgrades(found.layers, found.base, beyond=self._beyond)
        chosen = self._thinned(search, self._shortest(search, steps))
        while held_out is not None and not self._within(held_out, chosen):
            self._check_time()
            have = dict(chosen)
            more = [step for step in steps if have.get(step.node) not in (step.precision, "fp32")]
            if not more:
                raise NothingPassed(
                    f"even without int8 layers, the quality drop is too large; raise {option('max_drop')}"
                )
            chosen = assigned_after(have, more[: max(1, len(chosen) // 4)], found.layers)
        found.kept = tuple(node for node, _ in chosen)
        found.in_fp32 = self._in_fp32(chosen)
        found.confirmed = held_out is not None
        return chosen

    def _in_fp32(self, chosen: Assignment) -> tuple[str, ...]:
        """Returns the layers that the cast has to leave in float32 although the base precision has 16 bits.

        If every layer is float, returns no layers. In this case, the cast stage finds the nodes that need float32.
        """
        if len(chosen) == len(self.trajectory.layers):
            return ()
        return tuple(node for node, precision in chosen if precision != self.trajectory.base)

    def _ranked(self) -> list[Sensitivity]:
        """Returns the layers with their measured errors. The errors come from the cache if they were measured with the
        same options before."""
        ready = self._through(self._src, self._recipe.stages[: self._at])
        config = self._quantization
        base = self.trajectory.base if self._beyond else "fp32"
        body = {
            "options": config_json(config),
            "base": base,
            "input": ready.digest,
            "versions": versions(("onnxruntime", "onnx")),
        }
        key = text_sha256(canonical_json(body))
        rows = self._cache.get_record("sensitivity", key)
        if rows is None:
            rows = [asdict(row) for row in sensitivities(ready, config, base)]
            self._cache.put_record("sensitivity", key, rows)
        return [Sensitivity(**row) for row in rows]

    def _shortest(self, half: Half, steps: list[Upgrade]) -> Assignment:
        """Returns the assignment after the shortest prefix of ``steps`` that keeps the drop within ``max_drop``.
        Returns the assignment after all steps if no shorter prefix is enough."""
        layers = self.trajectory.layers
        if self._within(half, ()):
            return ()
        low, high = 0, len(steps)
        while high - low > 1:
            self._check_time()
            middle = (low + high) // 2
            within = self._within(half, assigned(steps[:middle], layers))
            low, high = (low, middle) if within else (middle, high)
        return assigned(steps[:high], layers)

    def _thinned(self, half: Half, chosen: Assignment) -> Assignment:
        """Returns ``chosen`` without the layers that work in int8 after all. Tries the costliest layers first."""
        layers = {layer.node: layer for layer in self.trajectory.layers}
        by_cost = sorted(chosen, key=lambda one: -cost(layers[one[0]], one[1]))
        for one in by_cost[:_SECOND_LOOKS]:
            fewer = tuple(other for other in chosen if other != one)
            if self._known.get((half.name, fewer)) is None and self._out_of_time():
                break
            if self._within(half, fewer):
                chosen = fewer
        return chosen

    def _check_time(self) -> None:
        if self._out_of_time():
            raise OutOfTime(
                f"the search for the layers to keep in float ran out of time; give more {option('budget_seconds')}"
            )

    def _within(self, half: Half, chosen: Assignment) -> bool:
        """Tells whether the drop of the assignment is within ``max_drop`` on this half of the data."""
        known = self._known.get((half.name, chosen))
        if known is not None:
            return known
        report(f"{self._recipe.name}: {len(chosen)} layers in {self.trajectory.base}")
        judgement = self._judged(half.judge, chosen)
        drop = judgement.drop if judgement is not None else math.inf
        within = judgement is not None and not judgement.problem and drop <= self._max_drop
        kept = tuple(node for node, _ in chosen)
        self.trajectory.tries.append(
            Try(kept=kept, drop=drop, within=within, judged_on=half.name, in_fp32=self._in_fp32(chosen))
        )
        self._known[half.name, chosen] = within
        return within

    def _judged(self, judge: Judge, chosen: Assignment) -> Judgement | None:
        """Returns the judgement of the assignment, or None if the gate of a stage fails."""
        if chosen not in self._made:
            try:
                self._made[chosen] = self._through(self._src, self.with_assignment(chosen).stages)
            except GateFailed:
                self._made[chosen] = None
        artifact = self._made[chosen]
        if artifact is None:
            return None
        options = self._recipe.options if artifact.kind == self._recipe.target.kind else {}
        return judge.judge(artifact, options)

    def _through(self, src: Artifact, steps: Sequence[Step]) -> Artifact:
        """Runs the stages in order and returns the last result that this machine can run."""
        artifact = runnable = src
        for stage, config, limit in steps:
            if stage == "engine_from_onnx":
                break  # building an engine takes minutes, so the engine's ONNX file is judged instead
            gates = [OutputGate(limit=limit, data=self._data)]
            artifact = run_stage(stage, artifact, config, gates=gates, cache=self._cache)
            if gate_runtime(artifact) is not None:
                runnable = artifact
        return runnable


def base_precision(recipe: Recipe) -> str:
    """Returns the precision of the layers that aren't int8. The precision comes from the recipe's cast stage, or from
    the session if the recipe has no cast."""
    cast = next((config for _, config, _ in recipe.stages if isinstance(config, CastConfig)), None)
    return cast.precision if cast is not None else str(recipe.options.get("precision", "fp32"))
