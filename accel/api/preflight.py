"""What will an engine build refuse?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.export import check_writable, open_cache
from accel.artifact import Artifact
from accel.errors import UnsupportedHere, UsageError
from accel.sources import open_source
from accel.stage import run_stage

if TYPE_CHECKING:
    from accel.converters.preflight import Refusal

# Requantizing uint8 as symmetric int8 takes up to one of eight bits.
FIX_LIMIT = 0.1


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

    Raises ``UsageError`` for an ``out`` that is missing or no ``.onnx``, ``UnsupportedHere`` for what is no ONNX and
    for a compute capability that the target doesn't build for, ``UnknownName`` for a target that builds no engines,
    ``GateFailed`` where the rewritten model computes something else.
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
        if Path(out).suffix != ".onnx":
            raise UsageError(f"{out} has to end in .onnx")
        check_writable(Path(out))
    src = open_source(model)
    if src.kind != "onnx":
        raise UnsupportedHere(f"{src.path} is {src.kind}; give the ONNX file that the engine is to be built from")
    supported = parser_says(src.path, target, compute_capabilities)
    refusals = tuple(look(src.path, compute_capabilities, supported))
    if not fix:
        return PreflightReport(refusals=refusals, asked_parser=bool(supported))
    gate = OutputGate(limit=FIX_LIMIT, data=Path(data) if data else None)
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        made = run_stage("fit_tensorrt", src, FitTensorRtConfig(), gates=[gate], out=Path(str(out)), cache=cache)
    left = tuple(look(made.path, compute_capabilities, supported))
    return PreflightReport(refusals=refusals, asked_parser=bool(supported), fixed=made, left=left)
