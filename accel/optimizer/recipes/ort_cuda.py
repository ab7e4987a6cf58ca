"""Makes recipes for the target ort-cuda, which is ONNX Runtime on NVIDIA GPUs."""

from __future__ import annotations

from accel.artifact import Artifact
from accel.tables.target import Target

from .recipe import Recipe, RecipeRequest, recipe
from .steps import cast_to, fused, is_16_bit, prepared


def recipes(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Recipe]:
    """Returns the only recipe for ``precision``. The recipe casts the graph, and fuses matrix products if the user
    requests kernels."""
    cast = cast_to(src, precision, request) if is_16_bit(precision) else []
    steps = [*prepared(src, target), *cast, *fused(src, precision, request)]
    computed = {"precision": precision} if precision == "tf32" else {}
    return [recipe(target, precision, steps, {"threads": request.threads, **computed})]
