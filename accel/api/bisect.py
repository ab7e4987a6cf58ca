"""Finds the first node at which two models differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from accel.artifact import Artifact
from accel.errors import BadData, UnsupportedHere, UsageError
from accel.progress import shows_progress
from accel.proof.compare import Difference, in_order_note, new_output_names
from accel.signature import Signature
from accel.sources.source import Model, Source, SourceOptions, declared_dims, known_keywords, shared, with_declared
from accel.spelling import option
from accel.tables.limits import BISECT_LIMITS, VERIFY_LIMITS

from .export import TO_ONNX, to_onnx_unjudged
from .samples import Data, path_of, takes_samples
from .verify import effective_precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import onnx

    from accel.proof.bisect import Divergence

_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class BisectReport:
    """Holds the result of a bisection.

    ``divergence`` is the first difference, or None if the outputs agree within ``limit``. ``tensors`` is the number of
    tensors that have a counterpart in the other model. ``by_structure`` counts the tensors that were matched with their
    counterparts by operators and inputs, because the names differ. ``unmatched`` is the number of tensors without a
    counterpart. ``harmless`` lists tensors that differ, but don't change the outputs. With ``scan``, ``earlier`` lists
    the differing tensors that come before ``divergence`` in the order of the graph. Without ``scan``, ``earlier`` is
    None. ``notes`` names the ONNX files that were compared in place of an engine or an OpenVINO model. If the
    candidate's ONNX file agrees with the reference, but the candidate's own outputs do not, ``as_run`` is the output
    with the largest difference. In all other cases, ``as_run`` is None.
    """

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


@shows_progress
@known_keywords
@takes_samples
def bisect(
    reference: Model,
    candidate: Model,
    *,
    data: Data | None = None,
    samples: int = 8,
    limit: float | None = None,
    scan: bool = False,
    **about: Unpack[SourceOptions],
) -> BisectReport:
    """Finds the first node at which ``candidate`` differs from ``reference``. ``candidate`` and ``reference`` are ONNX
    models with the same inputs and outputs. Either model may be the result of a stage such as simplification, a cast or
    quantization. A PyTorch or TensorFlow source is exported first.

    For an engine or an OpenVINO model, ``bisect`` compares the last ONNX file that the model was made from. The ONNX
    file must still have the sha256 that the manifest records. If this machine can run the engine or the OpenVINO model,
    also compares the model's outputs with the outputs of the ONNX file.

    Both models run on ``samples`` samples of ``data``, or on random inputs. The result of every node is rounded to the
    dtype that the node's output has in the model. Two tensors count as equal if ||candidate - reference||₂ /
    ||reference||₂ is at most ``limit``. The default limit depends on the candidate's precision, and a limit of 0
    requires bitwise equality. Takes O(log n) runs. The search cuts the graph in two, and compares the tensors that
    cross the cut. Only the tensors of one cut are in memory at a time. With ``scan``, also compares every tensor before
    the first difference. The other arguments set the fields of ``accel.Source``.

    Raises ``UnsupportedHere`` if the ONNX file of an engine or an OpenVINO model is unknown, gone or changed. Raises
    ``UsageError`` if the inputs or outputs differ, and ``BadData`` if the data doesn't fit.
    """
    from accel.proof.bisect import Bisection
    from accel.proof.data import rounding_note, widened
    from accel.sources.onnx.weights import read_detached

    notes: list[str] = []
    one, two = shared((reference, candidate), about)
    given = two.open()
    first = _onnx_of(with_declared(one, about).open(), notes)
    second = _onnx_of(given, notes)
    first = widened(first, path_of(data), declared_dims(reference, about))
    names_of = _new_output_names(first.signature, second.signature)
    notes += filter(None, [in_order_note(names_of)])
    if limit is None:
        limit = BISECT_LIMITS[str(second.properties.get("precision", "fp32"))]
    if not limit >= 0:
        raise UsageError(f"{limit} is not a valid limit; give a relative error such as 0.001")
    if samples < 1:
        raise UsageError(f"{samples} samples are too few; give at least 1")
    feeds = _feeds(first, path_of(data), samples, _fixed_sizes(first, second))
    notes += filter(None, [rounding_note(path_of(data), first.signature)])
    renamed = _with_output_names(read_detached(second.path), names_of)
    search = Bisection(read_detached(first.path), renamed, feeds, limit=limit).search(scan=scan)
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


def _new_output_names(first: Signature, second: Signature) -> dict[str, str]:
    """Returns the outputs of ``second`` with other names (see ``new_output_names``). Raises ``UsageError`` if the
    inputs or outputs differ in more than the names of outputs."""
    names: dict[str, str] = {}
    for role, ours, theirs in (("inputs", first.inputs, second.inputs), ("outputs", first.outputs, second.outputs)):
        if role == "outputs":
            names = new_output_names(first, second)
            theirs = tuple(replace(spec, name=names.get(spec.name, spec.name)) for spec in theirs)
        if {s.name for s in ours} != {s.name for s in theirs}:
            raise UsageError(
                f"the two models have different {role}: {', '.join(s.name for s in ours)} and "
                f"{', '.join(s.name for s in theirs)}; give two versions of one model"
            )
        shapes = {spec.name: spec.shape for spec in theirs}
        for spec in ours:
            if len(spec.shape) != len(shapes[spec.name]):
                raise UsageError(
                    f"tensor {spec.name!r} has {len(spec.shape)} dims in one model and {len(shapes[spec.name])} dims "
                    "in the other model; give two versions of one model"
                )
    return names


def _with_output_names(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Returns ``model`` after renaming its outputs. ``names`` maps the old names to the new names."""
    from accel.converters.graph.names import rename_values

    inner = {new: f"{new}_inner" for new in names.values() if new not in names}
    rename_values(model.graph, {**inner, **names})
    return model


