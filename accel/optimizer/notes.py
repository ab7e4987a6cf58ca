"""Writes notes for the user about unexpected decisions and possible improvements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accel.artifact import Artifact
from accel.errors import AccelError
from accel.graph.cost import GraphCost
from accel.graph.read import read_graph
from accel.proof.data import rounding_note
from accel.spelling import option
from accel.tables.precision import PRECISIONS

from .candidate import CandidateResult, Status
from .judge.comparison import Judge
from .request import OptimizeRequest

# A note is written for an int8 candidate with less than this share of its FLOPs in int8.
_MOSTLY = 0.5
# A warning that the source was taken names at most this many ways to get another result.
_HELPS = 2


def notes_on_making(rows: Sequence[CandidateResult], samples: int, asked: int | None) -> list[str]:
    """Returns notes on how the candidates were made. The notes are about missing samples, plugins, int8 models that are
    mostly float, and float layers that were not confirmed on held-out data.
    """
    found = []
    if asked is not None and samples < asked:
        found.append(f"calibrated on {samples} samples, not {asked}: the others are needed to judge")
    found += dict.fromkeys(filter(None, map(_plugin_note, rows)))
    found += dict.fromkeys(note for row in rows for note in row.notes)
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
    cost = _cost(artifact)
    if cost is None or cost.quantized_share >= _MOSTLY:
        return ""
    numbers = {dtype: count for dtype, count in cost.weight_bytes.items() if not dtype.startswith(("int64", "int32"))}
    small = sum(count for dtype, count in numbers.items() if dtype.endswith("int8"))
    share = small / max(sum(numbers.values()), 1)
    return f"{cost.quantized_share:.0%} of the FLOPs of its products and {share:.0%} of its weights' bytes are in int8"


def _cost(artifact: Artifact) -> GraphCost | None:
    """Returns the cost of a model with matrix products, or None if the model has none or can't be read."""
    if artifact.kind not in ("onnx", "openvino"):
        return None
    try:
        cost = read_graph(artifact, None, lambda one: one).cost
    except AccelError:  # a run must not fail because of a note
        return None
    return cost if cost is not None and any(node.product and node.flops for node in cost.nodes) else None


def not_as_asked(
    source: CandidateResult, chosen: CandidateResult, rows: Sequence[CandidateResult], asked: Sequence[str] | None
) -> str:
    """Returns a warning with advice if the source was chosen, perhaps with other session options, although the user
    requested other precisions. ``rows`` are all candidates, with those that were left out."""
    if source.name not in (chosen.name, chosen.base) or not asked or source.precision in asked:
        return ""
    precision = f", in {source.precision}" if source.precision else ""
    own = [row for row in rows if row.precision in asked and row.base != source.name]
    helps = [_larger_drop(own), *_left_out(own)[:1], _more_time(own), _not_faster(own)]
    return "; ".join(
        [
            f"no candidate in {' or '.join(asked)} is right and measurably faster: the source itself was taken"
            + precision,
            *list(filter(None, helps))[:_HELPS],
        ]
    )


def _larger_drop(rows: Sequence[CandidateResult]) -> str:
    """Returns the limit that the most exact of the rejected ``rows`` would pass, or "" if no limit would help."""
    judged = [
        (row.judgement.drop, row.name)
        for row in rows
        if row.over_budget and row.judgement is not None and not row.judgement.problem
    ]
    if not judged or not math.isfinite(min(judged)[0]) or min(judged)[0] >= 1:
        return ""
    drop, name = min(judged)
    # Two digits, rounded up, so that the candidate passes.
    scale = 10.0 ** (math.floor(math.log10(drop)) - 1)
    return f"{name} passes with {option('max_drop', float(f'{math.ceil(drop / scale + 1e-6) * scale:.3g}'))}"


def _not_faster(rows: Sequence[CandidateResult]) -> str:
    """Returns how fast the fastest of the right ``rows`` is, which may be faster at other sizes."""
    right = [row for row in rows if row.status == Status.PASSED and row.measured and row.measured.get("speedup")]
    best = max(right, key=lambda row: float((row.measured or {})["speedup"]), default=None)
    if best is None or best.measured is None:
        return ""
    said = f"{best.name} is right but not faster ({best.measured['speedup']:.2f}x) at the measured sizes"
    cost = _cost(best.artifact) if best.artifact is not None and best.precision.startswith("int8") else None
    if cost is not None and not cost.quantized_share:  # larger sizes can't help a model that computes in float
        return f"{said}, because none of its products are in int8"
    return f"{said}, and may be at larger ones ({option('batch')} or {option('sizes')})"


def _more_time(rows: Sequence[CandidateResult]) -> str:
    """Returns the advice to give more time if time ran out for one of ``rows``."""
    late = next((row.name for row in rows if row.out_of_time), "")
    return f"more {option('budget_seconds')} leave time for {late}" if late else ""


def _left_out(rows: Sequence[CandidateResult]) -> list[str]:
    """Returns the reasons why ``rows`` were left out before anything was tried."""
    left_out = [row.reason for row in rows if row.status == Status.NOT_TRIED and not row.out_of_time]
    return list(dict.fromkeys(filter(None, left_out)))


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
