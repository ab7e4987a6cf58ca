"""What is to be optimized, as ONNX, and what it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.export import TO_ONNX, to_onnx_config, usual_limit
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import UsageError
from accel.sources import open_source
from accel.stage import run_stage
from accel.verify.compare import ROUNDING
from accel.verify.gates import OutputGate
from accel.verify.runs import check_runs, check_samples, nan_words

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs


@dataclass(frozen=True, kw_only=True)
class Exported:
    """``artifact``: the ONNX model; ``source``: what it was made from here, if it was, and how far it may be off."""

    artifact: Artifact
    source: Artifact | None = None
    limit: float = 0.0

    def check(self, data: Path, samples: int, cache: StageCache) -> tuple[str, str]:
        """Run both on ``samples`` samples of ``data``; see ``check_samples``. Returns what is to be said where they are
        further apart than the gate of an export lets them be, by no more than rounding, and where they give NaN."""
        tolerance = max(ROUNDING, self.limit)
        apart = check_samples(self.artifact, data, samples, cache, source=self.source, tolerance=tolerance)
        nan = nan_words(apart.nan, apart.samples, data)
        if apart.rel_l2 <= self.limit:
            return "", nan
        return (
            f"the ONNX form is {apart.rel_l2:.1e} from its source in {apart.output!r} on {apart.where} (the gate of an "
            f"export: {self.limit:.0e}); candidates are compared with the ONNX form, accel verify with the source"
        ), nan


def as_onnx(
    model: str | Path | Artifact,
    inputs: Inputs | None,
    weights: Path | None,
    dims: Dims | None,
    tensorflow: Mapping[str, Any],
    cache: StageCache,
) -> Exported:
    """``model``, exported where it is no ONNX yet; the arguments are those of ``accel.optimize``.

    Raises what ``accel.export`` raises, ``UsageError`` for what comes after ONNX, ``BadInputSpec`` for a foreign ONNX
    file that doesn't run at its own sizes.
    """
    src = open_source(model, inputs=inputs, weights=weights, dims=dims, tensorflow=tensorflow)
    if src.kind in TO_ONNX:
        limit = usual_limit(src)
        config, gates = to_onnx_config(src.kind), [OutputGate(limit=limit)]
        made = run_stage(TO_ONNX[src.kind], src, config, gates=gates, cache=cache)
        return Exported(artifact=made, source=src, limit=limit)
    if src.kind != "onnx":
        raise UsageError(f"{src.path} is {src.kind} already; give the ONNX file or the source that it was made from")
    if not src.history:
        check_runs(src)
    return Exported(artifact=src)
