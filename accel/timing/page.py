"""A benchmark's report as a file: JSON, Markdown or one HTML page that opens offline, by the ending of its name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.artifact import beside
from accel.bench.columns import session_of, with_values
from accel.errors import MissingExtra, UsageError

ENDINGS = (".json", ".md", ".html")

Body = Mapping[str, Any]


def check_ending(path: Path) -> None:
    """``UsageError`` where ``write`` would not know what to write."""
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path} says no form of report; let -o end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")


def write(path: Path, body: Body) -> None:
    """Write ``body`` (the JSON form of a report or of a sweep) beside ``path`` and rename it.

    ``UsageError`` for an ending that is none of ``ENDINGS``; ``MissingExtra`` for HTML without jinja2.
    """
    check_ending(path)
    if path.suffix == ".json":
        text = json.dumps(body, indent=2, allow_nan=False) + "\n"
    else:
        text = markdown(points_of(body)) if path.suffix == ".md" else html(points_of(body))
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def points_of(body: Body) -> Sequence[Body]:
    """The reports in a body: those of a sweep, or the one that it is."""
    points: Sequence[Body] = body.get("points", [body])
    return points


def markdown(points: Sequence[Body]) -> str:
    """What was measured where, and a table for each shape."""
    lines = ["# accel bench", "", *(f"{line}  " for line in machine_lines(points[0]))]
    for point in points:
        lines += ["", f"## {shape_of(point)}", "", *table_lines(point), "", noise_of(point)]
    return "\n".join([*lines, ""])


def table_lines(point: Body) -> list[str]:
    """The Markdown table of one report."""
    titles, *rows = cells(point)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(_one_cell(cell) for cell in row)} |" for row in rows]


def _one_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def cells(point: Body) -> list[list[str]]:
    """The titles of the columns, then a row a candidate. Columns that nobody has a value for are left out."""
    rows = point["results"]
    shown = with_values(rows)
    return [[column.title for column in shown], *([column.text(row) for column in shown] for row in rows)]


def shape_of(point: Body) -> str:
    """The sizes of the dims, and the session options where all candidates have the same."""
    sizes = ", ".join(f"{dim} {size}" for dim, size in point["sizes"].items()) or "its fixed shape"
    found = {session_of(row) for row in point["results"]}
    return ", ".join([sizes, *(found if len(found) == 1 and all(found) else ())])


def noise_of(point: Body) -> str:
    """Where the noise floor comes from, and what was compared."""
    text = f"Measured noise floor {point['noise_floor']:.1%}, from {point['baseline']} against itself."
    text = " ".join(
        [text, *(f"Warning: {line}{'' if line.endswith('?') else '.'}" for line in point.get("warnings", ()))]
    )
    return f"{text} With several streams speedups are those of the throughput." if point["streams"] > 1 else text


def machine_lines(point: Body) -> list[str]:
    """What the figures belong to."""
    machine = point["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB{gpus}; {machine['system']}",
        f"{versions}; energy: {machine['energy']}",
        f"{machine['date']}, load average {machine['load_average']}, seed {point['seed']}",
    ]


def html(points: Sequence[Body]) -> str:
    """One page: a table and the intervals of the speedups for each shape. Nothing in it is loaded from elsewhere."""
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


WIDTH = 520  # of the plot's axis, in its own units


def bars(point: Body) -> list[dict[str, Any]]:
    """Where the speedup of each candidate and the ends of its interval lie on one logarithmic axis, 0 to ``WIDTH``;
    ``one`` is where the baseline lies."""
    timed = [row for row in point["results"] if row["ci95"]]
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
