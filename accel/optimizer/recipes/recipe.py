"""Defines the recipe of a candidate, with its stages and session options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from accel.converters.decoder.lower_cache import INT8, LowerCacheConfig
from accel.converters.quantize.stage import AWQ, FORMS, GPTQ, OUTLIERS, QuantizeConfig
from accel.runtimes.base import get_runtime
from accel.stage import StageConfig
from accel.tables.limits import STAGE_LIMITS
from accel.tables.target import Target


class Step(NamedTuple):
    """One stage of a recipe. ``limit`` is the largest relative error that the stage's gate allows."""

    stage: str
    config: StageConfig
    limit: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe of one candidate.

    ``options`` holds options of the session in which the candidate is judged and measured. ``variant`` is a suffix of
    the name, such as `` static`` or ``+bf16``, that distinguishes recipes with the same target and precision. If
    ``search`` is True, ``stages`` quantize all layers, and ``mixed.search`` has to find the layers that stay float.
    ``gate_advice`` maps a stage to the advice that the user gets if the stage's gate fails. Raising ``max_drop`` does
    not help after a failed gate.
    """

    name: str
    target: Target
    precision: str
    stages: tuple[Step, ...]
    options: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    search: bool = False
    gate_advice: Mapping[str, str] = field(default_factory=dict)

    @property
    def runnable(self) -> bool:
        """Tells whether this machine can run the candidate."""
        return get_runtime(self.target.runtime).runnable()


def recipe(
    target: Target,
    precision: str,
    steps: list[Step],
    options: Mapping[str, Any],
    variant: str = "",
    gate_advice: Mapping[str, str] | None = None,
) -> Recipe:
    """Returns a recipe whose name consists of target, precision and variant."""
    return Recipe(
        name=f"{target.name} {precision}{variant}",
        target=target,
        precision=precision,
        stages=tuple(steps),
        options=dict(options),
        variant=variant,
        gate_advice=gate_advice or {},
    )


def as_search(found: Recipe) -> Recipe | None:
    """Returns the int8 recipe ``found`` as the start of a mixed-precision search. Returns None if ``found`` has no
    static quantization.
    """
    if not any(getattr(step.config, "mode", "") == "static" for step in found.stages if step.stage == "quantize"):
        return None
    variant = "" if found.variant == STATIC else found.variant
    name = f"{found.target.name} mixed{variant}"
    return replace(found, name=name, precision="mixed", variant=variant, search=True)


def with_cache(found: Recipe, precision: str) -> Recipe:
    """Returns ``found`` with a KV cache in ``precision``, which a stage may have made."""
    before = _CACHE.format(found.options.get("cache_precision"))
    variant = found.variant.removesuffix(before) + _CACHE.format(precision)
    name = found.name.removesuffix(found.variant) + variant
    stages = tuple(lower_cache(precision) if step.stage == _LOWER_CACHE else step for step in found.stages)
    options = {**found.options, "cache_precision": precision}
    return replace(found, name=name, variant=variant, stages=stages, options=options)


def with_usual_cache(found: Recipe) -> str:
    """Returns the name of ``found`` without its KV cache in another precision. Returns "" if its cache is the usual
    one."""
    precision = found.options.get("cache_precision")
    return found.name.removesuffix(_CACHE.format(precision)) if precision else ""


def lower_cache(precision: str) -> Step:
    """Returns the step that makes a KV cache in ``precision`` part of the file."""
    return Step(_LOWER_CACHE, LowerCacheConfig(precision=precision), STAGE_LIMITS[precision])


def with_texts(found: Recipe, texts: Callable[[], Path | None]) -> Recipe:
    """Returns ``found`` with the file of texts that ``texts`` returns, if the stage of an int8 cache needs it."""
    if all(step != lower_cache(INT8) for step in found.stages):
        return found
    data = texts()
    stages = tuple(
        step._replace(config=replace(step.config, data=data)) if isinstance(step.config, LowerCacheConfig) else step
        for step in found.stages
    )
    return replace(found, stages=stages)


# The end of a variant whose KV cache has another precision, and the stage that makes the cache part of an ONNX file.
_CACHE = " with {} cache"
_LOWER_CACHE = "lower_cache"


# The variant of an int8 recipe with calibrated activation ranges.
STATIC = " static"


# The variants of an int8 recipe that scales activations in each run, and of one with outlier columns in float32.
DYNAMIC, OUTLYING = " dynamic", " dynamic with outlier columns"


# The end of a variant whose weights are packed for accel's CPU kernels.
PACKED = " packed"


# The variant of an int4 recipe with few scales, and the number of weights that share a scale.
COARSE, COARSE_BLOCK = " in blocks of 128", 128


# The variants of int4 recipes that are calibrated on texts, in the order in which they are tried.
_CALIBRATED = {" GPTQ": GPTQ, " AWQ": AWQ}


def gentler(found: Recipe, texts: Callable[[], Path | None], samples: Path | None = None) -> Recipe | None:
    """Returns the next recipe to try after ``found`` has lost too much, or None if there is none. After an 8-bit KV
    cache, that is one in fp16, if it isn't wider than what the model computes in. An int4 recipe gets the usual,
    smaller blocks, which read more scales, and then is calibrated on the file that ``texts`` returns. An int8 recipe
    that scales activations at run time keeps the outlier columns of these texts, or of the ``samples``, in float32."""
    if cache := found.options.get("cache_precision"):
        in_float32 = found.options.get("precision", "fp32") == "fp32"
        return with_cache(found, "fp16") if cache == "int8" and in_float32 else None
    if found.variant == DYNAMIC and (data := texts() or samples) is not None:
        return _changed(found, OUTLYING, mode=OUTLIERS, data=data)
    if found.precision != "int4":
        return None
    if found.variant == COARSE:
        return _changed(found, "", block_size=QuantizeConfig().block_size)
    tried = list(_CALIBRATED).index(found.variant) + 1 if found.variant in _CALIBRATED else 0
    form = next((step.config.form for step in found.stages if isinstance(step.config, QuantizeConfig)), None)
    for variant, mode in list(_CALIBRATED.items())[tried:]:
        installed = mode != AWQ or find_spec("nncf") is not None
        if form in FORMS and mode in FORMS[form].runs and installed and (data := texts()) is not None:
            return _changed(found, variant, mode=mode, data=data)
    return None


def _changed(found: Recipe, variant: str, **fields: Any) -> Recipe:
    """Returns ``found`` as ``variant``, with other fields of its quantization."""
    stages = tuple(
        step._replace(config=replace(step.config, **fields)) if isinstance(step.config, QuantizeConfig) else step
        for step in found.stages
    )
    return replace(found, name=found.name.removesuffix(found.variant) + variant, variant=variant, stages=stages)


@dataclass(frozen=True, kw_only=True)
class NotTried:
    """A precision that was left out for a target, with the reason. ``variant`` means the same as in ``Recipe``."""

    target: str
    precision: str
    reason: str
    variant: str = ""

    @property
    def name(self) -> str:
        """Returns the name of the candidate that was not tried."""
        return f"{self.target} {self.precision}{self.variant}"


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """The fields of an ``OptimizeRequest`` that recipes need, with names resolved to targets. ``precisions`` lists the
    precisions to try, or is None to try each target's usual precisions. ``samples`` is the number of calibration
    samples in ``data``. If ``kernels`` is True, the matrix products of every candidate are fused into accel's
    operators. ``context`` is the largest number of tokens in a decoder's cache that matters. ``engine``, ``quantize``
    and ``cast`` set further fields of ``EngineFromOnnxConfig``, ``QuantizeConfig`` and ``CastConfig``.
    """

    targets: tuple[Target, ...]
    precisions: tuple[str, ...] | None
    data: Path | None
    samples: int
    threads: int
    profiles: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    kernels: bool = False
    context: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    quantize: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
