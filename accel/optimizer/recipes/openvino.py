"""Makes recipes for the target openvino, which is an OpenVINO IR on x86 CPUs."""

from __future__ import annotations

from accel.artifact import Artifact
from accel.signature.decoder import Cache
from accel.spelling import option
from accel.tables.limits import STAGE_LIMITS
from accel.tables.target import Target

from .recipe import Recipe, RecipeRequest, Step, recipe, with_cache
from .steps import cpu_has_bf16, prepared, quantized, weights_only


def obstacle(precision: str, request: RecipeRequest) -> str | None:
    """Returns the reason if OpenVINO can't use ``precision`` on this machine, else None."""
    if precision == "bf16" and not cpu_has_bf16():
        return "this CPU has no bf16 instructions"
    if request.kernels:
        return f"OpenVINO doesn't take accel's fused operators; leave out {option('kernels', True)}"
    return None


def recipes(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Recipe]:
    """Returns the recipe for ``precision``. On a CPU with bf16, adds an int8 recipe whose float layers run in bf16. For
    a decoder, OpenVINO keeps the KV cache, and each recipe is repeated with an 8-bit cache."""
    reduced = quantized(src, target, precision, request) or weights_only(src, target, precision, request)
    steps = [*prepared(src, target), *reduced, _to_openvino(src, precision)]
    options = {"threads": request.threads}
    in_bf16 = {**options, "precision": "bf16"}
    found = [recipe(target, precision, steps, in_bf16 if precision == "bf16" else options)]
    if precision == "int8" and cpu_has_bf16():
        found.append(recipe(target, precision, steps, in_bf16, "+bf16"))
    if Cache.of(src.signature) is not None:
        found += [with_cache(one, "int8") for one in found]
    return found


def _to_openvino(src: Artifact, precision: str) -> Step:
    from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
    from accel.converters.to_openvino.stateful_from_onnx import StatefulFromOnnxConfig

    # OpenVINO's int8 kernels round differently from ONNX Runtime's. If the source is in bf16, OpenVINO rounds at other
    # nodes than onnx-rounded.
    own = "bf16" if src.properties.get("precision") == "bf16" else "fp32"
    limit = STAGE_LIMITS[precision if precision in ("int8", "int4") else own]
    if Cache.of(src.signature) is not None:
        return Step("stateful_from_onnx", StatefulFromOnnxConfig(), limit)
    return Step("openvino_from_onnx", OpenVinoFromOnnxConfig(), limit)