def _as_run(given: Artifact, looked_into: Artifact, feeds: Sequence[Mapping[str, np.ndarray]]) -> Difference | None:
    from accel.proof.compare import compare, worst
    from accel.proof.gates import cast_feeds, gate_runtime
    from accel.runtimes.base import open_session

    runtime = gate_runtime(given)
    if given is looked_into or runtime is None:
        return None
    with open_session(looked_into, gate_runtime(looked_into)) as one, open_session(given, runtime) as two:
        found = worst([compare(one.run(cast_feeds(one, f)), two.run(cast_feeds(two, f))) for f in feeds])
    furthest = max(found.values(), key=lambda difference: difference.rel_l2)
    as_run = BISECT_LIMITS["as-run"]
    limit = min(as_run, VERIFY_LIMITS.get(effective_precision(given), as_run))
    return furthest if not furthest.rel_l2 <= limit else None


def _onnx_of(artifact: Artifact, notes: list[str]) -> Artifact:
    if artifact.kind == "onnx":
        return artifact
    if artifact.kind in TO_ONNX:
        notes.append(f"{artifact.path.name} was exported to ONNX to be compared")
        return to_onnx_unjudged(artifact)
    made_from = _last_onnx(artifact)
    if made_from is None:
        raise UnsupportedHere(
            f"{artifact.path} is of kind {artifact.kind}, but bisect compares ONNX files; give the ONNX file that this "
            "model was made from"
        )
    notes.append(f"{artifact.path} is {artifact.kind}: looked into {made_from.path}, from which it was made")
    return made_from


def _last_onnx(artifact: Artifact) -> Artifact | None:
    """Returns the ONNX file that the last stage of ``artifact`` read. Returns None if the last stage read no ONNX file,
    or if the ONNX file is gone or has changed."""
    if not artifact.history:
        return None
    record = artifact.history[-1]
    path = Path(str(record.get("input_path", "")))
    if path.suffix != ".onnx" or not path.is_file():
        return None
    found = Source(path).open()
    return found if found.digest == record["input"] else None


def _fixed_sizes(first: Artifact, second: Artifact) -> dict[str, int]:
    """Returns the sizes of the dims that are dynamic in ``first`` and fixed in ``second``. Raises ``UsageError`` if a
    dim is fixed at another size in both."""
    theirs = {spec.name: spec for spec in second.signature.inputs}
    found: dict[str, int] = {}
    for spec in first.signature.inputs:
        other = theirs[spec.name]
        for own, size in zip(spec.shape, other.shape, strict=True):
            if isinstance(own, str) and isinstance(size, int):
                own = found.setdefault(own, size)
            if isinstance(own, int) and isinstance(size, int) and own != size:
                raise UsageError(
                    f"the two models have different inputs: {spec} and {other}; give two versions of one model"
                )
    return {dim: size for dim, size in found.items() if dim in first.signature.dims}


def _feeds(
    artifact: Artifact, data: Path | None, samples: int, fixed: Mapping[str, int]
) -> list[dict[str, np.ndarray]]:
    from accel.proof.data import Dataset

    if data is not None:
        feeds = list(Dataset.load(data, artifact.signature).batches(_BATCH, samples))
        if not feeds:
            raise BadData(
                f"the data {data} has too few samples for one batch of the model's fixed size; raise "
                f"{option('samples')} or add samples"
            )
        return feeds
    batch = artifact.signature.batch_dim
    most = min(artifact.signature.dims[batch].max, samples, _BATCH) if batch else 0
    sizes = {batch: artifact.signature.dims[batch].down(most)} if batch else {}
    return [artifact.signature.example_inputs(**{**sizes, **fixed})]
