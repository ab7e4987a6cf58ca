"""Writes a benchmark's report as JSON, Markdown or one HTML page that opens offline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.artifact import beside
from accel.errors import MissingExtra, UsageError

from .columns import session_of, with_values

ENDINGS = (".json", ".md", ".html")

Body = Mapping[str, Any]

# The sentence below a table whose speedups differ from the ratios of its medians by more than ``_ROUNDING`` (1%).
PAIRED = "Speedups compare runs of the same round, the medians are of all runs."
_ROUNDING = 0.01


def check_ending(path: Path) -> None:
    """Raises ``UsageError`` if the suffix of ``path`` is not in ``ENDINGS``."""
    if path.suffix not in ENDINGS:
        raise UsageError(
            f"a report can't have the suffix of {path}; use the suffix {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        )


def write(path: Path, body: Body) -> None:
    """Writes ``body``, the JSON form of a report or a sweep, to ``path``. Writes to a temporary file first and renames
    this file to ``path``.

    Raises ``UsageError`` if the suffix is not in ``ENDINGS``, and ``MissingExtra`` for HTML if jinja2 is not installed.
    """
    check_ending(path)
    if path.suffix == ".json":
        text = json.dumps(body, indent=2, allow_nan=False) + "\n"
    else:
        text = markdown(points_of(body)) if path.suffix == ".md" else html(points_of(body))
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def points_of(body: Body) -> Sequence[Body]:
    """Returns a sequence of reports for ``body``, which is a sweep or a single report."""
    points: Sequence[Body] = body.get("points", [body])
    return points


def markdown(points: Sequence[Body]) -> str:
    """Returns a Markdown page that describes the machine and has a table for each shape."""
    lines = ["# accel bench", "", *(f"{line}  " for line in machine_lines(points[0]))]
    for point in points:
        lines += ["", f"## {shape_of(point)}", "", *table_lines(point), "", noise_of(point)]
    return "\n".join([*lines, ""])


def table_lines(point: Body) -> list[str]:
    """Returns the lines of one report's Markdown table."""
    titles, *rows = cells(point)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(_one_cell(cell) for cell in row)} |" for row in rows]


def _one_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def cells(point: Body) -> list[list[str]]:
    """Returns the titles of the columns, then a row for each candidate. Leaves out empty columns."""
    rows = point["results"]
    shown = with_values(rows)
    return [[column.title for column in shown], *([column.text(row) for column in shown] for row in rows)]


def shape_of(point: Body) -> str:
    """Returns the sizes of the dims as text. The text includes the session options if all candidates have the same
    options."""
    sizes = ", ".join(f"{dim} {size}" for dim, size in point["sizes"].items()) or "its fixed shape"
    found = {session_of(row) for row in point["results"]}
    return ", ".join([sizes, *(found if len(found) == 1 and all(found) else ())])


def noise_of(point: Body) -> str:
    """Returns the sentences about the noise floor, the warnings, and what the speedups compare."""
    text = f"Measured noise floor {point['noise_floor']:.1%}, from {point['baseline']} against itself."
    text = " ".join(
        [text, *(f"Warning: {line}{'' if line.endswith('?') else '.'}" for line in point.get("warnings", ()))]
    )
    if point["streams"] > 1:
        return f"{text} With several streams, speedups compare throughputs."
    paired = point.get("statistic", "median") == "median" and differ_from_medians(point["results"])
    return f"{text} {PAIRED}" if paired else text


def differ_from_medians(rows: Sequence[Body]) -> bool:
    """Tells whether a speedup isn't the ratio of the baseline's median and the row's median that a table shows."""
    base = next((row["median_ms"] for row in rows if row.get("verdict") == "baseline"), None)
    shown = [row for row in rows if base and row.get("median_ms") and row.get("speedup")]
    return any(abs(math.log(row["speedup"] * row["median_ms"] / base)) > _ROUNDING for row in shown)


def machine_lines(point: Body) -> list[str]:
    """Returns the lines about the machine and the library versions."""
    machine = point["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB{gpus}; {machine['system']}",
        f"{versions}; energy: {machine['energy']}",
        f"{machine['date']}, load average {machine['load_average']}, seed {point['seed']}",
    ]


def html(points: Sequence[Body]) -> str:
    """Returns one HTML page with a table and the intervals of the speedups for each shape. The page loads nothing."""
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "report") from None
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    shown = [
        {"shape": shape_of(p), "noise": noise_of(p), "rows": cells(p)[1:], "bars": bars(p)}
        | {"columns": with_values(p["results"])}
        for p in points
    ]
    return environment.from_string(text).render(machine=machine_lines(points[0]), points=shown)


WIDTH = 520  # the length of the axis in SVG units


def bars(point: Body) -> list[dict[str, Any]]:
    """Returns the positions of each candidate's speedup and interval on a logarithmic axis from 0 to ``WIDTH``. ``one``
    is the position of the baseline, whose speedup is 1. Leaves out the rows with the verdict ``too noisy``.
    """
    timed = [row for row in point["results"] if row["ci95"] and row["verdict"] != "too noisy"]
    ends = [math.log(value) for row in timed for value in (1.0, *row["ci95"]) if value > 0]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    low, high = low - 0.05, high + 0.05

    def place(value: float) -> float:
        return round(WIDTH * (math.log(value) - low) / (high - low), 1)

    return [
        {
            "name": row["name"],
            "value": place(row["speedup"]),
            "low": place(row["ci95"][0]),
            "high": place(row["ci95"][1]),
            "one": place(1.0),
            "text": f"{row['speedup']:.2f}x",
            "verdict": row["verdict"],
        }
        for row in timed
    ]
