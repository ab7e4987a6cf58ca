"""Makes recipes for the target ort-cpu, which is ONNX Runtime on any CPU."""

from __future__ import annotations

from dataclasses import replace

from accel.artifact import Artifact
from accel.converters.quantize.stage import QuantizeConfig
from accel.signature.decoder import Cache
from accel.tables.limits import STAGE_LIMITS
from accel.tables.target import Target

from .recipe import (
    COARSE,
    COARSE_BLOCK,
    DYNAMIC,
    PACKED,
    STATIC,
    Recipe,
    RecipeRequest,
    Step,
    lower_cache,
    recipe,
    with_cache,
)
from .steps import (
    fuse_decoder,
    fused,
    has_large_products,
    packed_weights,
    prepared,
    quantized,
    reads_much_cache,
    weights_only,
    with_options,
)


def recipes(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Recipe]:
    """Returns the recipes for ``precision``. The precision int8 has up to three recipes, because each of these recipes
    is the fastest for some models. A decoder in int4 begins with large blocks (see ``recipe.gentler``). Each recipe of
    a decoder that reads much of its cache is repeated with an 8-bit cache."""
    head = [*prepared(src, target), *fuse_decoder(src)]
    found = [
        recipe(target, precision, [*head, *steps], {"threads": request.threads}, variant)
        for variant, steps in _variants(src, target, precision, request)
    ]
    made = [one for one in found if one.stages]  # a recipe without stages is the source itself
    if reads_much_cache(src, precision, request):
        lowered = [replace(one, stages=(*one.stages, lower_cache("int8"))) for one in found]
        made += [with_cache(one, "int8") for one in lowered]
    return made


def _variants(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[tuple[str, list[Step]]]:
    if precision == "int4":
        coarse = Cache.of(src.signature) is not None and "block_size" not in request.quantize
        variant, size = (COARSE, COARSE_BLOCK) if coarse else ("", None)
        return [
            (variant, weights_only(src, target, precision, request, size)),
            *_packed(src, target, precision, request),
        ]
    if precision != "int8" or src.properties.get("precision") == "int8":
        return [("", fused(src, precision, request))]
    found: list[tuple[str, list[Step]]] = []
    if request.data is not None:
        found.append((STATIC, quantized(src, target, precision, request)))
    dynamic = with_options(QuantizeConfig(form=target.qdq, mode="dynamic"), request)
    found.append((DYNAMIC, [Step("quantize", dynamic, STAGE_LIMITS["int8"])]))
    if has_large_products(src):
        found.append((" weights", weights_only(src, target, precision, request)))
    return [*found, *_packed(src, target, precision, request)]


def _packed(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[tuple[str, list[Step]]]:
    """Returns the variant whose weights are read by accel's CPU kernels, or none if ``src`` is no decoder or the
    kernels aren't built."""
    steps = packed_weights(src)
    own = f" weights{PACKED}" if precision == "int8" else PACKED
    return [(own, [*weights_only(src, target, precision, request), *steps])] if steps else []
