"""Lists the recipes to try for a request. Also lists the impossible precisions, with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from accel.artifact import Artifact
from accel.converters.quantize.stage import FORMS, FP8_CALIBRATIONS
from accel.errors import MissingExtra, UnknownName, UnsupportedHere, UsageError
from accel.runtimes.base import get_runtime
from accel.signature.decoder import Cache
from accel.spelling import option
from accel.tables.precision import PRECISIONS
from accel.tables.target import TARGETS, Target

from . import openvino, ort_cpu, ort_cuda, tensorrt
from .recipe import NotTried, Recipe, RecipeRequest, as_search
from .steps import has_large_products, is_16_bit, precision_of

# Maps each target to the function that makes the recipes for a precision.
_RECIPES: dict[str, Callable[[Artifact, Target, str, RecipeRequest], list[Recipe]]] = {
    "ort-cpu": ort_cpu.recipes,
    "openvino": openvino.recipes,
    "ort-cuda": ort_cuda.recipes,
    "tensorrt": tensorrt.recipes,
    "tensorrt-rtx": tensorrt.recipes,
}


def targets_for(names: str | Sequence[str]) -> tuple[Target, ...]:
    """Returns the target or targets called ``names``, or for ``auto`` every target that this machine can run.

    Raises ``UnknownName`` if no target has one of the names, and ``MissingExtra`` if the toolkit of a target isn't
    installed. Raises ``UsageError`` if one of several targets can't run here, because candidates that aren't measured
    can't be compared.
    """
    several = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names)) or ("auto",)
    if several == ("auto",):
        return tuple(t for t in TARGETS.values() if get_runtime(t.runtime).runnable())
    if "auto" in several:
        raise UsageError(
            f"the target auto is every target that this machine can run; leave out either {option('target', 'auto')} "
            "or the other targets"
        )
    found = tuple(Target.get(name) for name in several)
    for target in found:
        runtime = get_runtime(target.runtime)
        if not runtime.installed:
            raise MissingExtra(runtime.module, target.extra or "all-cpu")
        if len(found) > 1 and not runtime.runnable():
            raise UsageError(
                f"{target.name} can't run on this machine, so it can't be compared with the other targets; give "
                f"{option('target', target.name)} alone"
            )
    return found


def precisions_for(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the precisions called ``names``, or None (all precisions) if ``names`` is empty. Raises
    ``UnknownName``."""
    for name in names or ():
        if name not in PRECISIONS:
            raise UnknownName(f"unknown precision {name!r}; use one of {', '.join(PRECISIONS)}")
    return tuple(names) if names else None


def recipes(src: Artifact, request: RecipeRequest) -> tuple[list[Recipe], list[NotTried]]:
    """Returns the recipes for ``src`` (an ONNX artifact). Also returns each precision that is impossible for ``src``,
    with the reason.

    Raises ``UsageError`` if the request has options for a stage that no recipe contains. Raises ``UnsupportedHere`` in
    each of these cases:

    - The only target lacks a precision that the user requests.
    - ``src`` is fp8, and the only target has no fp8.
    - The user requests kernels, and no candidate supports kernels.
    """
    made: list[Recipe] = []
    left_out: list[NotTried] = []
    is_fp8 = precision_of(src) == "fp8"  # fp8 is the only precision for an fp8 source
    alone = len(request.targets) == 1
    for target in request.targets:
        for precision in request.precisions or _usual(src, target, request):
            reason = _lacking(target, precision)
            if reason and alone:
                raise UnsupportedHere(
                    f"target {reason}; it has {', '.join(name for name in PRECISIONS if not _lacking(target, name))}"
                )
            reason = reason or _impossible(src, target, precision, request)
            if reason and precision == "fp8" and alone and (is_fp8 or request.precisions == ("fp8",)):
                raise UnsupportedHere(reason)
            found = [] if reason else _made(src, target, precision, request)
            uncalibrated = _uncalibrated(src, target, precision, request, found)
            if reason and not uncalibrated:
                left_out.append(NotTried(target=target.name, precision=precision, reason=reason))
            left_out += uncalibrated
            made += found
    if request.kernels and not made:
        raise UnsupportedHere("; ".join(f"{item.name}: {item.reason}" for item in left_out))
    for stage, options in (("quantize", request.quantize), ("cast", request.cast)):
        if options and made and not any(name == stage for recipe in made for name, _, _ in recipe.stages):
            raise UsageError(
                f"no candidate has the stage {stage}, so {option(stage)} has no effect; "
                f"leave out {option(stage)} or choose another {option('precision')}"
            )
    return made, left_out


