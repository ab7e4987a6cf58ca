"""What is tried for a target: a list of candidates, each a chain of stages and the session it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.bench.environment import environment
from accel.converters.preflight import FIRST_WITH
from accel.converters.quantize import BLOCK_OPSET, FORMS, FP8_CALIBRATIONS, FP8_OPSET, QuantizeConfig
from accel.errors import MissingExtra, UnknownName, UnsupportedHere, UsageError
from accel.optimizer.stage_options import options_of_mode
from accel.runtimes.base import get_runtime
from accel.runtimes.tensorrt_toolkit import check_capability
from accel.stage import StageConfig
from accel.target import PRECISIONS, TARGETS, Target

# What each stage may change (rel_l2), before the user's own budget is asked. int8 is wide: the judge decides there, the
# gate is to find a lost mask or a baked-in batch (unrelated outputs are about 1.4 apart).
STAGE_LIMITS = {
    "simplify": 1e-4,
    "fp32": 1e-3,
    "fp16": 2e-2,
    "bf16": 1e-1,
    "fp16-in-int8": 1e-1,
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 1.0,
}

# Products with this many weights are read from memory at every run: below it the caches hold them.
_LARGE_WEIGHTS = 25_000_000

# What a GPU is known to run fastest, most likely first: the order of the candidates where nothing can be measured.
UNMEASURED_ORDER = ("fp16", "int8", "fp8", "mixed", "int4", "bf16", "fp32")

# Weights in a block of 4 bits for an engine: TensorRT for RTX multiplies them out inside the product's kernel (those of
# 8 bits in a kernel of their own, which gains nothing: they are no candidate).
_ENGINE_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``stages``: (stage, config, limit of its gate). ``options``: of the session it is measured and judged in."""

    name: str
    target: Target
    precision: str
    stages: tuple[tuple[str, StageConfig, float], ...]
    options: dict[str, Any] = field(default_factory=dict)
    search: bool = False  # which layers it quantizes is still to be found: see mixed_precision

    @property
    def runnable(self) -> bool:
        return get_runtime(self.target.runtime).runnable()


@dataclass(frozen=True, kw_only=True)
class NotTried:
    """A candidate that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the candidates are made for. ``samples``: how many of the data's samples calibration may read. ``kernels``:
    only candidates whose products are fused into accel's operators. ``engine``, ``quantize``, ``cast``: further fields
    of ``EngineFromOnnxConfig``, ``QuantizeConfig`` and ``CastConfig``."""

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


def likelihood(recipe: Recipe) -> tuple[int, int]:
    """A key that sorts candidates by how likely they are the fastest, the likeliest first."""
    if not recipe.runnable:
        return UNMEASURED_ORDER.index(recipe.precision), 0
    return ("int8", "fp8", "mixed", "int4", "bf16", "fp16", "fp32").index(recipe.precision), int(
        recipe.target.name == "ort-cpu"
    )


def targets_for(name: str) -> tuple[Target, ...]:
    """The named target, or for ``auto`` all that this machine can run: measurement decides between them.

    Raises ``MissingExtra`` where the toolkit of a named target isn't installed.
    """
    if name != "auto":
        target = Target.get(name)
        if not get_runtime(target.runtime).installed:
            raise MissingExtra(get_runtime(target.runtime).module, target.extra or "all-cpu")
        return (target,)
    return tuple(t for t in TARGETS.values() if get_runtime(t.runtime).runnable())


