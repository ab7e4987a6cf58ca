"""What will an engine build refuse?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.export import check_writable, open_cache
from accel.artifact import Artifact
from accel.errors import BadInputSpec, GateFailed, UnsupportedHere, UsageError
from accel.optimizer.recipes import STAGE_LIMITS
from accel.sources import open_source
from accel.stage import run_stage

if TYPE_CHECKING:
    from accel.converters.preflight import Refusal

# How far a rewritten graph may be from the one that came, by what rounds in it. Requantizing uint8 as symmetric int8
# takes up to one of eight bits, and what an 8-bit graph rounds may fall into the next step; float64 in a graph of
# floats has no such excuse.
FIX_LIMITS = {precision: STAGE_LIMITS[precision] for precision in ("fp32", "fp16", "bf16")}
FIX_LIMIT_QUANTIZED = STAGE_LIMITS["fp16-in-int8"]


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """``refusals``: what is refused of the model as it came. ``fixed``: the rewritten model, where that was asked for,
    and ``left``: what is still refused of it. ``asked_parser``: whether the toolkit itself was here to be asked about
    operators."""

    refusals: tuple[Refusal, ...]
    asked_parser: bool
    fixed: Artifact | None = None
    left: tuple[Refusal, ...] = ()

    @property
    def passed(self) -> bool:
        """Nothing is refused (any more)."""
        return not (self.left if self.fixed else self.refusals)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "refusals": [r.to_json() for r in self.refusals],
            "asked_parser": self.asked_parser,
            "fixed": str(self.fixed.path) if self.fixed else None,
            "left": [r.to_json() for r in self.left],
        }


def preflight(
    model: str | Path | Artifact,
    *,
    target: str = "tensorrt-rtx",
    compute_capabilities: Sequence[str] = (),
    fix: bool = False,
    out: str | Path | None = None,
    data: str | Path | None = None,
    use_cache: bool = True,
) -> PreflightReport:
    """List every node of an ONNX model that an engine build for ``target`` (``tensorrt-rtx`` or ``tensorrt``) refuses,
    with its cause and its fix; with ``fix`` rewrite what can be rewritten safely into ``out``, gated like every stage
    (on ``data``, where given).

    The file that ``fix`` writes is as near to ``model`` as ``accel.optimize`` asks of the same rewriting: 1e-3 where
    the floats are float32, 0.1 where the graph is quantized.

    Raises ``UsageError`` for an ``out`` that is missing, no ``.onnx`` or without ``fix``, ``UnsupportedHere`` for what
    is no ONNX and for a compute capability that the target doesn't build for, ``UnknownName`` for a target that builds
    no engines, ``GateFailed`` where the rewritten model computes something else.
    """
    from accel.converters.fit_tensorrt import FitTensorRtConfig
    from accel.converters.preflight import parser_says
    from accel.converters.preflight import preflight as look
    from accel.runtimes.tensorrt_toolkit import check_capability, toolkit_runtime
    from accel.verify.gates import OutputGate

    toolkit_runtime(target)
    for text in compute_capabilities:
        check_capability(text)
    if fix and out is None:
        raise UsageError("--fix writes a new file; give it a name with -o fixed.onnx")
    if out is not None:
        if not fix:
            raise UsageError(f"nothing is written without --fix; add it, or leave out -o {out}")
        if Path(out).suffix != ".onnx":
            raise UsageError(f"{out} has to end in .onnx")
        check_writable(Path(out))
    try:
        src = open_source(model)
    except BadInputSpec as error:  # a factory, which would have to be told what it takes
        raise UnsupportedHere(f"{model} is no ONNX file; make one of it with accel export, and give that") from error
    if src.kind != "onnx":
        raise UnsupportedHere(f"{src.path} is {src.kind}; give the ONNX file that the engine is to be built from")
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
    """``error`` of a rewriting that changed too much, with the nodes it was for and what can be done instead."""
    from accel.converters.preflight import NEEDS_FLOAT64, NEEDS_OWN_SCALES

    nodes = [row.node for row in refusals if row.safe]
    named = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    fix = NEEDS_OWN_SCALES if quantized else NEEDS_FLOAT64
    told = GateFailed(f"{error}; rewritten were {named}: {fix}")
    told.value = error.value
    return told