def searched(src: Artifact, recipe: Recipe, request: RecipeRequest) -> Recipe | None:
    """Returns the recipe of a mixed-precision search that starts from the int8 recipe ``recipe``. Returns None if a
    search is impossible. If the user lists the precisions to try, only the entry ``mixed`` starts a search, so the
    function returns None.
    """
    if recipe.precision != "int8" or request.precisions is not None:
        return None
    return None if _impossible(src, recipe.target, "mixed", request) else as_search(recipe)


def _usual(src: Artifact, target: Target, request: RecipeRequest) -> tuple[str, ...]:
    """Returns the precisions to try if the user names no precisions."""
    is_fp8 = precision_of(src) == "fp8"
    own = [p for p in target.precisions if p != "fp8" or is_fp8 or not tensorrt.without_fp8(target, request)]
    in_int4 = not _lacking(target, "int4") and has_large_products(src)
    return (*own, *(("int4",) if in_int4 else ()))


def _made(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> list[Recipe]:
    """Returns the recipes for one target and precision. The recipes for ``mixed`` are made from the calibrated int8
    recipes."""
    make = _RECIPES[target.name]
    if precision != "mixed":
        return make(src, target, precision, request)
    found = (as_search(recipe) for recipe in make(src, target, "int8", request))
    return [recipe for recipe in found if recipe is not None]


def _uncalibrated(
    src: Artifact, target: Target, precision: str, request: RecipeRequest, made: Sequence[Recipe]
) -> list[NotTried]:
    """Returns the int8 candidates for ``target`` that are missing from ``made`` because there are no samples to
    calibrate on."""
    if precision != "int8" or request.data is not None:
        return []
    calibrated = replace(request, data=Path("samples.npz"))  # only the recipes' names are used, and no file is read
    if _lacking(target, precision) or _impossible(src, target, precision, calibrated):
        return []
    return [
        NotTried(target=target.name, precision=precision, variant=recipe.variant, reason=_needs_data(src, precision))
        for recipe in _made(src, target, precision, calibrated)
        if recipe.name not in {one.name for one in made}
    ]


def _needs_data(src: Artifact, precision: str) -> str:
    if Cache.of(src.signature) is not None:
        return "accel makes no decoders in static int8; dynamic int8, int8 weights and int4 need no calibration"
    return f"{precision} needs data to calibrate on; pass {option('data')}"


def _lacking(target: Target, precision: str) -> str | None:
    """Returns a message if ``target`` doesn't support ``precision``, else None."""
    if precision == "int4":
        has = target.kind == "engine" or not target.needs_gpu
    else:
        has = precision in target.precisions or (precision == "mixed" and "int8" in target.precisions)
    return None if has else f"{target.name} has no {precision}"


def _impossible(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> str | None:
    """Returns the reason if ``src`` can't be converted to ``precision`` for ``target``, else None."""
    own = precision_of(src)
    if src.adapters and target.name != "ort-cpu":
        return "the adapters are inputs that a run may leave out, which accel optimizes for ort-cpu alone"
    if own != precision and own in PRECISIONS and PRECISIONS[own].quantized:
        return f"the source is {own} already"
    if own != precision and is_16_bit(own):
        return f"the source is {own} already; start from its fp32 form"
    if precision == "fp8" and (reason := tensorrt.without_fp8(target, request)):
        return reason
    if precision == "tf32" and target.kind == "engine" and (reason := tensorrt.without_tf32(target, request)):
        return reason
    if reason := _calibration_impossible(src, target, precision, request):
        return reason
    if target.kind == "openvino" and (reason := openvino.obstacle(precision, request)):
        return reason
    if request.kernels and PRECISIONS[precision].quantized:
        return (
            f"quantized products have scales between them, which accel can't fuse; leave out {option('kernels', True)}"
        )
    return None


def _calibration_impossible(src: Artifact, target: Target, precision: str, request: RecipeRequest) -> str | None:
    """Returns the reason if ``precision`` requires calibration that is impossible for ``target``, else None."""
    own = precision_of(src)
    if not PRECISIONS[precision].needs_data:
        return None
    dynamic = precision == "int8" and target.name == "ort-cpu"  # dynamic quantization needs no samples
    if request.data is None and precision != "mixed" and own != precision and not dynamic:
        return _needs_data(src, precision)
    known = FP8_CALIBRATIONS if precision == "fp8" else FORMS[target.qdq].calibrations
    calibration = request.quantize.get("calibration", known[0])
    if own == "fp32" and calibration not in known:
        name = f"{target.name} {precision}"
        given = option("quantize", [f"calibration={calibration}"])
        return f"{name} is calibrated with {' or '.join(known)}, not {calibration}; leave out {given}"
    if precision == "mixed" and request.data is None:
        return f"finding the layers that need more than int8 needs data; pass {option('data')}"
    return None