def precisions_for(names: Sequence[str] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in PRECISIONS:
            raise UnknownName(f"unknown precision {name!r}; use one of {', '.join(PRECISIONS)}")
    return tuple(names) if names else None


def recipes(src: Artifact, request: Request) -> tuple[list[Recipe], list[NotTried]]:
    """The candidates for ``src`` (an ONNX artifact), and those that can't be made, with the reason.

    Raises ``UnsupportedHere`` where a precision that was asked for, or the only one that ``src`` can have, is none the
    targets have, or where kernels were asked for and no candidate can have them.
    """
    made: list[Recipe] = []
    left_out: list[NotTried] = []
    for target in request.targets:
        is_fp8 = src.properties.get("precision") == "fp8"  # nothing else can be made of it
        own = [p for p in target.precisions if p != "fp8" or is_fp8 or not _without_fp8(target, request)]
        wanted = request.precisions or (*own, *_weight_only(src, target))
        for precision in wanted:
            name = f"{target.name} {precision}"
            if not _has(target, precision):
                if len(request.targets) == 1:
                    raise UnsupportedHere(
                        f"target {target.name} has no {precision}; it has {', '.join(target.precisions)}"
                    )
                left_out.append(NotTried(name=name, reason=f"{target.name} has no {precision}"))
                continue
            reason = _impossible(src, target, precision, request)
            only_fp8 = is_fp8 or request.precisions == ("fp8",)
            if reason and precision == "fp8" and only_fp8 and len(request.targets) == 1:
                raise UnsupportedHere(reason)
            if reason:
                left_out.append(NotTried(name=name, reason=reason))
                continue
            made += _variants(src, target, precision, request)
    if request.kernels and not made:
        raise UnsupportedHere("; ".join(f"{item.name}: {item.reason}" for item in left_out))
    for stage, options in (("quantize", request.quantize), ("cast", request.cast)):
        if options and made and not any(name == stage for recipe in made for name, _, _ in recipe.stages):
            raise UsageError(
                f"--{stage} is given and no candidate has such a stage; leave it out or name a --precision"
            )
    return made, left_out


def searched(src: Artifact, recipe: Recipe, request: Request) -> Recipe | None:
    """The start of a search for the layers that keep ``recipe``, an int8 candidate, from being right; None where its
    layers can't be searched, or that search was asked for anyway."""
    if (
        recipe.precision != "int8"
        or request.precisions is not None
        or _impossible(src, recipe.target, "mixed", request)
    ):
        return None
    return _as_search(recipe)


def _has(target: Target, precision: str) -> bool:
    if precision == "int4":
        return target.kind == "engine" or not target.needs_gpu
    return precision in target.precisions or (precision == "mixed" and "int8" in target.precisions)


def _weight_only(src: Artifact, target: Target) -> tuple[str, ...]:
    """int4, where most of what the model reads are the weights of products, and no cache holds them."""
    return ("int4",) if _has(target, "int4") and _large_products(src) else ()


def _large_products(src: Artifact) -> bool:
    from accel.converters.quantize_weights import product_weights
    from accel.sources.onnx_file import read_proto

    return sum(size for _, size in product_weights(read_proto(src.path))) >= _LARGE_WEIGHTS


def _without_fp8(target: Target, request: Request) -> str | None:
    """Why ``target`` has no fp8: a GPU that is to be built for lacks it, or which GPUs these are isn't said."""
    capabilities = request.compute_capabilities
    if not capabilities and target.name == "tensorrt" and get_runtime(target.runtime).runnable():
        from accel.runtimes.cuda_memory import device_capability

        with contextlib.suppress(UnsupportedHere):
            capabilities = (device_capability(),)
    first = ".".join(map(str, FIRST_WITH["float8"]))
    for text in capabilities:
        check_capability(text)
    lacking = [text for text in capabilities if tuple(int(part) for part in text.split(".")) < FIRST_WITH["float8"]]
    if lacking:
        return f"compute capability {lacking[0]} has no fp8; use int8 or build for {first} and later"
    if not capabilities:
        return f"not every GPU has fp8; say which it is for: --compute-capability {first} or later"
    return None


def _impossible(src: Artifact, target: Target, precision: str, request: Request) -> str | None:
    name = f"{target.name} {precision}"
    own = src.properties.get("precision", "fp32")
    if own in ("int8", "int4", "fp8") and precision != own:
        return f"the source is {own} already"
    if own in ("fp16", "bf16") and precision != own:
        return f"the source is {own} already; start from its fp32 form"
    if precision == "fp8" and (reason := _without_fp8(target, request)):
        return reason
    if precision in ("int8", "fp8") and own != precision and request.data is None and target.name != "ort-cpu":
        return f"{precision} needs data to calibrate on; pass --data"
    known = FP8_CALIBRATIONS if precision == "fp8" else FORMS[target.qdq].calibrations
    calibration = request.quantize.get("calibration", known[0])
    if precision in ("int8", "fp8", "mixed") and own == "fp32" and calibration not in known:
        return f"{name} is calibrated with {' or '.join(known)}, not {calibration}; leave --quantize calibration out"
    if precision == "mixed" and request.data is None:
        return "finding the layers that need more than int8 needs data; pass --data"
    if precision == "bf16" and target.name == "openvino" and not _cpu_has_bf16():
        return "this CPU has no bf16 instructions"
    if request.kernels and target.kind == "openvino":
        return "OpenVINO doesn't take accel's fused operators; leave --kernels out"
    if request.kernels and precision in ("int8", "fp8", "int4", "mixed"):
        return "quantized products have scales between them that --kernels doesn't fuse; leave it out"
    return None


def _cpu_has_bf16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(environment(0, date=False)["cpu_features"]))


