"""Which layers stay float so that the rest can be int8: measured layer by layer, kept within the budget, confirmed on
samples that the search has not seen."""

from __future__ import annotations

import glob
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, canonical_json, text_sha256
from accel.cache import StageCache
from accel.converters.quantize import QuantizeConfig
from accel.converters.quantize_sensitivity import Sensitivity, sensitivities
from accel.errors import NothingPassed
from accel.optimizer.judge import Judge, Judgement, Metric
from accel.optimizer.label_metric import LabelMetric
from accel.optimizer.recipes import Recipe, Step
from accel.progress import report
from accel.stage import config_json, run_stage, versions
from accel.verify.data import Dataset
from accel.verify.gates import OutputGate, gate_runtime

if TYPE_CHECKING:
    import numpy as np

# Of the layers that the search kept, this many are tried again one by one without their neighbours.
_SECOND_LOOKS = 8


@dataclass(frozen=True, kw_only=True)
class Try:
    """One assignment that was built and judged. ``judged_on``: ``search`` (the first half of the data), ``held out``
    (the second) or ``all`` (where the metric can't be computed on a half). ``drop``: as in ``Judgement``."""

    kept: tuple[str, ...]
    drop: float
    within: bool
    judged_on: str


@dataclass(kw_only=True)
class Trajectory:
    """How an assignment was found. ``layers``: what each loses alone, the most sensitive first. ``base``: what the
    layers in ``kept`` compute in."""

    base: str
    layers: Sequence[Sensitivity] = ()
    tries: list[Try] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    confirmed: bool = False

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _finite(asdict(self))
        return found


def _finite(value: Any) -> Any:
    """Without infinities, which JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def assign(
    recipe: Recipe, src: Artifact, judge: Judge, max_drop: float, cache: StageCache
) -> tuple[Recipe, Trajectory]:
    """``recipe``, which quantizes all it can, with the fewest layers left in float that keep ``max_drop``.

    The layers are ranked by what each loses alone. By bisection the shortest head of that list is found that is within
    the budget when it is left float; then each of these is tried without the others. What remains is confirmed on the
    held-out half of the data; as long as that doesn't, the next layers of the list are left float as well.
    Raises ``NothingPassed`` where not even float for every layer is within the budget.
    """
    search = _Search(recipe, src, max_drop, cache)
    with ExitStack() as stack:
        halves = _halves(judge, stack)
        search.run(*halves)
    trajectory = search.trajectory
    return search.with_kept(trajectory.kept), trajectory


class _Search:
    def __init__(self, recipe: Recipe, src: Artifact, max_drop: float, cache: StageCache) -> None:
        self._recipe = recipe
        self._src = src
        self._max_drop = max_drop
        self._cache = cache
        self._at = next(i for i, (name, _, _) in enumerate(recipe.stages) if name == "quantize")
        self._data: Path | None = recipe.stages[self._at][1].data  # type: ignore[attr-defined]
        self._made: dict[tuple[str, ...], Artifact] = {}
        self.trajectory = Trajectory(base=base_precision(recipe))

    def with_kept(self, kept: Sequence[str]) -> Recipe:
        name, config, limit = self._recipe.stages[self._at]
        assert isinstance(config, QuantizeConfig)
        patterns = (*config.keep, *(glob.escape(node) for node in kept))
        steps = list(self._recipe.stages)
        steps[self._at] = (name, replace(config, keep=patterns), limit)
        if len(kept) == len(self.trajectory.layers):  # nothing is left to quantize
            del steps[self._at]
        return replace(self._recipe, stages=tuple(steps))

    def run(self, search: tuple[str, Judge], held_out: tuple[str, Judge] | None) -> None:
        found = self.trajectory
        found.layers = self._ranked()
        names = [layer.node for layer in found.layers]
        count = self._shortest(search, names)
        kept = self._thinned(search, names[:count])
        while held_out is not None and not self._within(held_out, kept):
            more = [name for name in names if name not in kept]
            if not more:
                raise NothingPassed("not even without int8 is the model within the budget; raise --max-drop")
            kept = self._in_order(names, [*kept, *more[: max(1, len(kept) // 4)]])
        found.kept = tuple(kept)
        found.confirmed = held_out is not None

    def _ranked(self) -> list[Sensitivity]:
        """From the cache, where this model was measured with these options before."""
        ready = self._through(self._src, self._recipe.stages[: self._at])
        _, config, _ = self._recipe.stages[self._at]
        assert isinstance(config, QuantizeConfig)
        body = {"options": config_json(config), "input": ready.digest, "versions": versions(("onnxruntime", "onnx"))}
        key = text_sha256(canonical_json(body))
        rows = self._cache.get_record("sensitivity", key)
        if rows is None:
            rows = [asdict(row) for row in sensitivities(ready, config)]
            self._cache.put_record("sensitivity", key, rows)
        return [Sensitivity(**row) for row in rows]

    def _shortest(self, judge: tuple[str, Judge], names: list[str]) -> int:
        """How many of ``names``, from the front, have to stay float."""
        if self._within(judge, []):
            return 0
        low, high = 0, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._within(judge, names[:middle]) else (middle, high)
        return high

    def _thinned(self, judge: tuple[str, Judge], kept: list[str]) -> list[str]:
        """Without those that turn out not to be needed, the least sensitive first."""
        for name in list(reversed(kept))[1 : 1 + _SECOND_LOOKS]:  # without the last one it has failed already
            fewer = [other for other in kept if other != name]
            if self._within(judge, fewer):
                kept = fewer
        return kept

    def _within(self, judge: tuple[str, Judge], kept: Sequence[str]) -> bool:
        where, by = judge
        report(f"{self._recipe.name}: {len(kept)} layers in {self.trajectory.base}")
        judgement = self._judged(by, tuple(kept))
        within = not judgement.problem and judgement.drop <= self._max_drop
        self.trajectory.tries.append(Try(kept=tuple(kept), drop=judgement.drop, within=within, judged_on=where))
        return within

    def _judged(self, judge: Judge, kept: tuple[str, ...]) -> Judgement:
        if kept not in self._made:
            self._made[kept] = self._through(self._src, self.with_kept(kept).stages)
        artifact = self._made[kept]
        options = self._recipe.options if artifact.kind == self._recipe.target.kind else {}
        return judge.judge(artifact, options)

    def _through(self, src: Artifact, steps: Sequence[Step]) -> Artifact:
        """The last of the stages' results that this machine can run."""
        artifact = runnable = src
        for stage, config, limit in steps:
            if stage == "engine_from_onnx":
                break  # minutes, and here it can't be run: the ONNX it is built from is judged
            gates = [OutputGate(limit=limit, data=self._data)]
            artifact = run_stage(stage, artifact, config, gates=gates, cache=self._cache)
            if gate_runtime(artifact) is not None:
                runnable = artifact
        return runnable

    @staticmethod
    def _in_order(names: list[str], kept: list[str]) -> list[str]:
        return [name for name in names if name in kept]


