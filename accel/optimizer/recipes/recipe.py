"""A recipe: the chain of stages that makes one candidate, and the session the candidate runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from accel.runtimes.base import get_runtime
from accel.stage import StageConfig
from accel.tables.target import Target


class Step(NamedTuple):
    """One stage of a recipe. ``limit``: the largest relative error that the gate after the stage lets pass."""

    stage: str
    config: StageConfig
    limit: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe of one candidate.

    ``options``: options of the session in which the candidate is judged and measured.
    ``variant``: tells the recipes of one target and precision apart, with its separator: `` static``, ``+bf16``.
    ``search``: ``stages`` quantize every layer, and ``mixed.search`` has to find the layers that stay float.
    ``gate_advice``: by stage, what to do if the gate of the stage fails and no larger budget helps.
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
    """Returns a recipe whose name says target, precision and variant."""
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
    """Returns ``found``, an int8 recipe, as the start of a search for the layers that stay float.

    Returns None if the recipe calibrates nothing.
    """
    if not any(getattr(step.config, "mode", "") == "static" for step in found.stages if step.stage == "quantize"):
        return None
    variant = "" if found.variant == STATIC else found.variant
    name = f"{found.target.name} mixed{variant}"
    return replace(found, name=name, precision="mixed", variant=variant, search=True)


# The variant of an int8 recipe whose ranges are calibrated on samples.
STATIC = " static"


@dataclass(frozen=True, kw_only=True)
class NotTried:
    """A precision that was left out for a target, and why."""

    target: str
    precision: str
    reason: str

    @property
    def name(self) -> str:
        """Returns the name that the candidate would have."""
        return f"{self.target} {self.precision}"


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """The part of an ``OptimizeRequest`` that recipes are made from, with names resolved to targets.

    ``precisions``: only these; None for all that the targets have. ``samples``: how many samples of ``data``
    calibration may read. ``kernels``: only candidates whose products are fused into accel's operators. ``engine``,
    ``quantize``, ``cast``: further fields of ``EngineFromOnnxConfig``, ``QuantizeConfig`` and ``CastConfig``.
    """

    targets: tuple[Target, ...]
    precisions: tuple[str, ...] | None
    data: Path | None
    samples: int
    threads: int
    profiles: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    kernels: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    quantize: Mapping[str, Any] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
