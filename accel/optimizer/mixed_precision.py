"""Which layers stay float so that the rest can be int8: measured layer by layer, weighed by what they cost, kept within
the budget, confirmed on samples that the search has not seen."""

from __future__ import annotations

import glob
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, canonical_json, finite_json, text_sha256
from accel.cache import StageCache
from accel.converters.cast import CastConfig
from accel.converters.quantize import QuantizeConfig
from accel.converters.quantize_sensitivity import Sensitivity, sensitivities
from accel.errors import GateFailed, NothingPassed
from accel.optimizer.assignment import Assignment, Upgrade, assigned, assigned_after, cost, upgrades
from accel.optimizer.budget import OutOfTime
from accel.optimizer.judge import BATCH, MOST_BATCHES, Judge, Judgement, Metric
from accel.optimizer.label_metric import LabelMetric
from accel.optimizer.recipes import Recipe, Step
from accel.progress import report
from accel.stage import config_json, run_stage, versions
from accel.verify.data import Dataset
from accel.verify.gates import OutputGate, gate_runtime
from accel.verify.stream import SampleStream

if TYPE_CHECKING:
    import numpy as np

# Of the layers that the search left float, this many are tried in int8 again one by one.
_SECOND_LOOKS = 8


@dataclass(frozen=True, kw_only=True)
class Try:
    """One assignment that was built and judged. ``kept``: the layers that aren't int8, ``in_fp32`` those of them that
    are in float32 where the base is less. ``judged_on``: ``search`` (the first half of the data), ``held out`` (the
    second) or ``all`` (where the metric can't be computed on a half). ``drop``: as in ``Judgement``."""

    kept: tuple[str, ...]
    drop: float
    within: bool
    judged_on: str
    in_fp32: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Trajectory:
    """How an assignment was found. ``layers``: what each loses alone, the most sensitive first. ``base``: what the
    layers in ``kept`` compute in, but for those ``in_fp32``. ``not_confirmed``: why there was no held-out half."""

    base: str
    layers: Sequence[Sensitivity] = ()
    tries: list[Try] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    in_fp32: tuple[str, ...] = ()
    confirmed: bool = False
    not_confirmed: str = ""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite_json(asdict(self))
        return found

    def precision_of(self, node: str) -> str:
        """What the layer ``node`` computes in."""
        return "fp32" if node in self.in_fp32 else self.base if node in self.kept else "int8"


