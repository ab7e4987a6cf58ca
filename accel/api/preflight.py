"""Lists the nodes of an ONNX model that the build of a TensorRT engine refuses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from accel.artifact import Artifact
from accel.errors import BadInputSpec, GateFailed, UnsupportedHere, UsageError
from accel.sources.source import Model, Source, SourceOptions, known_keywords
from accel.spelling import option
from accel.stage import run_stage
from accel.tables.limits import STAGE_LIMITS

from .export import check_writable, open_cache

if TYPE_CHECKING:
    from accel.converters.to_tensorrt.preflight import Refusal

# Maps the precision of a graph to the largest relative error that a rewrite of the graph may cause. The limit of a
# quantized graph is large, because requantization from uint8 to symmetric int8 loses up to one of eight bits. The lost
# bit may change a value by one quantization step.
FIX_LIMITS = {precision: STAGE_LIMITS[precision] for precision in ("fp32", "fp16", "bf16")}
FIX_LIMIT_QUANTIZED = STAGE_LIMITS["fp16-in-int8"]


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """Holds the result of a preflight.

    ``refusals`` lists the refused nodes of the given model. ``fixed`` is the rewritten model, or None without ``fix``.
    ``left`` lists the refused nodes of the rewritten model. ``asked_parser`` is True if the installed toolkit's parser
    checked the operators.
    """

    refusals: tuple[Refusal, ...]
    asked_parser: bool
    fixed: Artifact | None = None
    left: tuple[Refusal, ...] = ()

    @property
    def passed(self) -> bool:
        """Returns True if the engine build accepts all nodes of the rewritten model. If nothing was rewritten, returns
        True if the build accepts all nodes of the given model."""
        return not (self.left if self.fixed else self.refusals)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "refusals": [r.to_json() for r in self.refusals],
            "asked_parser": self.asked_parser,
            "fixed": str(self.fixed.path) if self.fixed else None,
            "left": [r.to_json() for r in self.left],
        }


@known_keywords
def preflight(
    model: Model,
    *,
    target: str = "tensorrt-rtx",
    compute_capabilities: Sequence[str] = (),
    fix: bool = False,
    out: str | Path | None = None,
    data: str | Path | None = None,
    use_cache: bool = True,
    **about: Unpack[SourceOptions],
) -> PreflightReport:
    """Lists every node of an ONNX model that an engine build for ``target`` (``tensorrt-rtx`` or ``tensorrt``) refuses.
    Each node is listed with the cause and the fix.

    With ``fix``, rewrites the refused nodes that can be rewritten safely and writes the model to ``out``. A gate
    compares the outputs of the rewritten model and of ``model``, on ``data`` or on random inputs. The gate allows a
    relative error of 1e-3 for float32 and 0.1 for a quantized graph, as in ``accel.optimize``. The other arguments set
    the fields of ``accel.Source``. For an ONNX file, only the fields ``inputs`` and ``dims`` have an effect.

    Raises ``UsageError`` if ``out`` is missing, does not end in ``.onnx`` or is given without ``fix``. Raises
    ``UnsupportedHere`` if the model isn't an ONNX model, or if the target can't build for a requested compute
    capability. Raises ``UnknownName`` if the target builds no engines, and ``GateFailed`` if the outputs of the
    rewritten model differ too much.
    """
    from accel.converters.to_tensorrt.fit import FitTensorRtConfig
    from accel.converters.to_tensorrt.preflight import parser_says
    from accel.converters.to_tensorrt.preflight import preflight as look
    from accel.proof.gates import OutputGate
    from accel.runtimes.tensorrt_toolkit import check_capability, toolkit_runtime

    source = Source.of(model, **about)
    toolkit_runtime(target)
    for text in compute_capabilities:
        check_capability(text)
    if fix and out is None:
        raise UsageError(
            f"{option('fix', True)} needs a file for the rewritten model; name the file with "
            f"{option('out', 'fixed.onnx')}"
        )
    if out is not None:
        if not fix:
            raise UsageError(
                f"the output file {option('out', out)} is only written with {option('fix', True)}; "
                f"add {option('fix', True)} or leave out {option('out')}"
            )
        if Path(out).suffix != ".onnx":
            raise UsageError(f"the output file {out} has to end in .onnx; rename the file")
        check_writable(Path(out))
    try:
        src = source.open()
    except BadInputSpec as error:
        if not source.native:
            raise
        raise UnsupportedHere(
            f"{source.text} is no ONNX file; export it with accel export and give the exported file"
        ) from error
    if src.kind != "onnx":
        raise UnsupportedHere(
            f"the model {src.path} is of kind {src.kind}; give the ONNX file that the engine is built from"
        )
    supported = parser_says(src.path, target, compute_capabilities)
    refusals = tuple(look(src.path, compute_capabilities, supported))
    if not fix:
        return PreflightReport(refusals=refusals, asked_parser=bool(supported))
    precision = str(src.properties.get("precision"))
    limit = FIX_LIMITS.get(precision, FIX_LIMIT_QUANTIZED)
    gate = OutputGate(limit=limit, data=Path(data) if data else None)
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        try:
            made = run_stage("fit_tensorrt", src, FitTensorRtConfig(), gates=[gate], out=Path(str(out)), cache=cache)
        except GateFailed as error:
            raise _way_on(error, refusals, quantized=precision not in FIX_LIMITS) from error
    left = tuple(look(made.path, compute_capabilities, supported))
    return PreflightReport(refusals=refusals, asked_parser=bool(supported), fixed=made, left=left)


def _way_on(error: GateFailed, refusals: Sequence[Refusal], *, quantized: bool) -> GateFailed:
    """Returns the gate's ``error``, and adds the rewritten nodes and the fix to its message."""
    from accel.converters.to_tensorrt.preflight import NEEDS_FLOAT64, NEEDS_OWN_SCALES

    nodes = [row.node for row in refusals if row.safe]
    named = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    fix = NEEDS_OWN_SCALES if quantized else NEEDS_FLOAT64
    told = GateFailed(f"{error}; the rewritten nodes are {named}: {fix}")
    told.value = error.value
    return told
