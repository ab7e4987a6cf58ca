"""Makes the steps that recipes of several targets share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel.artifact import Artifact
from accel.converters.quantize.stage import QuantizeConfig
from accel.runtimes.kv.cache import grows_in_place
from accel.signature.decoder import Cache
from accel.tables.limits import STAGE_LIMITS
from accel.tables.precision import PRECISIONS
from accel.tables.target import Target
from accel.timing.environment import environment

from ..stage_options import options_of_mode
from .recipe import RecipeRequest, Step

# A model with at least this many weights in its matrix products reads the weights from memory in every run, because the
# caches are too small.
_LARGE_WEIGHTS = 25_000_000
# A smaller cache is tried if a step reads at least this many bytes of it for each byte of weights.
_MUCH_CACHE = 0.05


def precision_of(src: Artifact) -> str:
    """Returns the precision of ``src``."""
    return str(src.properties.get("precision", "fp32"))


def fuse_decoder(src: Artifact) -> list[Step]:
    """Returns the step that fuses the attention of a decoder, whose cache then grows in place. Returns no step if
    ``src`` has no KV cache, or if its file has fused attention already."""
    from accel.converters.decoder.stage import FuseDecoderConfig

    layout = Cache.of(src.signature)
    if layout is None or precision_of(src) != "fp32" or grows_in_place(src.path, layout):
        return []
    return [Step("fuse_decoder", FuseDecoderConfig(), STAGE_LIMITS["simplify"])]


def packed_weights(src: Artifact) -> list[Step]:
    """Returns the step that packs the weights of a decoder for accel's CPU kernels. Returns no step if ``src`` has no
    KV cache, or if ``accel kernels build`` hasn't made the operators for ONNX Runtime."""
    if Cache.of(src.signature) is None or precision_of(src) != "fp32":
        return []
    # The imports take seconds, which a model without a cache shouldn't wait for.
    from accel.converters.decoder.packed import PackWeightsConfig
    from accel.kernels.native.bridges import find_onnxruntime_library

    if find_onnxruntime_library() is None:
        return []
    return [Step("pack_weights", PackWeightsConfig(), STAGE_LIMITS["int4"])]


def has_large_products(src: Artifact) -> bool:
    """Tells whether the matrix products of ``src`` have enough weights to be faster with 4-bit or 8-bit weights. A
    decoder reads all weights for each token, so it may be faster at any size."""
    return Cache.of(src.signature) is not None or _product_weights(src) >= _LARGE_WEIGHTS


def _product_weights(src: Artifact) -> int:
    """Returns the number of weights in the matrix products of ``src``."""
    from accel.converters.quantize.products import product_weights
    from accel.sources.onnx.file import read_without_weights

    return sum(size for _, size in product_weights(read_without_weights(src.path)))


def reads_much_cache(src: Artifact, precision: str, request: RecipeRequest) -> bool:
    """Tells whether a step of the decoder ``src`` in ``precision`` reads enough of its float32 cache, compared with its
    weights, that a smaller cache could be faster."""
    layout = Cache.of(src.signature)
    if layout is None or any(spec.dtype != "float32" for spec in layout.past):
        return False
    weights = _product_weights(src) * (PRECISIONS[precision].weight_bytes or 1.0)
    return layout.bytes_a_token() * request.context >= _MUCH_CACHE * weights


def cpu_has_bf16() -> bool:
    """Tells whether the CPU of this machine has bf16 instructions."""
    return bool({"avx512_bf16", "amx_bf16"} & set(environment(0, date=False)["cpu_features"]))