def base_precision(recipe: Recipe) -> str:
    """What the layers that aren't int8 compute in."""
    cast = next((config for name, config, _ in recipe.stages if name == "cast"), None)
    return str(getattr(cast, "precision", None) or recipe.options.get("precision", "fp32"))


def _halves(judge: Judge, stack: ExitStack) -> tuple[tuple[str, Judge], tuple[str, Judge] | None]:
    """A judge on the first half of the data, and one on the second; the judge itself alone where its metric needs all
    samples at once."""
    if judge.data is None:
        return ("all", judge), None
    dataset = Dataset.load(judge.data, judge.source.signature)
    count = len(dataset)
    metrics = _metric_by_half(judge.metric, dataset, count // 2)
    if count < 2 or metrics is None:
        return ("all", judge), None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halves-")))
    judges = []
    for name, metric, start, stop in (
        ("search", metrics[0], 0, count // 2),
        ("held out", metrics[1], count // 2, count),
    ):
        half = folder / name
        half.mkdir()
        _write(dataset, half, start, stop)
        judges.append((name, Judge(judge.source, half, metric)))
    return judges[0], judges[1]


def _metric_by_half(metric: Metric | None, dataset: Dataset, half: int) -> tuple[Metric | None, Metric | None] | None:
    """The metric for each half; None where it can't be said which of its arrays belongs to which sample."""
    if metric is None:
        return None, None
    if isinstance(metric, LabelMetric):
        first, second = (replace(metric, labels=part) for part in (metric.labels[:half], metric.labels[half:]))
        return first, second
    if all(len(value) == len(dataset) for value in dataset.extra().values() if value.ndim) and dataset.extra():
        return metric, metric
    return None


def _write(dataset: Dataset, folder: Path, start: int, stop: int) -> None:
    """The samples from ``start`` to ``stop``, as .npz files that have the parts' order."""
    import numpy as np

    first = dataset.signature.inputs[0].name
    at = 0
    for number, part in enumerate(dataset.parts):
        count = len(part[first])
        low, high = max(start - at, 0), min(stop - at, count)
        at += count
        if low < high:
            arrays: dict[str, np.ndarray] = {}
            for name, value in part.items():
                arrays[name] = value[low:high] if value.ndim and len(value) == count else value
            np.savez(folder / f"{number:06d}.npz", **arrays)  # type: ignore[arg-type]
