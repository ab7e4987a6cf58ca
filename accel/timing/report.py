"""What a benchmark found: rows, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel.bench import page
from accel.bench.columns import fitting, with_values
from accel.bench.statistics import NOISY_FLOOR, Ratio, Verdict

# What is quantized, however badly, is closer to its source than this; other weights aren't.
_ANOTHER_MODEL = 0.5

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console, ConsoleOptions
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate. Times in ms a run, over all iterations; None where it was not timed (``error`` says why).

    ``speedup``: median over the rounds of the baseline's median / the candidate's; ``ci95``: its interval.
    ``max_abs_diff``, ``max_rel_diff`` (||difference||₂ / ||reference||₂ of the worst output) and ``cosine`` (of the
    worst sample): its outputs against the baseline's. ``load_ms``: opening the session. ``first_run_ms``: the first run
    after that. ``peak_rss_mb``: the most memory its process ever held, in MiB, the library's own included.
    ``samples_per_second``: the batch times the runs, over the time that the blocks took. ``joules_per_run``: of the CPU
    packages; None where the machine has no counter that can be read. ``phases_ms``: on a GPU what of a run is
    ``host_to_device``, ``compute`` and ``device_to_host``, by CUDA events. ``options``: of its session, the threads and
    the streams (runs under way at once) it was timed with among them.
    """

    name: str
    runtime: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    median_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    verdict: Verdict | None = None
    max_abs_diff: float | None = None
    max_rel_diff: float | None = None
    cosine: float | None = None
    rounds: int = 0
    iterations: int = 0
    round_medians_ms: tuple[float, ...] = ()
    load_ms: float | None = None
    first_run_ms: float | None = None
    peak_rss_mb: float | None = None
    samples_per_second: float | None = None
    joules_per_run: float | None = None
    phases_ms: Mapping[str, float] | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """``rows`` in the order the candidates were given. ``noise_floor``: the smallest effect that counts, as a fraction;
    ``twin``: the baseline against itself, where that comes from. ``order``: who was timed when, a list a round.
    ``streams``: the most runs of a candidate that were under way at once (of each: its ``options``); above 1 the
    ``speedup`` of every row is that of the throughput.

    ``samples``: nanoseconds of every run, by candidate an array a round; not part of the JSON.
    """

    rows: tuple[Row, ...]
    baseline: str
    noise_floor: float
    twin: Ratio | None
    sizes: Mapping[str, int]
    environment: Mapping[str, Any]
    seed: int
    block_seconds: float
    order: tuple[tuple[str, ...], ...]
    streams: int = 1
    samples: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the figures worth less than they look, a sentence each."""
        found = [
            f"{row.name} gives other outputs than {self.baseline} (cosine {row.cosine:.2f}): are they the same model, "
            "with the same --weights?"
            for row in self.rows
            if row.cosine is not None and row.cosine < _ANOTHER_MODEL
        ]
        if self.noise_floor >= NOISY_FLOOR:
            found.append(
                f"the machine is noisy: differences under {self.noise_floor:.1%} can't be seen; end what else is "
                "running, or give more --rounds and --budget-seconds"
            )
        return tuple(found)

    def row(self, name: str) -> Row:
        """The row of that candidate; ``KeyError`` where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def write(self, path: Path) -> None:
        """The report as a file: JSON, Markdown or HTML, by the ending of ``path``."""
        page.write(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain values only; what is not finite is null."""
        twin = self.twin and {"ratio": self.twin.value, "ci95": [self.twin.low, self.twin.high]}
        body = {
            "results": [asdict(row) for row in self.rows],
            "baseline": self.baseline,
            "noise_floor": self.noise_floor,
            "baseline_against_itself": twin,
            "warnings": list(self.warnings),
            "sizes": dict(self.sizes),
            "environment": dict(self.environment),
            "seed": self.seed,
            "block_seconds": self.block_seconds,
            "order": self.order,
            "streams": self.streams,
        }
        return _plain(body)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The same candidates at several shapes: a report for each."""

    reports: tuple[BenchReport, ...]

    def write(self, path: Path) -> None:
        """All of them as one file: JSON, Markdown or HTML, by the ending of ``path``."""
        page.write(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {"points": [report.to_json() for report in self.reports]}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        # Six digits are more than any clock has, and keep a committed file readable.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


_COLOURS = {"faster": "green", "slower": "red", "no measurable difference": "yellow"}


def table(report: BenchReport, width: int | None = None) -> Table:
    """The report for a terminal: a row a candidate, what was held equal above, the noise floor below; what doesn't fit
    into ``width`` characters is named instead."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    point = report.to_json()
    rows = point["results"]
    columns = with_values(rows)
    shown = columns if width is None else fitting(rows, columns, width)
    caption = page.noise_of(point)
    if left_out := [column.title for column in columns if column not in shown]:
        caption += f" Too wide for this terminal: {', '.join(left_out)}; --json and -o report.html have all."
    made = Table(
        title=escape(f"{page.shape_of(point)}, {report.environment.get('cpu', '')}"),
        caption=escape(caption),
        title_justify="left",
        caption_justify="left",
    )
    for column in shown:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        # Words get what the numbers leave.
        least = None if width is None or column.readable else column.least_width(rows)
        made.add_column(column.title, justify=justify, no_wrap=column.whole, overflow="fold", width=least)
    for row in rows:
        colour = "red" if row["error"] is not None else _COLOURS.get(row["verdict"], "")
        made.add_row(*(Text(column.text(row), style=colour if column.title == "verdict" else "") for column in shown))
    return made


@dataclass(frozen=True)
class AsWideAsFits:
    """``table(report)`` for a terminal whose width is known when it is printed."""

    report: BenchReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield table(self.report, options.max_width)
