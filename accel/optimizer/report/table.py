"""The table of all candidates, for terminals and notebooks."""

from __future__ import annotations

from typing import Any, Literal

from accel.timing.columns import named

from ..candidate import Status
from ..result import Optimization


def table(result: Optimization) -> Any:
    """Returns a table of every candidate with its figures, and the notes. The chosen candidate is bold."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(f"{result.artifact.path}: {result.chosen}"), title_justify="left")
    second = "samples/s" if result.objective == "throughput" else "p99 ms"
    columns = named("candidate", "median ms", second, "speedup", "drop", "metric", "MB", "verdict")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        shown.add_column(column.title, justify=justify, no_wrap=column.whole, overflow="fold")
    for one in result.candidates:
        row = one.bench_row()
        texts = [Text(column.text(row) or "-") for column in columns]
        if one.status == Status.CHOSEN:
            texts[-1].stylize("bold", 0, len(one.status))
        shown.add_row(*texts)
    return Group(shown, *map(Text, result.notes))
