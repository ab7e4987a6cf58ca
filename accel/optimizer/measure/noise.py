"""Where the noise of a measurement decided: what may well be faster and could not be told from the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel.bench.statistics import MIN_FLOOR

if TYPE_CHECKING:
    from accel.optimizer.candidate import CandidateResult

NO_VERDICT = "no measurable difference"


def seems_faster(measured: Mapping[str, Any]) -> bool:
    """Whether a quieter machine or more rounds could make it ``faster``: it has no verdict, and on the face of it would
    be by more than the least difference that can ever count."""
    return bool(measured.get("verdict") == NO_VERDICT and (measured.get("speedup") or 0.0) > 1 + MIN_FLOOR)


def outcome_is_open(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether noise decided which of the measured ``rows`` is taken: one that seems faster would be the fastest."""
    best = max((row.get("speedup") or 0.0 for row in rows if row.get("verdict") == "faster"), default=0.0)
    return any(seems_faster(row) and row["speedup"] > best for row in rows)


def why_not_faster(measured: Mapping[str, Any]) -> str:
    """The verdict on a row that isn't faster than the source; where noise hid it, what it seemed and how noisy."""
    if not seems_faster(measured):
        return str(measured["verdict"])
    interval = measured.get("ci95")
    said = f"{NO_VERDICT}: it seems {measured['speedup']:.2f}x"
    if interval:
        said += f", 95% interval {interval[0]:.2f} to {interval[1]:.2f}"
    floor = measured.get("noise_floor")
    return said if floor is None else f"{said}, noise floor {floor:.1%}"


def noise_notes(rows: Sequence[CandidateResult], chosen: CandidateResult, environment: Mapping[str, Any]) -> list[str]:
    """What a person should know of the noise: which ``rows`` it cost, what to do, and how old figures are that came
    from the cache."""
    notes = []
    taken = (chosen.measured or {}).get("median_ms")
    hidden = [
        row.name
        for row in rows
        if row.hidden_by_noise and row is not chosen and (taken is None or (row.measured or {})["median_ms"] < taken)
    ]
    floor = f"noise floor {environment.get('noise_floor') or 0.0:.1%}"
    if hidden:
        notes.append(
            f"noise decided ({floor}): {', '.join(hidden)} may be faster than what was taken; measure again on a quiet "
            "machine, with more --rounds, or with --no-cache"
        )
    if environment.get("cached"):
        notes.append(f"figures from the cache, measured {environment.get('date')}, {floor}; --no-cache measures anew")
    return notes
