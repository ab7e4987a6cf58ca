"""Chooses a candidate from the measured rows."""

from __future__ import annotations

from collections.abc import Sequence

from accel.errors import NothingPassed, UnsupportedHere
from accel.spelling import option, options
from accel.tables.precision import PRECISIONS

from .candidate import CandidateResult
from .measure.noise import seems_faster, why_not_faster


def fastest(source: CandidateResult, rows: Sequence[CandidateResult]) -> CandidateResult:
    """Returns the fastest passed candidate that is measurably faster than the source, or the source if no candidate is
    faster. Writes the reason into the row of each passed candidate that isn't chosen.

    Rows are ranked by their speedups, which other work disturbs less than the times in ``median_ms``.
    """
    best = source
    for row in rows:
        if not row.passed or row.measured is None:
            continue
        if not row.is_faster:
            row.reason = f"not measurably faster than the source ({why_not_faster(row.measured)})"
            continue
        if best is source or row.measured["speedup"] > (best.measured or {})["speedup"]:
            best = row
    for row in rows:
        if row.passed and row is not best and not row.reason:
            row.reason = f"slower than {best.name}"
        if row.passed and row.measured is not None and seems_faster(row.measured):
            row.hidden_by_noise = best is source or row.measured["speedup"] > (best.measured or {})["speedup"]
    return best


def fused(source: CandidateResult, rows: list[CandidateResult], notes: list[str]) -> CandidateResult:
    """Returns the fastest passed candidate, or the source if no candidate passed. The function is used if the user
    requests fusion. In this case, even a candidate that is slower than the source is chosen."""
    passed = [row for row in rows if row.passed and row.measured is not None]
    best = max(passed, key=lambda row: (row.measured or {})["speedup"], default=source)
    if best is source:
        notes.append("no fused candidate is right: the source itself was taken")
    else:
        best.reason = f"requested with {option('kernels', True)}"
        notes.append(
            f"the fused candidate is not measurably faster than the source here; {option('kernels', True)} requests it"
        )
    return best


def likeliest(rows: list[CandidateResult]) -> CandidateResult:
    """Returns the passed candidate whose precision is usually the fastest, for a target that can't run on this machine.
    Raises ``UnsupportedHere`` if no candidate supports the request, and ``NothingPassed`` if no candidate passed.
    """
    passed = [row for row in rows if row.passed]
    if rows and all(row.unsupported for row in rows):
        raise UnsupportedHere(rows[0].reason)
    if not passed:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        late = f"give more {option('budget_seconds')}, " if any(row.out_of_time for row in rows) else ""
        # A larger ``max_drop`` can't help a candidate that failed a gate, because gates have limits of their own.
        over = (
            f"raise {option('max_drop')} or "
            if any(row.over_budget and row.judgement is not None for row in rows)
            else ""
        )
        what = "is within the budget" if over else "could be made"
        other = options("precision", "target")
        raise NothingPassed(f"no candidate {what} ({reasons}); {late}{over}choose another {other}")
    best = min(passed, key=lambda row: PRECISIONS[row.precision].rank_unmeasured)
    best.reason = "not measured here; the first of fp16, int8, fp8, bf16, fp32 that is within the budget"
    for row in passed:
        if row is not best:
            row.reason = "not measured here; built and within the budget"
    return best
