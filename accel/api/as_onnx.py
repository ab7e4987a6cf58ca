"""Exports the user's model or the parts of a pipeline to ONNX, and keeps the original model for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import UsageError
from accel.proof.data import check_values
from accel.proof.gates import OutputGate
from accel.proof.runs import check_runs, check_samples, nan_words
from accel.sources.source import Source
from accel.stage import Gate, run_stage
from accel.tables.limits import ROUNDING

from .decoder.export import decoder_gates
from .export import DEFAULT_OPSET, TO_ONNX, proven_once, to_onnx_config, usual_limit


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Holds an ONNX model, or a pipeline of ONNX models. ``source`` is the model that ``artifact`` was exported from,
    or None if the user gave an ONNX model. ``limit`` is the largest allowed relative error of the export."""

    artifact: Artifact
    source: Artifact | None = None
    limit: float = 0.0

    def check(self, data: Path, samples: int, cache: StageCache) -> tuple[str, str]:
        """Runs the model and its source on ``samples`` samples of ``data`` (see ``check_samples``).

        Returns two warnings. The first warning says that the rounding error is above the limit of the export gate. The
        second warning says that outputs are NaN. Each warning is an empty text if it doesn't apply.
        """
        tolerance = max(ROUNDING, self.limit)
        apart = check_samples(self.artifact, data, samples, cache, source=self.source, tolerance=tolerance)
        nan = nan_words(apart.nan, apart.samples, self.artifact.signature, data)
        if apart.rel_l2 <= self.limit:
            return "", nan
        return (
            f"the ONNX form differs from its source by {apart.rel_l2:.1e} in {apart.output!r} on {apart.where} "
            f"(the gate of an export allows {self.limit:.0e}); candidates are compared with the ONNX form, "
            "accel verify compares them with the source"
        ), nan


def as_onnx(source: Source, cache: StageCache, data: Sequence[Path] = ()) -> Exported:
    """Opens ``source``, and exports it to ONNX if it isn't an ONNX model. Before the export, checks the integers in
    ``data`` against the ranges that the source declares.

    Raises the errors of ``accel.export``. Raises ``UsageError`` for an engine, or for any other source that can't be
    exported to ONNX. Raises ``BadInputSpec`` if an ONNX file without a manifest fails at a size that its signature
    allows.
    """
    src = source.open()
    # Data isn't checked against ranges that accel only guessed from a TensorFlow or ONNX graph.
    if src.source.get("kind") == "torch" or source.inputs:
        for path in data:
            check_values(path, src.signature, declared=bool(source.inputs))
    if "pipeline" in src.source and src.kind == "torch":
        from .pipeline.export import export_pipeline

        parts = export_pipeline(src, opset=DEFAULT_OPSET, simplify=False, cache=cache)
        return Exported(artifact=parts, source=src, limit=usual_limit(src))
    if src.kind == "pipeline":
        return Exported(artifact=src)
    if src.kind in TO_ONNX:
        limit = usual_limit(src)
        config = to_onnx_config(src.kind)
        gates: list[Gate] = [OutputGate(limit=limit), *decoder_gates(src, limit)]
        # Candidates aren't simplified again, so their source is compared with PyTorch once, in its simplified form.
        made = proven_once(src, config, gates, cache)
        made = made or run_stage(TO_ONNX[src.kind], src, config, gates=gates, cache=cache)
        return Exported(artifact=made, source=src, limit=limit)
    if src.kind != "onnx":
        raise UsageError(
            f"the model {src.path} is already of kind {src.kind}; give the ONNX file or the source of this model"
        )
    if not src.history:
        check_runs(src, cache)
    return Exported(artifact=src)