def assign(
    recipe: Recipe,
    src: Artifact,
    judge: Judge,
    max_drop: float,
    cache: StageCache,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[Recipe, Trajectory]:
    """``recipe``, which quantizes all it can, with as cheap layers left in float as keep ``max_drop``.

    The layers are raised from int8 in the order of ``upgrades``. By bisection the shortest head of that list is found
    that is within the budget; then the costliest of its layers are tried in int8 again, one by one. What remains is
    confirmed on the held-out half of the data; as long as that doesn't, the next steps of the list are taken as well.
    Raises ``NothingPassed`` where not even float for every layer is within the budget, ``OutOfTime`` where
    ``out_of_time()`` was true before an assignment was found.
    """
    search = _Search(recipe, src, max_drop, cache, out_of_time)
    with ExitStack() as stack:
        search_on, held_out, search.trajectory.not_confirmed = _halves(judge, stack)
        chosen = search.run(search_on, held_out)
    return search.with_assignment(chosen), search.trajectory


class _Search:
    def __init__(
        self, recipe: Recipe, src: Artifact, max_drop: float, cache: StageCache, out_of_time: Callable[[], bool]
    ) -> None:
        self._recipe = recipe
        self._src = src
        self._max_drop = max_drop
        self._cache = cache
        self._out_of_time = out_of_time
        self._at = next(i for i, (name, _, _) in enumerate(recipe.stages) if name == "quantize")
        self._data: Path | None = recipe.stages[self._at][1].data  # type: ignore[attr-defined]
        self._made: dict[Assignment, Artifact | None] = {}
        self._known: dict[tuple[str, Assignment], bool] = {}
        # Only a cast can leave single layers in more than the base.
        self._beyond = any(isinstance(options, CastConfig) for _, options, _ in recipe.stages)
        self.trajectory = Trajectory(base=base_precision(recipe))

    def with_assignment(self, chosen: Assignment) -> Recipe:
        name, config, limit = self._recipe.stages[self._at]
        assert isinstance(config, QuantizeConfig)
        steps = list(self._recipe.stages)
        patterns = (*config.keep, *(glob.escape(node) for node, _ in chosen))
        steps[self._at] = (name, replace(config, keep=patterns), limit)
        if len(chosen) == len(self.trajectory.layers):  # nothing is left to quantize, and nobody names the nodes
            del steps[self._at]
            return replace(self._recipe, stages=tuple(steps))
        for index, (_, options, own_limit) in enumerate(steps):
            if isinstance(options, CastConfig):
                in_fp32 = (*options.keep_fp32, *(glob.escape(node) for node in self._in_fp32(chosen)))
                steps[index] = ("cast", replace(options, keep_fp32=in_fp32), own_limit)
        return replace(self._recipe, stages=tuple(steps))

    def run(self, search: tuple[str, Judge], held_out: tuple[str, Judge] | None) -> Assignment:
        found = self.trajectory
        found.layers = self._ranked()
        steps = upgrades(found.layers, found.base, beyond=self._beyond)
        chosen = self._thinned(search, self._shortest(search, steps))
        while held_out is not None and not self._within(held_out, chosen):
            self._check_time()
            have = dict(chosen)
            more = [step for step in steps if have.get(step.node) not in (step.precision, "fp32")]
            if not more:
                raise NothingPassed("not even without int8 is the model within the budget; raise --max-drop")
            chosen = assigned_after(have, more[: max(1, len(chosen) // 4)], found.layers)
        found.kept = tuple(node for node, _ in chosen)
        found.in_fp32 = self._in_fp32(chosen)
        found.confirmed = held_out is not None
        return chosen

    def _in_fp32(self, chosen: Assignment) -> tuple[str, ...]:
        """Where float32 is more than the base. Where nothing is int8 the cast finds that by itself."""
        if len(chosen) == len(self.trajectory.layers):
            return ()
        return tuple(node for node, precision in chosen if precision != self.trajectory.base)

    def _ranked(self) -> list[Sensitivity]:
        """From the cache, where this model was measured with these options before."""
        ready = self._through(self._src, self._recipe.stages[: self._at])
        _, config, _ = self._recipe.stages[self._at]
        assert isinstance(config, QuantizeConfig)
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

    def _shortest(self, judge: tuple[str, Judge], steps: list[Upgrade]) -> Assignment:
        """The shortest head of ``steps`` that is within the budget; all of them where none is."""
        layers = self.trajectory.layers
        if self._within(judge, ()):
            return ()
        low, high = 0, len(steps)
        while high - low > 1:
            self._check_time()
            middle = (low + high) // 2
            within = self._within(judge, assigned(steps[:middle], layers))
            low, high = (low, middle) if within else (middle, high)
        return assigned(steps[:high], layers)

    def _thinned(self, judge: tuple[str, Judge], chosen: Assignment) -> Assignment:
        """Without the layers that turn out not to be needed, the costliest first."""
        layers = {layer.node: layer for layer in self.trajectory.layers}
        by_cost = sorted(chosen, key=lambda one: -cost(layers[one[0]], one[1]))
        for one in by_cost[:_SECOND_LOOKS]:
            fewer = tuple(other for other in chosen if other != one)
            if self._known.get((judge[0], fewer)) is None and self._out_of_time():
                break
            if self._within(judge, fewer):
                chosen = fewer
        return chosen

    def _check_time(self) -> None:
        if self._out_of_time():
            raise OutOfTime("the layers that stay float were not found in time; give --budget-seconds more")

    def _within(self, judge: tuple[str, Judge], chosen: Assignment) -> bool:
        where, by = judge
        if (where, chosen) in self._known:
            return self._known[where, chosen]
        report(f"{self._recipe.name}: {len(chosen)} layers in {self.trajectory.base}")
        judgement = self._judged(by, chosen)
        drop = judgement.drop if judgement is not None else math.inf
        within = judgement is not None and not judgement.problem and drop <= self._max_drop
        kept = tuple(node for node, _ in chosen)
        self.trajectory.tries.append(
            Try(kept=kept, drop=drop, within=within, judged_on=where, in_fp32=self._in_fp32(chosen))
        )
        self._known[where, chosen] = within
        return within

    def _judged(self, judge: Judge, chosen: Assignment) -> Judgement | None:
        """None where it doesn't get through its stages' own gates."""
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


def base_precision(recipe: Recipe) -> str:
    """What the layers that aren't int8 compute in."""
    cast = next((config for name, config, _ in recipe.stages if name == "cast"), None)
    return str(getattr(cast, "precision", None) or recipe.options.get("precision", "fp32"))


def _halves(judge: Judge, stack: ExitStack) -> tuple[tuple[str, Judge], tuple[str, Judge] | None, str]:
    """A judge on the first half of the data, and one on the second; the judge itself alone where its metric needs all
    samples at once, and then why."""
    whole = ("all", judge)
    if judge.data is None:
        return whole, None, "there is no data"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halves-")))
    halves = (folder / "search", folder / "held out")
    for half in halves:
        half.mkdir()
    if judge.metric is None:
        if not _write_batches(SampleStream(judge.data, judge.source.signature), *halves):
            return whole, None, "the data is one sample"
        search, held_out = ((half.name, Judge(judge.source, half, None)) for half in halves)
        return search, held_out, ""
    dataset = Dataset.load(judge.data, judge.source.signature)
    count = len(dataset)
    if count < 2:
        return whole, None, "the data is one sample"
    metrics = _metric_by_half(judge.metric, dataset, count // 2)
    if metrics is None:
        reason = (
            "which of the metric's values belong to which sample isn't known; keep labels in the data, one a sample"
        )
        return whole, None, reason
    judges = []
    for half, metric, start, stop in zip(halves, metrics, (0, count // 2), (count // 2, count), strict=True):
        _write(dataset, half, start, stop)
        judges.append((half.name, Judge(judge.source, half, metric)))
    return judges[0], judges[1], ""


def _write_batches(stream: SampleStream, first: Path, second: Path) -> bool:
    """From the front and from the middle as many batches as a judge reads, an .npz file each. False where there is but
    one sample, or one batch of a model that takes no other."""
    import numpy as np

    size = max(1, min(BATCH, len(stream) // 2))
    count = stream.batch_count(size)
    for folder, start, stop in ((first, 0, count // 2), (second, count // 2, count)):
        batches = itertools.islice(stream.batches(size, skip=start), min(stop - start, MOST_BATCHES))
        for number, feeds in enumerate(batches):
            np.savez(folder / f"{number:06d}.npz", **feeds)  # type: ignore[arg-type]
    return count > 1


def _metric_by_half(metric: Metric, dataset: Dataset, half: int) -> tuple[Metric, Metric] | None:
    """The metric for each half; None where it can't be said which of its arrays belongs to which sample."""
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