def in_range(src: Artifact, target: Target, min_opset: int = 0) -> list[Step]:
    """Returns the step that changes the opset and IR version to values that ``target`` supports, and inlines functions
    that it doesn't read. Returns no step if ``target`` supports the values of ``src``. ``min_opset`` is the first opset
    that supports the candidate's precision, or 0 if every opset supports the precision.
    """
    from accel.converters.graph.onnx_from_onnx import OnnxFromOnnxConfig
    from accel.sources.onnx.file import OWN_FUNCTIONS

    opset = int(src.properties.get("opset") or target.min_opset)
    wanted = min(max(opset, min_opset, target.min_opset), target.max_opset)
    foreign = target.runtime == "openvino" and src.properties.get(OWN_FUNCTIONS)
    if wanted == opset and int(src.properties.get("ir") or 0) <= target.max_ir and not foreign:
        return []
    return [Step("onnx_from_onnx", OnnxFromOnnxConfig(opset=wanted, max_ir=target.max_ir), STAGE_LIMITS["simplify"])]


def simplify(src: Artifact) -> list[Step]:
    """Returns the step that simplifies the graph, or no step if ``src`` is simplified already."""
    from accel.converters.graph.simplify import SimplifyConfig

    if any(record["name"] == "simplify" for record in src.history):
        return []
    return [Step("simplify", SimplifyConfig(), STAGE_LIMITS["simplify"])]


def prepared(src: Artifact, target: Target, min_opset: int = 0) -> list[Step]:
    """Returns the first steps of every recipe, which set the opset and simplify the graph."""
    return [*in_range(src, target, min_opset), *simplify(src)]


def with_options(config: QuantizeConfig, request: RecipeRequest) -> QuantizeConfig:
    """Returns ``config`` with the user's options for its mode."""
    return replace(config, **options_of_mode(config, request.quantize))


def weights_only(
    src: Artifact, target: Target, precision: str, request: RecipeRequest, block_size: int | None = None
) -> list[Step]:
    """Returns the step that quantizes only the weights of large matrix products, to 8 or 4 bits. Returns no step if the
    weights of ``src`` are int8 or int4 already.
    """
    if precision not in ("int8", "int4") or src.properties.get("precision") in ("int8", "int4"):
        return []
    config = QuantizeConfig(form=target.qdq, mode=f"{precision}-weights")
    if block_size is not None:
        config = replace(config, block_size=block_size)
    return [Step("quantize", with_options(config, request), STAGE_LIMITS[precision])]


def quantized(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Step]:
    """Returns the step that quantizes weights and activations, or no step if ``src`` is quantized already."""
    if precision not in ("int8", "fp8") or src.properties.get("precision") == precision:
        return []
    mode = "fp8" if precision == "fp8" else "static"
    config = QuantizeConfig(form=target.qdq, mode=mode, data=request.data, samples=request.samples)
    return [Step("quantize", with_options(config, request), STAGE_LIMITS[precision])]


def cast_to(src: Artifact, base: str | None, request: RecipeRequest, after: Sequence[Step] = ()) -> list[Step]:
    """Returns the steps in ``after`` and a final cast to ``base``. Adds no cast if ``base`` is None or the source isn't
    fp32. A cast in a graph with QDQ nodes gets a larger limit, because a rounded value may fall into the next int8
    step.
    """
    from accel.converters.cast.stage import CastConfig

    if base is None or precision_of(src) != "fp32":
        return list(after)
    config = CastConfig(precision=base, data=request.data, **request.cast)
    return [*after, Step("cast", config, STAGE_LIMITS["fp16-in-int8" if after else base])]


def fused(src: Artifact, precision: str, request: RecipeRequest) -> list[Step]:
    """Returns the step that fuses matrix products into accel's operators, if the user requests kernels. Fusion keeps
    the operations and only changes where activations are rounded.
    """
    from accel.converters.graph.fuse_kernels import FuseKernelsConfig

    in_16_bits = is_16_bit(precision) or is_16_bit(precision_of(src))
    limit = STAGE_LIMITS[precision if in_16_bits and precision in STAGE_LIMITS else "simplify"]
    return [Step("fuse_kernels", FuseKernelsConfig(), limit)] if request.kernels else []


def is_16_bit(precision: str) -> bool:
    """Tells whether ``precision`` is fp16 or bf16."""
    return precision in PRECISIONS and PRECISIONS[precision].weight_bytes == 2