def _variants(src: Artifact, target: Target, precision: str, request: Request) -> list[Recipe]:
    if precision == "mixed":
        return _searched(src, target, request)
    options: dict[str, Any] = {"threads": request.threads}
    name = f"{target.name} {precision}"
    head = [*_in_range(src, target, precision), *_simplify(src)]
    if target.kind == "onnx":
        found = [(name, [*head, *steps]) for name, steps in _onnx_variants(src, target, precision, request)]
        return [
            Recipe(name=n, target=target, precision=precision, stages=tuple(steps), options=options)
            for n, steps in found
            if steps or target.runtime != "onnxruntime"  # nothing done to it: that is the source itself
        ]
    if target.kind == "openvino":
        quantized = _quantized(src, target, precision, request) or _weights(src, target, precision, request)
        steps = [*head, *quantized, _openvino(precision)]
        in_bf16 = options | {"precision": "bf16"}
        forms = [(name, in_bf16 if precision == "bf16" else options)]
        if precision == "int8" and _cpu_has_bf16():  # what isn't quantized can still be had in bf16
            forms.append((f"{name}+bf16", in_bf16))
    else:
        typed = _typed(src, target, precision, request)
        steps = [*head, *_without_float64(src, typed), *typed, *_fused(src, precision, request)]
        steps.append(_engine(target, request))
        forms = [(name, options)]
    return [Recipe(name=n, target=target, precision=precision, stages=tuple(steps), options=o) for n, o in forms]


def _searched(src: Artifact, target: Target, request: Request) -> list[Recipe]:
    """The calibrated int8 candidates, as the start of a search for the layers that need more."""
    found = (_as_search(recipe) for recipe in _variants(src, target, "int8", request))
    return [recipe for recipe in found if recipe is not None]


def _as_search(recipe: Recipe) -> Recipe | None:
    """``recipe`` with its layers still to be chosen; None where it calibrates nothing."""
    if not any(name == "quantize" and getattr(config, "mode", "") == "static" for name, config, _ in recipe.stages):
        return None
    name = recipe.name.replace(" int8", " mixed").removesuffix(" static")
    return replace(recipe, name=name, precision="mixed", search=True)


Step = tuple[str, StageConfig, float]


def _in_range(src: Artifact, target: Target, precision: str) -> list[Step]:
    """An opset or an IR version that the target doesn't take is brought into its range first."""
    from accel.converters.onnx_from_onnx import OnnxFromOnnxConfig

    opset = int(src.properties.get("opset") or target.min_opset)
    least = FP8_OPSET if precision == "fp8" else BLOCK_OPSET if precision == "int4" and target.kind == "engine" else 0
    wanted = min(max(opset, least, target.min_opset), target.max_opset)
    if wanted == opset and int(src.properties.get("ir") or 0) <= target.max_ir:
        return []
    return [("onnx_from_onnx", OnnxFromOnnxConfig(opset=wanted, max_ir=target.max_ir), STAGE_LIMITS["simplify"])]


def _simplify(src: Artifact) -> list[Step]:
    from accel.converters.simplify import SimplifyConfig

    if any(record["name"] == "simplify" for record in src.history):
        return []
    return [("simplify", SimplifyConfig(), STAGE_LIMITS["simplify"])]


def _onnx_variants(src: Artifact, target: Target, precision: str, request: Request) -> list[tuple[str, list[Step]]]:
    name = f"{target.name} {precision}"
    if precision in ("fp16", "bf16"):
        return [(name, [*_typed(src, target, precision, request), *_fused(src, precision, request)])]
    if precision == "int4":
        return [(name, _weights(src, target, precision, request))]
    if precision != "int8" or src.properties.get("precision") == "int8":
        return [(name, _fused(src, precision, request))]
    found: list[tuple[str, list[Step]]] = []
    if request.data is not None:
        found.append((f"{name} static", _quantized(src, target, precision, request)))
    if target.name == "ort-cpu":
        dynamic = _with_options(QuantizeConfig(form=target.qdq, mode="dynamic"), request)
        found.append((f"{name} dynamic", [("quantize", dynamic, STAGE_LIMITS["int8"])]))
        if _large_products(src):
            found.append((f"{name} weights", _weights(src, target, precision, request)))
    return found


