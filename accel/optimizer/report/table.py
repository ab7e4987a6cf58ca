"""Makes the table of the candidates, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from accel.timing.columns import named, with_values
from accel.timing.page import PAIRED, differ_from_medians

from ..candidate import CandidateResult, Status
from ..result import Optimization

# A reason with more characters than this number is printed below the table.
_LONGEST_REASON = 60


def table(result: Optimization, *, wide: bool = False) -> Any:
    """Returns a table of the candidates with the most important figures, and the notes. The status of the chosen
    candidate is bold.

    Candidates that were not tried, and long reasons, are printed below the table. With ``wide``, the table has all
    figures and all candidates with their reasons.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(f"{result.artifact.path}: {result.chosen}"), title_justify="left")
    second = "samples/s" if result.objective == "throughput" else "p99 ms"
    columns = named("candidate", "median ms", second, "speedup", "drop", "metric", "MB", "verdict")
    candidates = [one for one in result.candidates if wide or one.status != Status.NOT_TRIED or one.judgement]
    rows = [one.bench_row() for one in candidates]
    if wide:
        columns = with_values(rows)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        shown.add_column(column.title, justify=justify, no_wrap=column.whole, overflow="fold")
    for one, row in zip(candidates, rows, strict=True):
        if not wide and len(one.reason) > _LONGEST_REASON:
            row["verdict"] = str(one.status)
        texts = [Text(column.text(row) or "-") for column in columns]
        if one.status == Status.CHOSEN:
            verdict = next(i for i, column in enumerate(columns) if column.title == "verdict")
            texts[verdict].stylize("bold", 0, len(one.status))
        shown.add_row(*texts)
    below = [] if wide else [*_reasons(candidates), *_not_tried(result.candidates)]
    below += [PAIRED] if _speedups_of_rounds(result) else []
    return Group(shown, *map(Text, (*below, *result.notes)))


def _speedups_of_rounds(result: Optimization) -> bool:
    """Tells whether a speedup in the table needs the sentence ``PAIRED``. Two measurements of one run, before and with
    other session options, have medians of different times."""
    rows = [one.bench_row() | {"verdict": (one.measured or {}).get("verdict")} for one in result.candidates]
    statistics = {(one.measured or {}).get("statistic") for one in result.candidates} - {None}
    return result.objective == "latency" and statistics == {"median"} and differ_from_medians(rows)


def _reasons(candidates: Sequence[CandidateResult]) -> Iterator[str]:
    """Yields the reasons that are too long for the table."""
    return (f"{one.name}: {one.reason}" for one in candidates if len(one.reason) > _LONGEST_REASON)


def _not_tried(candidates: Sequence[CandidateResult]) -> Iterator[str]:
    """Yields each reason why candidates were not tried, with the names of the candidates."""
    names: dict[str, list[str]] = {}
    for one in candidates:
        if one.status == Status.NOT_TRIED and not one.judgement:
            names.setdefault("out of time" if one.out_of_time else one.reason, []).append(one.name)
    return (f"not tried: {'; '.join(found)}: {reason}" for reason, found in names.items())
