"""Orders the recipes, so that the first ones probably give the largest speedup for the time that they take.

The expected speedups and times come from earlier runs on this machine, or else from the tables in this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from accel.artifact import Artifact, canonical_json, text_sha256
from accel.cache import StageCache
from accel.graph.cost import graph_cost
from accel.machine import int8_saturates
from accel.stage import versions
from accel.tables.precision import PRECISIONS
from accel.timing.environment import environment

from ..candidate import CandidateResult, megabytes
from .recipe import COARSE, PACKED, STATIC, Recipe
from .steps import cpu_has_bf16

# The kinds of models whose speedups differ. The products with weights take most of the work in a transformer. A network
# that mixes attention with convolutions counts as another model if its convolutions take more.
TRANSFORMER, OTHER = "transformer", "other"
# The median speedups in benchmarks/results/cpu_latency.md, by the target, precision and variant of a recipe, for
# transformers and for other models.
_SPEEDUPS: Mapping[str, tuple[float, float]] = {
    "ort-cpu int8 dynamic": (2.3, 1.0),
    f"ort-cpu int8{STATIC}": (1.9, 2.7),
    "ort-cpu int8 weights": (1.3, 1.0),
    "ort-cpu int4": (1.3, 1.0),
    f"ort-cpu int4{COARSE}": (8.0, 8.0),  # only decoders have it, whose tokens read every weight
    f"ort-cpu int4{PACKED}": (9.0, 9.0),  # only decoders have these two, too
    f"ort-cpu int8 weights{PACKED}": (6.0, 6.0),
    "openvino fp32": (1.15, 1.05),  # 1.0 for most other models, but much more for a few
    "openvino bf16": (2.1, 1.9),
    "openvino int8": (3.4, 3.0),
    "openvino int8+bf16": (3.4, 3.0),
    "openvino int4": (1.3, 1.0),
}
# The seconds that the stages of a recipe take for a small model, and the seconds for each 100 MB of weights.
_SECONDS: Mapping[str, tuple[float, float]] = {
    "dynamic": (1.0, 1.0),
    "static": (4.0, 10.0),
    "weights": (1.0, 4.0),
    "other": (1.0, 1.5),
}
_RUNS = 10  # An average counts at most this many earlier runs, so that it follows changes.


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected speedup of a candidate over the source, and the expected seconds that its stages take."""

    speedup: float
    seconds: float

    def cost(self, best: float) -> float:
        """Returns the seconds for each factor e of speedup over ``best``, the speedup of an earlier candidate. A
        candidate that is probably not faster than ``best`` is expensive."""
        return self.seconds / max(math.log(self.speedup / best), 0.001)


class Costs:
    """What is known about the speedups and times of recipes for the model ``src``. ``cache`` holds the averages of
    earlier runs."""

    def __init__(self, src: Artifact, cache: StageCache) -> None:
        machine = {name: environment(0, date=False)[name] for name in ("cpu", "cores")}
        used = versions(("onnxruntime", "openvino", "nncf"))
        self._key = text_sha256(canonical_json({"machine": machine, "versions": used}))
        self._cache = cache
        self._known = cache.get_record("costs", self._key) or {}
        self._kind, self._megabytes = kind_of(src), max(1.0, megabytes(src))

    def in_order(self, made: Sequence[Recipe]) -> list[Recipe]:
        """Returns the recipes ``made``. Each next recipe is the cheapest for its speedup over the earlier recipes.
        Recipes that this machine can't run are ordered by their precision alone."""
        apart = [one for one in made if not one.runnable]
        left = [(self.expected(one), one) for one in made if one.runnable]
        found, best = [], 1.0
        while left:
            following = min(left, key=lambda pair: (pair[0].cost(best), -pair[0].speedup))
            left.remove(following)
            found.append(following[1])
            best = max(best, following[0].speedup)
            # A recipe with the same stages finds them in the cache.
            left = [(replace(e, seconds=1.0) if one.stages == following[1].stages else e, one) for e, one in left]
        return found + sorted(apart, key=lambda one: PRECISIONS[one.precision].rank_unmeasured)

    def expectations(self, made: Sequence[Recipe]) -> dict[str, Expected]:
        """Returns what is expected of each recipe in its order, by the recipe's name. A recipe with the stages of an
        earlier recipe takes no time."""
        found: dict[str, Expected] = {}
        stages = []
        for one in made:
            if one.runnable:
                usual = self.expected(one)
                found[one.name] = replace(usual, seconds=0.0) if one.stages in stages else usual
                stages.append(one.stages)
        return found

    def remember(self, rows: Iterable[CandidateResult]) -> None:
        """Adds the measured speedups of ``rows`` and the times of their stages to the averages."""
        for row in rows:
            speedup = (row.measured or {}).get("speedup")
            if row.recipe is None or row.base or row.artifact is None or speedup is None:
                continue
            stages = {step.stage for step in row.recipe.stages}
            seconds = sum(record["seconds"] for record in row.artifact.history if record["name"] in stages)
            slowness = seconds / _usual_seconds(row.recipe, self._megabytes)
            found = self._known.setdefault(self._name(row.recipe), {"runs": 0, "speedup": 0.0, "slowness": 0.0})
            found["runs"] = min(found["runs"] + 1, _RUNS)
            for name, value in (("speedup", speedup), ("slowness", slowness)):
                found[name] += (value - found[name]) / found["runs"]
        self._cache.put_record("costs", self._key, self._known)

    def expected(self, recipe: Recipe) -> Expected:
        """Returns what is expected of ``recipe``."""
        seconds = _usual_seconds(recipe, self._megabytes)
        found = self._known.get(self._name(recipe))
        if found:
            return Expected(speedup=found["speedup"], seconds=found["slowness"] * seconds)
        usual = 1.1 + 0.1 * (len(PRECISIONS) - PRECISIONS[recipe.precision].rank)
        fast = _SPEEDUPS.get(recipe.name, (usual, usual))[0 if self._kind == TRANSFORMER else 1]
        if recipe.precision == "bf16" and not cpu_has_bf16():
            fast = 1.0
        if recipe.precision == "int8" and int8_saturates():  # such a CPU has no instructions for int8 products
            fast = math.sqrt(fast)
        return Expected(speedup=fast, seconds=seconds)

    def _name(self, recipe: Recipe) -> str:
        """Returns the name under which the averages of a recipe are kept. Models of very different sizes have averages
        of their own, because their speedups differ."""
        return f"{recipe.name}, {self._kind}, {10 ** int(math.log10(self._megabytes))} MB"


def _usual_seconds(recipe: Recipe, megabytes: float) -> float:
    modes = {getattr(step.config, "mode", "other") for step in recipe.stages}
    least, more = max((_SECONDS.get(mode, _SECONDS["weights"]) for mode in modes), default=_SECONDS["other"])
    return least + more * megabytes / 100


def kind_of(src: Artifact) -> str:
    """Returns the kind of the model ``src``."""
    from accel.converters.quantize.stage import is_transformer
    from accel.sources.onnx.file import read_without_weights

    model = read_without_weights(src.path)
    if not is_transformer(model):
        return OTHER
    nodes = [node for node in graph_cost(model, src.signature).nodes if node.product]
    if any(node.flops is None for node in nodes):  # the operators alone decide
        return TRANSFORMER
    weighted = [node for node in nodes if "Conv" not in node.operator and (node.parameters or node.quantized)]
    return TRANSFORMER if 2 * sum(n.flops or 0 for n in weighted) >= sum(n.flops or 0 for n in nodes) else OTHER