def _with_options(config: QuantizeConfig, request: Request) -> QuantizeConfig:
    return replace(config, **options_of_mode(config, request.quantize))


def _weights(src: Artifact, target: Target, precision: str, request: Request) -> list[Step]:
    """Only the weights of large products in 8 or 4 bits; nothing where the source has such weights already."""
    if precision not in ("int8", "int4") or src.properties.get("precision") in ("int8", "int4"):
        return []
    config = QuantizeConfig(form=target.qdq, mode=f"{precision}-weights")
    if target.kind == "engine":
        config = replace(config, block_size=_ENGINE_BLOCK)
    config = _with_options(config, request)
    return [("quantize", config, STAGE_LIMITS[precision])]


def _quantized(src: Artifact, target: Target, precision: str, request: Request) -> list[Step]:
    if precision not in ("int8", "fp8") or src.properties.get("precision") == precision:
        return []
    mode = "fp8" if precision == "fp8" else "static"
    config = QuantizeConfig(form=target.qdq, mode=mode, data=request.data, samples=request.samples)
    return [("quantize", _with_options(config, request), STAGE_LIMITS[precision])]


def _typed(src: Artifact, target: Target, precision: str, request: Request) -> list[Step]:
    """For strongly typed runtimes, where the precision is what the file says: 8 bits sit on an fp16 base."""
    from accel.converters.cast import CastConfig
    from accel.converters.fit_tensorrt import FitTensorRtConfig

    weights = _weights(src, target, precision, request) if precision == "int4" else []
    steps = weights or _quantized(src, target, precision, request)
    if src.properties.get("precision") == "int8":  # by another toolkit: only what TensorRT takes of it stays as it is
        steps = [("fit_tensorrt", FitTensorRtConfig(), STAGE_LIMITS["fp16-in-int8"])]
    base = None if precision == "fp32" else "bf16" if precision == "bf16" else "fp16"
    if base is None or src.properties.get("precision", "fp32") != "fp32":
        return steps
    # What fp16 rounds may fall into the next int8 step: beside QDQ a cast changes more than alone.
    limit = STAGE_LIMITS["fp16-in-int8" if steps else base]
    return [*steps, ("cast", CastConfig(precision=base, data=request.data, **request.cast), limit)]


def _without_float64(src: Artifact, steps: Sequence[Step]) -> list[Step]:
    """An engine computes float64 in float32: so does, first of all, the graph that it is built from and judged on."""
    from accel.converters.fit_tensorrt import FitTensorRtConfig
    from accel.converters.preflight import computes_in_float64
    from accel.runtimes.onnx_rounded import inlined
    from accel.sources.onnx_file import read_proto

    fitted = any(name == "fit_tensorrt" for name, _, _ in steps)
    if fitted or not computes_in_float64(inlined(read_proto(src.path)).graph):
        return []
    return [("fit_tensorrt", FitTensorRtConfig(), STAGE_LIMITS["fp32"])]


def _fused(src: Artifact, precision: str, request: Request) -> list[Step]:
    """The same operations under another name: what may differ is the order in which an activation rounds."""
    from accel.converters.fuse_kernels import FuseKernelsConfig

    low = precision in ("fp16", "bf16") or src.properties.get("precision") in ("fp16", "bf16")
    limit = STAGE_LIMITS[precision if low and precision in STAGE_LIMITS else "simplify"]
    return [("fuse_kernels", FuseKernelsConfig(), limit)] if request.kernels else []


def _openvino(precision: str) -> Step:
    from accel.converters.openvino_from_onnx import OpenVinoFromOnnxConfig

    # An int8 graph runs in other kernels with other rounding than the one it is compared with.
    return (
        "openvino_from_onnx",
        OpenVinoFromOnnxConfig(),
        STAGE_LIMITS[precision if precision in ("int8", "int4") else "fp32"],
    )


def _engine(target: Target, request: Request) -> Step:
    from accel.converters.engine_from_onnx import EngineFromOnnxConfig

    config = EngineFromOnnxConfig(
        toolkit=target.name,
        profiles=request.profiles,
        compute_capabilities=request.compute_capabilities,
        kernels=request.kernels and target.name == "tensorrt",
        **request.engine,
    )
    return "engine_from_onnx", config, STAGE_LIMITS["fp16"]
