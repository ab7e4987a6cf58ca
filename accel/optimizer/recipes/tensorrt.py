"""Makes recipes for the targets tensorrt and tensorrt-rtx, which are strongly typed engines for NVIDIA GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from accel.artifact import Artifact
from accel.converters.to_tensorrt.preflight import NEEDS_FLOAT64, NEEDS_OWN_SCALES
from accel.errors import UnsupportedHere
from accel.runtimes.base import get_runtime
from accel.runtimes.tensorrt_toolkit import check_capability
from accel.spelling import option
from accel.tables.limits import STAGE_LIMITS
from accel.tables.precision import PRECISIONS
from accel.tables.target import Target

from .recipe import Recipe, RecipeRequest, Step, recipe
from .steps import cast_to, fused, prepared, quantized, weights_only

# The number of 4-bit weights in a block. TensorRT for RTX dequantizes blocks of 4-bit weights inside the kernel of the
# matrix product. Engines with int8 weights and float activations are not tried, because TensorRT for RTX dequantizes
# int8 weights in a separate kernel.
_BLOCK_SIZE = 128


def without_fp8(target: Target, request: RecipeRequest) -> str | None:
    """Returns the reason if ``target`` can't use fp8. The reason is that a requested GPU lacks fp8, or that no GPU is
    named. Returns None if every requested GPU has fp8. Raises ``BadInputSpec`` for a malformed compute capability.
    """
    capabilities = _capabilities(target, request)
    if not capabilities:
        first = ".".join(map(str, PRECISIONS["fp8"].min_capability))
        return f"not every GPU has fp8; name the GPU to build for: {option('compute_capabilities', [first])} or later"
    return _lacking(capabilities, "fp8", "int8")


def without_tf32(target: Target, request: RecipeRequest) -> str | None:
    """Returns the reason if a requested GPU lacks TF32, else None. Raises ``BadInputSpec`` for a malformed compute
    capability."""
    return _lacking(_capabilities(target, request), "tf32", "fp32")


def _capabilities(target: Target, request: RecipeRequest) -> tuple[str, ...]:
    """Returns the compute capabilities of the requested GPUs. The default for ``tensorrt`` is the GPU of this
    machine."""
    if not request.compute_capabilities and target.name == "tensorrt" and get_runtime(target.runtime).runnable():
        from accel.runtimes.cuda_memory import device_capability

        with contextlib.suppress(UnsupportedHere):
            return (device_capability(),)
    return request.compute_capabilities


def _lacking(capabilities: Sequence[str], precision: str, instead: str) -> str | None:
    least = PRECISIONS[precision].min_capability
    for text in capabilities:
        check_capability(text)
    lacking = [text for text in capabilities if tuple(int(part) for part in text.split(".")) < least]
    if not lacking:
        return None
    first = ".".join(map(str, least))
    return f"compute capability {lacking[0]} has no {precision}; use {instead} or build for {first} and later"


def recipes(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Recipe]:
    """Returns the only recipe for ``precision``. The recipe writes the type of every tensor into the graph and builds
    the engine."""
    blocks = precision in ("fp8", "int4")
    head = prepared(src, target, PRECISIONS[precision].min_opset if blocks else 0)
    typed = _typed(src, target, precision, request)
    in_float32 = [] if src.properties.get("precision") == "int8" else _without_float64(src)
    steps = [*head, *in_float32, *typed, *fused(src, precision, request), _engine(target, request, precision)]
    advice = {"fit_tensorrt": NEEDS_FLOAT64 if in_float32 else NEEDS_OWN_SCALES}
    computed = {"precision": precision} if precision == "tf32" else {}
    return [recipe(target, precision, steps, {"threads": request.threads, **computed}, gate_advice=advice)]


def _typed(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Step]:
    """Returns the steps that set the types of the graph's tensors for ``precision``. Models with 8-bit or 4-bit layers
    compute all other layers in fp16."""
    from accel.converters.to_tensorrt.fit import FitTensorRtConfig

    steps = weights_only(src, target, precision, request, _BLOCK_SIZE) if precision == "int4" else []
    steps = steps or quantized(src, target, precision, request)
    if src.properties.get("precision") == "int8":  # adapts the scales of a source that another toolkit quantized
        steps = [Step("fit_tensorrt", FitTensorRtConfig(), STAGE_LIMITS["fp16-in-int8"])]
    base = None if precision in ("fp32", "tf32") else "bf16" if precision == "bf16" else "fp16"
    return cast_to(src, base, request, steps)


def _without_float64(src: Artifact) -> Sequence[Step]:
    """Returns the step that rewrites float64 as float32, or no step for a graph without float64. An engine computes
    float64 operations in float32, so the graph that is judged has to compute in float32, too.
    """
    from accel.converters.to_tensorrt.fit import FitTensorRtConfig
    from accel.converters.to_tensorrt.preflight import computes_in_float64
    from accel.sources.onnx.file import read_proto
    from accel.sources.onnx.functions import inlined

    if not computes_in_float64(inlined(read_proto(src.path)).graph):
        return []
    return [Step("fit_tensorrt", FitTensorRtConfig(), STAGE_LIMITS["fp32"])]


def _engine(target: Target, request: RecipeRequest, precision: str) -> Step:
    from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig

    config = EngineFromOnnxConfig(
        toolkit=target.name,
        profiles=request.profiles,
        compute_capabilities=request.compute_capabilities,
        kernels=request.kernels and target.name == "tensorrt",
        tf32=precision == "tf32",
        **request.engine,
    )
    # Int8 and fp8 layers lie between layers in fp16.
    return Step("engine_from_onnx", config, STAGE_LIMITS[precision if precision in ("fp32", "tf32") else "fp16"])
