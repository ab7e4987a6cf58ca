"""Which candidate is taken: the rules, apart from how anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from accel.errors import NothingPassed, UnsupportedHere
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.noise import seems_faster, why_not_faster
from accel.optimizer.recipes import UNMEASURED_ORDER


def fastest(source: CandidateResult, rows: Sequence[CandidateResult]) -> CandidateResult:
    """The fastest right candidate that is measurably faster than the source, else the source. The others are told why
    not."""
    best = source
    for row in rows:
        if row.status != "passed" or row.measured is None:
            continue
        if row.measured["verdict"] != "faster":
            row.reason = f"not measurably faster than the source ({why_not_faster(row.measured)})"
            continue
        if best is source or row.measured["median_ms"] < (best.measured or {})["median_ms"]:
            best = row
    for row in rows:
        if row.status == "passed" and row is not best and not row.reason:
            row.reason = f"slower than {best.name}"
        if row.status == "passed" and row.measured is not None and seems_faster(row.measured):
            row.hidden_by_noise = best is source or row.measured["median_ms"] < (best.measured or {})["median_ms"]
    return best


def fused(source: CandidateResult, rows: list[CandidateResult], notes: list[str]) -> CandidateResult:
    """The fastest right candidate although it isn't faster than the source: its operators were asked for."""
    passed = [row for row in rows if row.status == "passed" and row.measured is not None]
    best = min(passed, key=lambda row: (row.measured or {})["median_ms"], default=source)
    if best is source:
        notes.append("no fused candidate is right: the source itself was taken")
    else:
        best.reason = "asked for with --kernels"
        notes.append("the fused form is not measurably faster than the source here; it was asked for")
    return best


def likeliest(rows: list[CandidateResult]) -> CandidateResult:
    """Where nothing can be measured: the right candidate whose precision GPUs are known to run fastest.

    Raises ``NothingPassed``, or ``UnsupportedHere`` where every candidate was refused for what was asked.
    """
    passed = [row for row in rows if row.status == "passed"]
    if rows and all(row.unsupported for row in rows):
        raise UnsupportedHere(rows[0].reason)
    if not passed:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        late = "give more --budget-seconds, " if any(row.out_of_time for row in rows) else ""
        # The limit of a gate is the stage's own: only what was judged can be had for a larger budget.
        over = "raise --max-drop or " if any(row.over_budget and row.judgement is not None for row in rows) else ""
        what = "is within the budget" if over else "could be made"
        raise NothingPassed(f"no candidate {what} ({reasons}); {late}{over}choose another --precision or --target")
    best = min(passed, key=lambda row: UNMEASURED_ORDER.index(row.precision))
    best.reason = "not measured here; the first of fp16, int8, fp8, bf16, fp32 that is within the budget"
    for row in passed:
        if row is not best:
            row.reason = "not measured here; built and within the budget"
    return best
