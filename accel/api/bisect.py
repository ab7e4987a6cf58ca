"""Where do two models part?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.verify import LIMITS as OUTPUT_LIMITS
from accel.artifact import Artifact
from accel.errors import BadData, UnsupportedHere, UsageError
from accel.sources import open_source
from accel.verify.compare import Difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from accel.sources.declare import Dims
    from accel.verify.bisect import Divergence

# The largest relative error (rel_l2) of a tensor inside the candidate that still counts as the same. Both sides run
# node by node without fusions: float32 against float32 leaves next to nothing.
LIMITS = {**OUTPUT_LIMITS, "fp32": 1e-4}

# How far what a runtime computes may be from the ONNX form that it was made from: both compute the same graph.
_AS_RUN = 0.1

_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class BisectReport:
    """``divergence`` is None where the outputs agree within ``limit``. ``tensors``: how many were matched (of which
    ``by_structure``), ``unmatched`` how many have no counterpart. ``harmless``: they differ, what is computed from them
    doesn't. ``earlier``: tensors before the one found that differ as well; None unless scanned. ``notes``: which file
    was looked into instead of one that can't be. ``as_run``: where that was the candidate, its file agrees and this
    machine runs it, the output in which what its runtime computes is furthest from the file looked into, if by more
    than such a runtime may: no node is to blame then."""

    divergence: Divergence | None
    limit: float
    outputs: dict[str, Difference]
    runs: int
    tensors: int
    by_structure: int
    unmatched: int
    harmless: tuple[str, ...]
    earlier: tuple[str, ...] | None
    notes: tuple[str, ...] = ()
    as_run: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "divergence": self.divergence.to_json() if self.divergence else None,
            "limit": self.limit,
            "outputs": {name: d.to_json() for name, d in self.outputs.items()},
            "runs": self.runs,
            "tensors": self.tensors,
            "by_structure": self.by_structure,
            "unmatched": self.unmatched,
            "harmless": list(self.harmless),
            "earlier": None if self.earlier is None else list(self.earlier),
            "notes": list(self.notes),
            "as_run": self.as_run.to_json() if self.as_run else None,
        }


def bisect(
    reference: str | Path | Artifact,
    candidate: str | Path | Artifact,
    *,
    data: str | Path | None = None,
    samples: int = 8,
    limit: float | None = None,
    scan: bool = False,
    dims: Dims | None = None,
) -> BisectReport:
    """Find the first node at which ``candidate`` parts from ``reference``: two ONNX models with the same inputs and
    outputs, after whatever stage (simplified, cast, quantized). For an engine or an OpenVINO model the last ONNX form
    that it was made from, where that is still there as the manifest records it; what the runtime computes, where this
    machine has it, is compared with that form.

    Both run on ``samples`` samples of ``data`` (without it on random inputs), with the rounding of their own dtypes
    after every node. ``limit``: the largest ||candidate - reference||₂ / ||reference||₂ of a tensor that still counts
    as the same; the default follows the candidate's precision, 0 asks for equal bits. O(log n) runs, with no more than
    the tensors across one cut of the graph in memory; ``scan`` then also looks at every tensor before.

    Raises ``UnsupportedHere`` for what is no ONNX and has none in its manifest, ``UsageError`` where inputs or outputs
    differ, ``BadData``.
    """
    from accel.sources.onnx_weights import read_detached
    from accel.verify.bisect import Bisection
    from accel.verify.data import widened

    notes: list[str] = []
    given = open_source(candidate)
    first, second = _onnx_of(open_source(reference, dims=dims), notes), _onnx_of(given, notes)
    first = widened(first, Path(data) if data else None, dict(dims or {}))
    for role, ours, theirs in (
        ("inputs", first.signature.inputs, second.signature.inputs),
        ("outputs", first.signature.outputs, second.signature.outputs),
    ):
        if {s.name for s in ours} != {s.name for s in theirs}:
            raise UsageError(
                f"the {role} differ: {', '.join(s.name for s in ours)} and {', '.join(s.name for s in theirs)}; "
                "give two forms of one model"
            )
        shapes = {spec.name: spec.shape for spec in theirs}
        for spec in ours:
            if len(spec.shape) != len(shapes[spec.name]):
                raise UsageError(
                    f"{spec.name!r} has {len(spec.shape)} dims in one model and {len(shapes[spec.name])} in the other; "
                    "give two forms of one model"
                )
    if limit is None:
        limit = LIMITS[str(second.properties.get("precision", "fp32"))]
    if not limit >= 0:
        raise UsageError(f"a limit of {limit} makes no sense; give a relative error such as 0.001")
    if samples < 1:
        raise UsageError(f"{samples} samples are none; give at least 1")
    feeds = _feeds(first, Path(data) if data else None, samples)
    search = Bisection(read_detached(first.path), read_detached(second.path), feeds, limit=limit).search(scan=scan)
    return BisectReport(
        divergence=search.found,
        limit=limit,
        outputs=dict(search.outputs),
        runs=search.runs,
        tensors=len(search.match.tensors),
        by_structure=len(search.match.by_structure),
        unmatched=len(search.match.unmatched),
        harmless=search.harmless,
        earlier=search.earlier,
        notes=tuple(notes),
        as_run=None if search.found else _as_run(given, second, feeds),
    )


def _as_run(given: Artifact, looked_into: Artifact, feeds: Sequence[Mapping[str, np.ndarray]]) -> Difference | None:
    from accel.runtimes.base import open_session, recorded_options
    from accel.verify.compare import compare, worst
    from accel.verify.gates import cast_feeds, gate_runtime

    runtime = gate_runtime(given)
    if given is looked_into or runtime is None:
        return None
    with open_session(looked_into, gate_runtime(looked_into)) as one, open_session(given, runtime) as two:
        found = worst([compare(one.run(cast_feeds(one, f)), two.run(cast_feeds(two, f))) for f in feeds])
    furthest = max(found.values(), key=lambda difference: difference.rel_l2)
    precision = recorded_options(given).get("precision") or given.properties.get("precision")
    return furthest if not furthest.rel_l2 <= min(_AS_RUN, OUTPUT_LIMITS.get(str(precision), _AS_RUN)) else None


def _onnx_of(artifact: Artifact, notes: list[str]) -> Artifact:
    if artifact.kind == "onnx":
        return artifact
    made_from = _last_onnx(artifact)
    if made_from is None:
        raise UnsupportedHere(
            f"{artifact.path} is {artifact.kind}; bisect looks inside ONNX files: give the one it was made from"
        )
    notes.append(f"{artifact.path} is {artifact.kind}: looked into {made_from.path}, which it was made from")
    return made_from


def _last_onnx(artifact: Artifact) -> Artifact | None:
    """The ONNX form that the last stage of ``artifact`` read, its bytes being those that the manifest records."""
    if not artifact.history:
        return None
    record = artifact.history[-1]
    path = Path(str(record.get("input_path", "")))
    if path.suffix != ".onnx" or not path.is_file():
        return None
    found = open_source(path)
    return found if found.digest == record["input"] else None


def _feeds(artifact: Artifact, data: Path | None, samples: int) -> list[dict[str, np.ndarray]]:
    from accel.verify.data import Dataset

    if data is not None:
        feeds = list(Dataset.load(data, artifact.signature).batches(_BATCH, samples))
        if not feeds:
            raise BadData(f"{data} holds less than one batch of the model's fixed size; raise --samples or add some")
        return feeds
    batch = artifact.signature.batch_dim
    most = min(artifact.signature.dims[batch].max, samples, _BATCH) if batch else 0
    sizes = {batch: artifact.signature.dims[batch].down(most)} if batch else {}
    return [artifact.signature.example_inputs(**sizes)]
