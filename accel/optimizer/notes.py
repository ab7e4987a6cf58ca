"""Writes notes for the user about unexpected decisions and possible improvements."""

from __future__ import annotations

from collections.abc import Sequence

from accel.artifact import Artifact
from accel.errors import AccelError
from accel.graph.read import read_graph
from accel.proof.data import rounding_note
from accel.spelling import option
from accel.tables.precision import PRECISIONS

from .candidate import CandidateResult
from .judge.comparison import Judge
from .request import OptimizeRequest

# A note is written for an int8 candidate with less than this share of its FLOPs in int8.
_MOSTLY = 0.5


def notes_on_making(rows: Sequence[CandidateResult], samples: int, asked: int | None) -> list[str]:
    """Returns notes on how the candidates were made. The notes are about missing samples, plugins, int8 models that are
    mostly float, and float layers that were not confirmed on held-out data.
    """
    found = []
    if asked is not None and samples < asked:
        found.append(f"calibrated on {samples} samples, not {asked}: the others are needed to judge")
    found += dict.fromkeys(filter(None, map(_plugin_note, rows)))
    for row in rows:
        if row.precision.startswith("int8") and row.artifact is not None and (said := partly_quantized(row.artifact)):
            found.append(f"{row.name}: {said}")
    for reason in dict.fromkeys(row.trajectory.not_confirmed for row in rows if row.trajectory is not None):
        found += [f"mixed: the layers left float were not confirmed on a held-out half: {reason}"] if reason else []
    return found


def data_notes(request: OptimizeRequest, src: Artifact) -> list[str]:
    """Returns a note if numbers of the user's data are rounded for the model."""
    notes = (rounding_note(data, src.signature) for data in (request.data, request.eval_data))
    return list(dict.fromkeys(filter(None, notes)))


def partly_quantized(artifact: Artifact) -> str:
    """Returns a text with the shares of a model's FLOPs and weights in int8. Returns "" if most FLOPs of the matrix
    products are in int8.

    A model with few matrix products in int8 may still be smaller or faster, for example if its embedding is in int8.
    """
    if artifact.kind not in ("onnx", "openvino"):
        return ""
    try:
        cost = read_graph(artifact, None, lambda one: one).cost
    except AccelError:  # a run must not fail because of a note
        return ""
    if cost is None or cost.quantized_share >= _MOSTLY or not any(node.product and node.flops for node in cost.nodes):
        return ""
    numbers = {dtype: count for dtype, count in cost.weight_bytes.items() if not dtype.startswith(("int64", "int32"))}
    small = sum(count for dtype, count in numbers.items() if dtype.endswith("int8"))
    share = small / max(sum(numbers.values()), 1)
    return f"{cost.quantized_share:.0%} of the FLOPs of its products and {share:.0%} of its weights' bytes are in int8"


def not_as_asked(source: CandidateResult, chosen: CandidateResult, asked: Sequence[str] | None) -> str:
    """Returns a warning if the source was chosen although the user requested other precisions."""
    if chosen is not source or not asked or source.precision in asked:
        return ""
    return (
        f"no candidate in {' or '.join(asked)} is right and measurably faster: the source itself was taken"
        f"{f', in {source.precision}' if source.precision else ''}; the table says why"
    )


def seen_note(rows: Sequence[CandidateResult], judge: Judge) -> str:
    """Returns a warning if a quantized candidate was judged on its own calibration samples."""
    judged = [row for row in rows if row.judgement is not None and row.precision in PRECISIONS]
    calibrated = any(PRECISIONS[row.precision].needs_data for row in judged)
    if not judge.saw_all or not calibrated:
        return ""
    return (
        f"quantized candidates are judged on the samples that calibrated them, because {judge.data} has no others: "
        f"their drop says little; give more samples, or others with {option('eval_data')}"
    )


def _plugin_note(row: CandidateResult) -> str:
    """Returns a note that lists the accel operators that the engine doesn't run as plugins."""
    from accel.converters.to_tensorrt.plugins import bodies_note

    last = row.artifact.history[-1] if row.artifact is not None and row.artifact.history else {}
    note = bodies_note(last.get("notes", {}).get("plugins", ()))
    return f"{row.name}: {note}" if note else ""
