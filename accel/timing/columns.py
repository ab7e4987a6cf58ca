"""Defines the columns of the tables that ``accel bench`` and ``accel optimize`` show.

A row of a table is the JSON form of ``accel.timing.report.Row``. Rows of ``accel optimize`` also have ``drop``,
``metric`` and ``megabytes``. An unknown value is None in the row, or is missing from the row.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from accel.runtimes.base import SessionOptions

BenchRow = Mapping[str, Any]

# The width of a cell's border and padding in characters.
_AROUND = 3


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. ``text`` returns the text of a row's cell, which may be "". If ``whole`` is True, neither
    the cells nor the title are wrapped.

    ``readable`` is the smallest width of a wrapped cell, in characters. If ``readable`` is 0, cells are not wrapped. If
    the terminal is too narrow, the columns with the largest ``spare`` are left out first. A column with a ``spare`` of
    0 is always shown.
    """

    title: str
    text: Callable[[BenchRow], str]
    right: bool = True
    whole: bool = False
    readable: int = 0
    spare: int = 0

    def least_width(self, rows: Sequence[BenchRow]) -> int:
        """Returns the smallest width in characters that keeps numbers on one line and sentences readable."""
        titles = [self.title] if self.whole else self.title.split()
        wide = max(len(self.text(row)) for row in rows)
        return max(*map(len, titles), 0, min(wide, self.readable) if self.readable else wide)


def as_text(table: Any, width: int = 100) -> str:
    """Returns a ``rich`` table as plain text of at most ``width`` columns."""
    from rich.console import Console

    # Notebooks, and terminals with FORCE_COLOR, would otherwise get escape codes.
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def number(value: float | None) -> str:
    """Formats a number with three decimals below 1, two decimals below 100, one decimal below 1000 and no decimals from
    1000. Returns "" for None."""
    if value is None:
        return ""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def session_of(row: BenchRow) -> str:
    """Returns the number of threads and all options that differ from their defaults, such as ``2 threads, no
    spinning``."""
    usual = {option.name: option.default for option in fields(SessionOptions)} | {"threads": None}
    given = (row.get("options") or {}).items()
    return ", ".join(_in_words(name, value) for name, value in given if value != usual.get(name))


def _in_words(name: str, value: Any) -> str:
    text = name.replace("_", " ")
    if name in ("threads", "streams"):
        return f"{value} {text.removesuffix('s') if value == 1 else text}"
    if isinstance(value, bool):
        return text if value else f"no {text}"
    return f"{text} {value}"


def _figure(name: str) -> Callable[[BenchRow], str]:
    return lambda row: number(row.get(name))


def _formatted(name: str, form: str) -> Callable[[BenchRow], str]:
    return lambda row: "" if row.get(name) is None else format(row[name], form)


def _interval(row: BenchRow) -> str:
    if row.get("verdict") == "too noisy":
        return "-"
    ends = row.get("ci95")
    return f"{ends[0]:.2f} to {ends[1]:.2f}" if ends and row.get("verdict") != "baseline" else ""


def _speedup(row: BenchRow) -> str:
    if row.get("verdict") == "too noisy":
        return "-"
    if row.get("too_noisy"):  # in the table of ``accel optimize``, the verdict is the candidate's status
        return "too noisy"
    return "" if row.get("speedup") is None else f"{row['speedup']:.2f}x"


def _phases(row: BenchRow) -> str:
    phases = row.get("phases_ms")
    names = ("host_to_device", "compute", "device_to_host")
    return " / ".join(number(phases[name]) for name in names) if phases else ""


COLUMNS = (
    Column(title="candidate", text=lambda row: str(row["name"]), right=False, readable=24),
    Column(title="session", text=session_of, right=False, readable=12),
    Column(title="median ms", text=_figure("median_ms"), whole=True),
    Column(title="p90 ms", text=_figure("p90_ms"), whole=True, spare=3),
    Column(title="p99 ms", text=_figure("p99_ms"), whole=True, spare=2),
    Column(title="samples/s", text=_figure("samples_per_second"), whole=True, spare=6),
    Column(title="speedup", text=_speedup, whole=True),
    Column(title="95% interval", text=_interval, whole=True),
    Column(title="drop", text=_formatted("drop", ".5f"), whole=True),
    Column(title="metric", text=_formatted("metric", ".4f"), whole=True),
    Column(title="MB", text=_formatted("megabytes", ".1f"), whole=True),
    Column(title="verdict", text=lambda row: row.get("error") or row.get("verdict") or "", right=False, readable=13),
    Column(title="max abs diff", text=_formatted("max_abs_diff", ".2g"), spare=1),
    Column(title="cosine", text=_formatted("cosine", ".5f"), spare=5),
    Column(title="load ms", text=_figure("load_ms"), spare=8),
    Column(title="first run ms", text=_figure("first_run_ms"), spare=9),
    Column(title="peak MiB", text=_figure("peak_rss_mb"), spare=10),
    Column(title="J a run", text=_figure("joules_per_run"), spare=7),
    Column(title="to device / compute / to host ms", text=_phases, spare=4),
)


def named(*titles: str) -> list[Column]:
    """Returns the columns with the given titles, in the given order. Raises ``KeyError`` for an unknown title."""
    by_title = {column.title: column for column in COLUMNS}
    return [by_title[title] for title in titles]


def with_values(rows: Sequence[BenchRow], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Returns the columns that aren't empty. Leaves out the column ``session`` if all candidates have the same session
    options."""
    found = []
    for column in columns:
        texts = {column.text(row) for row in rows}
        if texts - {""} and (column.title != "session" or len(texts) > 1):
            found.append(column)
    return found


def fitting(rows: Sequence[BenchRow], columns: Sequence[Column], width: int) -> list[Column]:
    """Returns the columns that fit into ``width`` characters. Leaves out the columns with the largest ``spare``
    first."""
    kept = list(columns)
    while sum(column.least_width(rows) + _AROUND for column in kept) + 1 > width:
        least = max(kept, key=lambda column: column.spare)
        if not least.spare:
            break
        kept.remove(least)
    return kept
