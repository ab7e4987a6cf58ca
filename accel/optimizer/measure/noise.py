"""Finds the candidates that may be faster, but whose speedup is hidden by measurement noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.spelling import option
from accel.timing.report import disturbed
from accel.timing.statistics import MIN_FLOOR, TOO_NOISY_FLOOR, Verdict

from ..candidate import CandidateResult

_UNDECIDED: tuple[Verdict, ...] = ("no measurable difference", "too noisy")


def seems_faster(measured: Mapping[str, Any]) -> bool:
    """Tells whether a quieter machine or more rounds could show that a candidate is faster.

    Returns True if the candidate's verdict is undecided, and its measured speedup is above 1 + ``MIN_FLOOR``. A noise
    floor is never below ``MIN_FLOOR``.
    """
    return bool(measured.get("verdict") in _UNDECIDED and (measured.get("speedup") or 0.0) > 1 + MIN_FLOOR)


def outcome_is_open(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether the choice among the measured ``rows`` depends on noise. The choice depends on noise if a row that
    only seems faster (``seems_faster``) has a higher speedup than every row that is measurably faster."""
    best = max((row.get("speedup") or 0.0 for row in rows if row.get("verdict") == "faster"), default=0.0)
    return any(seems_faster(row) and row["speedup"] > best for row in rows)


def why_not_faster(measured: Mapping[str, Any]) -> str:
    """Returns the verdict on a row that isn't measurably faster than the source. Adds the measured figures if noise may
    have hidden a speedup."""
    if not seems_faster(measured):
        return str(measured["verdict"])
    floor, interval, said = measured.get("noise_floor"), measured.get("ci95"), str(measured["verdict"])
    if said != "too noisy":
        said += f": it seems {measured['speedup']:.2f}x"
        if interval:
            said += f", 95% interval {interval[0]:.2f} to {interval[1]:.2f}"
    return said if floor is None else f"{said}, noise floor {floor:.1%}"


def noise_notes(rows: Sequence[CandidateResult], chosen: CandidateResult, environment: Mapping[str, Any]) -> list[str]:
    """Returns notes with advice about the ``rows`` whose speedup may be hidden by noise. If the figures come from the
    cache, a further note gives the date of the measurement."""
    notes = []
    taken = (chosen.measured or {}).get("speedup")
    hidden = [
        row.name
        for row in rows
        if row.hidden_by_noise and row is not chosen and (taken is None or (row.measured or {})["speedup"] > taken)
    ]
    floor = f"noise floor {environment.get('noise_floor') or 0.0:.1%}"
    if (environment.get("noise_floor") or 0.0) > TOO_NOISY_FLOOR:
        notes.append(
            f"too noisy to tell which candidate is faster ({floor}): end what else is running, or give more "
            f"{option('rounds')}"
        )
    if hidden:
        notes.append(
            f"noise decided ({floor}): {', '.join(hidden)} may be faster than the chosen candidate; measure again on "
            f"a quiet machine, with more {option('rounds')}, or with {option('use_cache', False)}"
        )
    if said := disturbed(environment.get("statistic"), environment.get("lost")):
        notes.append(said)
    if environment.get("cached"):
        anew = f"{option('use_cache', False)} measures again"
        notes.append(f"figures from the cache, measured {environment.get('date')}, {floor}; {anew}")
    return notes
