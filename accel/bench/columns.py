"""What a measurement has to say of a candidate, column by column: one table behind the terminal, Markdown and HTML of
``accel bench``, the table of ``accel optimize`` and its report.

A row is the JSON form of ``accel.bench.report.Row``; those of ``accel optimize`` also have ``drop``, ``metric`` and
``megabytes``. What a row doesn't have is None or missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from accel.runtimes.base import SessionOptions

BenchRow = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """``text``: of a row, "" where it has nothing to say. ``whole``: not to be broken into lines."""

    title: str
    text: Callable[[BenchRow], str]
    right: bool = True
    whole: bool = False


def number(value: float | None) -> str:
    """Two decimals, three below 1, fewer from 100 on; never as a power of ten."""
    if value is None:
        return ""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def session_of(row: BenchRow) -> str:
    """``2 threads, no spinning``: its threads, and of the other options those that aren't the default."""
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
    ends = row.get("ci95")
    return f"{ends[0]:.2f} to {ends[1]:.2f}" if ends and row.get("verdict") != "baseline" else ""


def _speedup(row: BenchRow) -> str:
    return "" if row.get("speedup") is None else f"{row['speedup']:.2f}x"


def _phases(row: BenchRow) -> str:
    phases = row.get("phases_ms")
    names = ("host_to_device", "compute", "device_to_host")
    return " / ".join(number(phases[name]) for name in names) if phases else ""


COLUMNS = (
    Column(title="candidate", text=lambda row: str(row["name"]), right=False),
    Column(title="session", text=session_of, right=False),
    Column(title="median ms", text=_figure("median_ms"), whole=True),
    Column(title="p90 ms", text=_figure("p90_ms"), whole=True),
    Column(title="p99 ms", text=_figure("p99_ms"), whole=True),
    Column(title="samples/s", text=_figure("samples_per_second"), whole=True),
    Column(title="speedup", text=_speedup, whole=True),
    Column(title="95% interval", text=_interval, whole=True),
    Column(title="drop", text=_formatted("drop", ".5f"), whole=True),
    Column(title="metric", text=_formatted("metric", ".4f"), whole=True),
    Column(title="MB", text=_formatted("megabytes", ".1f"), whole=True),
    Column(title="verdict", text=lambda row: row.get("error") or row.get("verdict") or "", right=False),
    Column(title="max abs diff", text=_formatted("max_abs_diff", ".2g")),
    Column(title="cosine", text=_formatted("cosine", ".5f")),
    Column(title="load ms", text=_figure("load_ms")),
    Column(title="first run ms", text=_figure("first_run_ms")),
    Column(title="peak MiB", text=_figure("peak_rss_mb")),
    Column(title="J a run", text=_figure("joules_per_run")),
    Column(title="to device / compute / to host ms", text=_phases),
)


def named(*titles: str) -> list[Column]:
    """The columns with these titles, in this order; ``KeyError`` where there is none."""
    by_title = {column.title: column for column in COLUMNS}
    return [by_title[title] for title in titles]


def with_values(rows: Sequence[BenchRow], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Those of ``columns`` in which somebody has something to say; of the sessions only where they differ."""
    found = []
    for column in columns:
        texts = {column.text(row) for row in rows}
        if texts - {""} and (column.title != "session" or len(texts) > 1):
            found.append(column)
    return found
