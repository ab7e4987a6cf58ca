"""Writes the page ``report.html`` with the results of all candidates. The page loads no external resources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, beside
from accel.converters.to_tensorrt.kernel_table import fusions
from accel.errors import MissingExtra
from accel.timing.columns import with_values

from ..candidate import CandidateResult, Status
from ..measure.timing import PERCENTILES
from ..mixed.trajectory import Trajectory

PAGE = "report.html"

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 16, 44
# The smallest divergence on the logarithmic axis. A smaller divergence, such as 0, is drawn as if it were this value.
_LEAST_DROP = 1e-8
_MOST_ROWS = 2000  # the largest number of rows in a table of kernels, layers or nodes
_MOST_TICKS = 7


def write_page(
    path: Path,
    *,
    title: str,
    artifact: Artifact,
    candidates: Sequence[CandidateResult],
    max_drop: float,
    environment: Mapping[str, Any],
    notes: Sequence[str],
    command: str,
    objective: str,
) -> None:
    """Writes the page to a temporary file and renames it to ``path``. ``artifact`` is the published model. The template
    escapes every name, because names in models and manifests may be hostile. Raises ``MissingExtra`` without jinja2.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "report") from None
    chosen = next(row for row in candidates if row.status == Status.CHOSEN)
    history = artifact.history
    environment_rows = [(name, _plain(value)) for name, value in environment.items() if value not in (None, "", [])]
    page = (
        jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        .from_string((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
        .render(
            title=title,
            file=artifact.path.name,
            chosen=chosen,
            source=candidates[0],
            table=figures(candidates),
            objective=objective,
            max_drop=max_drop,
            pareto=pareto(candidates, max_drop),
            distributions=distributions(candidates),
            stages=[(row.name, proof) for row in candidates if (proof := divergence(row.artifact))],
            sensitivity=sensitivity(candidates, history),
            kernels=_kernels(history),
            chain=_chain(artifact),
            files=dict(artifact.manifest.files) if artifact.manifest else {},
            source_record=_source(artifact),
            environment=environment_rows,
            notes=notes,
            command=command,
            width=_WIDTH,
            height=_HEIGHT,
        )
    )
    with beside(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def figures(candidates: Sequence[CandidateResult]) -> dict[str, Any]:
    """Returns the table with the measured figures.

    ``columns`` lists the columns that have figures. ``rows`` pairs each candidate with the texts of its cells.
    """
    rows = [row.bench_row() for row in candidates]
    columns = [column for column in with_values(rows) if column.right]
    rows_of_texts = [[column.text(row) for column in columns] for row in rows]
    return {"columns": columns, "rows": list(zip(candidates, rows_of_texts, strict=True))}


def pareto(candidates: Sequence[CandidateResult], max_drop: float) -> dict[str, Any] | None:
    """Returns the data of a plot of time against the metric or the divergence, with the ticks and the limit. The plot
    has a point for each candidate that has a time and a metric or divergence. A line joins the Pareto-optimal points.
    Returns None if there are fewer than two points.
    """
    by_metric = any(row.judgement and row.judgement.metric is not None for row in candidates)
    found: list[tuple[CandidateResult, float, float]] = []
    for row in candidates:
        ms = (row.measured or {}).get("median_ms")
        value = _quality(row, by_metric, is_source=row is candidates[0])
        if ms and value is not None and math.isfinite(value):
            found.append((row, ms, value))
    if len(found) < 2:
        return None
    reference = candidates[0].judgement.metric if candidates[0].judgement else None
    limit = max_drop
    if by_metric and reference is not None:
        limit = reference - max_drop * (abs(reference) or 1.0)
    times = Axis([ms for _, ms, _ in found], _LEFT, _WIDTH - _RIGHT, log=True)
    values = [value for _, _, value in found] + ([limit] if limit > 0 or by_metric else [])
    # Better candidates, with a higher metric or a lower divergence, are drawn higher up.
    ends = (_HEIGHT - _BOTTOM, _TOP) if by_metric else (_TOP, _HEIGHT - _BOTTOM)
    quality = Axis(values, *ends, log=not by_metric)
    best = [
        (ms, value)
        for _, ms, value in found
        if not any(
            (m <= ms and (v >= value if by_metric else v <= value)) and (m, v) != (ms, value) for _, m, v in found
        )
    ]
    points = [
        {
            "name": row.name,
            "status": row.status,
            "ms": ms,
            "value": value,
            "x": times.at(ms),
            "y": quality.at(value),
        }
        for row, ms, value in found
    ]
    _place_names(points)
    return {
        "points": points,
        "frontier": " ".join(f"{times.at(ms):.1f},{quality.at(v):.1f}" for ms, v in sorted(best)),
        "x_ticks": times.ticks(),
        "y_ticks": quality.ticks(),
        "label": "metric" if by_metric else "1 - concordance (divergence)",
        "limit": quality.at(limit) if limit > 0 or by_metric else None,
    }


def _place_names(points: list[dict[str, Any]]) -> None:
    """Sets ``label_y``, the vertical position of each point's name, so that the names overlap as little as possible.

    A letter is about 6 units wide. A name is written to the right of its point, or to the left if the point is near the
    plot's right edge.
    """
    taken: list[tuple[float, float, float]] = []
    for point in points:
        start = point["x"] + 8 if point["x"] < _WIDTH * 0.7 else point["x"] - 8 - 6 * len(point["name"])
        end = start + 6 * len(point["name"])
        tries = [point["y"] + by for by in (-7, 15, -19, 27, -31, 39)]
        free = (y for y in tries if not any(abs(y - at) < 11 and start < e and s < end for s, e, at in taken))
        point["label_y"] = round(next(free, tries[0]), 1)
        taken.append((start, end, point["label_y"]))


def _quality(row: CandidateResult, by_metric: bool, *, is_source: bool) -> float | None:
    if row.judgement is None:
        return _LEAST_DROP if is_source and not by_metric else None
    if by_metric:
        return row.judgement.metric
    return max(row.judgement.drop, _LEAST_DROP)


class Axis:
    """A linear or logarithmic axis from ``start`` to ``end``, with a margin before the smallest and after the largest
    value."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        self._log = log
        scaled = [self._scale(v) for v in values]
        low, high = min(scaled), max(scaled)
        room = 0.08 * (high - low) or 0.08 * abs(high) or 0.1
        self._low, self._high = low - room, high + room
        self._start, self._end = start, end

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-30)) if self._log else value

    def at(self, value: float) -> float:
        """Returns the coordinate of ``value``."""
        share = (self._scale(value) - self._low) / (self._high - self._low)
        return round(self._start + min(1.0, max(0.0, share)) * (self._end - self._start), 1)

    def ticks(self) -> list[dict[str, Any]]:
        """Returns the ticks of the axis. Each tick is a round number with its coordinate.

        A linear axis has evenly spaced ticks. A logarithmic axis has ticks at 1, 2 and 5 times powers of ten. If the
        range is long, a logarithmic axis has ticks only at powers of ten. If the range is short, a logarithmic axis has
        evenly spaced ticks.
        """
        values = self._decades() if self._log else _round_steps(self._low, self._high)
        return [{"at": self.at(value), "text": f"{value:.10g}"} for value in values]

    def _decades(self) -> list[float]:
        first, last = math.floor(self._low), math.ceil(self._high)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [f * 10.0**power for power in range(first, last + 1) for f in factors]
            found = [value for value in found if self._low <= math.log10(value) <= self._high]
            if len(found) <= _MOST_TICKS:
                break
        if len(found) > _MOST_TICKS:
            found = found[:: -(-len(found) // _MOST_TICKS)]
        return found if len(found) > 2 else _round_steps(10**self._low, 10**self._high)


def _round_steps(low: float, high: float) -> list[float]:
    """Returns at most ``_MOST_TICKS`` ticks from ``low`` to ``high``. The ticks are the multiples of a step, which is
    1, 2 or 5 times a power of ten."""
    # The step between two ticks is 1 to 20 times ``size``. The number of ticks is the number of steps plus one.
    size = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    step = next(f * size for f in (1, 2, 5, 10, 20) if (high - low) / (f * size) <= _MOST_TICKS - 1)
    return [
        round(i * step, 12 - math.floor(math.log10(step)))
        for i in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def distributions(candidates: Sequence[CandidateResult]) -> dict[str, Any] | None:
    """Returns a box plot of each candidate's times. Each plot has a line from the 1st to the 99th percentile, a box
    from the 25th to the 75th percentile, and a mark at the median. Returns None if there are no times."""
    rows = [(row, m["percentiles_ms"]) for row in candidates if (m := row.measured) and m.get("percentiles_ms")]
    if not rows:
        return None
    axis = Axis([ms for _, values in rows for ms in values], 220, _WIDTH - _RIGHT, log=True)
    strips = []
    for row, values in rows:
        by = dict(zip(PERCENTILES, values, strict=True))
        marks = {f"p{p}": axis.at(by[p]) for p in (1, 25, 50, 75, 99)}
        words = ", ".join(f"{p}%: {by[p]:.3g} ms" for p in PERCENTILES)
        strips.append({"name": row.name, "status": row.status, "words": words, **marks})
    return {"strips": strips, "ticks": axis.ticks(), "height": 30 * len(strips) + 40}


def divergence(artifact: Artifact | None) -> list[dict[str, Any]]:
    """For each stage that made ``artifact``, returns the comparison with the largest error, and the limit of the
    stage's gate.

    ``share`` is the position of the error on a logarithmic scale from 1e-8 to the limit, in percent.
    """
    found = []
    for proof in artifact.proof() if artifact is not None else ():
        worst = proof["worst"]
        row = {"stage": proof["stage"], "summary": proof["summary"], "passed": proof["passed"], "share": None}
        if worst is not None:
            value, limit = max(float(worst["value"]), 1e-8), max(float(worst["limit"]), 1e-8)
            decades = math.log10(limit / 1e-8) or 1.0
            row["share"] = round(100 * min(1.0, math.log10(value / 1e-8) / decades), 1)
            row |= {"value": worst["value"], "limit": worst["limit"], "case": worst["case"], "output": worst["output"]}
        found.append(row)
    return found


def sensitivity(candidates: Sequence[CandidateResult], history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tables that show how sensitive the layers are to quantization. Each candidate that was found by a search
    has a table with the error of every layer and a table with the tried assignments. Further tables list the nodes that
    the stages in ``history`` kept in float32, with the reason."""
    tables = []
    for row in candidates:
        if row.trajectory is not None and not row.base:  # rows with other session options repeat a trajectory
            tables += _searched(row.name, row.trajectory)
    for record in history:
        if kept := record["notes"].get("kept_fp32"):
            columns = list(dict.fromkeys(name for node in kept for name in node))
            rows = [[_plain(node.get(name, "")) for name in columns] for node in kept[:_MOST_ROWS]]
            title = f"Kept in float32 ({record['name']})"
            text = f"{len(kept)} node{'' if len(kept) == 1 else 's'}."
            tables.append({"title": title, "text": text, "columns": columns, "rows": rows})
    return tables


def _searched(name: str, found: Trajectory) -> list[dict[str, Any]]:
    seen = "confirmed" if found.confirmed else "not confirmed"
    text = f"{len(found.kept)} of {len(found.layers)} layers stay {found.base}, {seen} on held-out samples"
    text += f": {found.not_confirmed}." if found.not_confirmed else "."
    if found.in_fp32:
        text += f" Of these {len(found.in_fp32)} need fp32."
    total = sum(x.work for x in found.layers) or 1.0
    layers = [
        [x.node, x.op, _plain(x.error), found.precision_of(x.node), f"{x.work / total:.1%}"]
        for x in found.layers[:_MOST_ROWS]
    ]
    tries = [[str(len(x.kept)), _plain(x.drop), "yes" if x.within else "no", x.judged_on] for x in found.tries]
    return [
        {
            "title": f"Sensitivity ({name})",
            "text": text,
            "columns": ["layer", "operator", "error in int8 alone", "computed in", "share of the work"],
            "rows": layers,
        },
        {
            "title": f"What was tried ({name})",
            "text": "",
            "columns": [f"layers in {found.base}", "drop", "within the budget", "judged on"],
            "rows": tries,
        },
    ]


def _kernels(history: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    rows = list(history[-1]["notes"].get("kernels", ())) if history else []
    if not rows:
        return None
    counts = {name: len(found) for name, found in fusions(rows).items()}
    return {"rows": rows[:_MOST_ROWS], "count": len(rows), "counts": counts}


def _chain(artifact: Artifact) -> list[dict[str, Any]]:
    return [
        {
            "stage": record["name"],
            "seconds": record["seconds"],
            "input": str(record["input"])[:12],
            "output": str(record["output"][0])[:12],
            "options": ", ".join(
                f"{k}={_plain(v)}" for k, v in record["options"].items() if v not in (None, [], {}, "")
            ),
            "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        }
        for record in artifact.history
    ]


def _source(artifact: Artifact) -> dict[str, Any]:
    source = artifact.source
    files = [(str(f["path"]), str(f["sha256"])[:12]) for f in source.get("files", ())]
    return {"spec": str(source.get("spec", artifact.path.name)), "files": files}


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(value)
