"""The noise of a measurement: which candidates may be faster although no difference could be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.timing.statistics import MIN_FLOOR, Verdict

from ..candidate import CandidateResult

NO_VERDICT: Verdict = "no measurable difference"


def seems_faster(measured: Mapping[str, Any]) -> bool:
    """Tells whether a quieter machine or more rounds could show that a candidate is faster.

    That is so if there is no measurable difference and the measured speedup is more than the least that can ever count.
    """
    return bool(measured.get("verdict") == NO_VERDICT and (measured.get("speedup") or 0.0) > 1 + MIN_FLOOR)


def outcome_is_open(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether noise decided which of the measured ``rows`` is taken: a row that seems faster may be faster."""
    best = max((row.get("speedup") or 0.0 for row in rows if row.get("verdict") == "faster"), default=0.0)
    return any(seems_faster(row) and row["speedup"] > best for row in rows)


def why_not_faster(measured: Mapping[str, Any]) -> str:
    """Returns the verdict on a row that isn't faster than the source, with the figures if noise may have hidden it."""
    if not seems_faster(measured):
        return str(measured["verdict"])
    interval = measured.get("ci95")
    said = f"{NO_VERDICT}: it seems {measured['speedup']:.2f}x"
    if interval:
        said += f", 95% interval {interval[0]:.2f} to {interval[1]:.2f}"
    floor = measured.get("noise_floor")
    return said if floor is None else f"{said}, noise floor {floor:.1%}"


def noise_notes(rows: Sequence[CandidateResult], chosen: CandidateResult, environment: Mapping[str, Any]) -> list[str]:
    """Returns notes about noise: which ``rows`` it may have hidden, what to do, and the date of cached figures."""
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
            f"noise decided ({floor}): {', '.join(hidden)} may be faster than the chosen candidate; measure again on "
            "a quiet machine, with more --rounds, or with --no-cache"
        )
    if environment.get("cached"):
        notes.append(f"figures from the cache, measured {environment.get('date')}, {floor}; --no-cache measures anew")
    return notes
