"""Holds the results of a benchmark and returns them as rows, JSON or a table."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel.spelling import option

from . import page
from .columns import as_text, fitting, with_values
from .repeats import SPOILED
from .statistics import NOISY_FLOOR, TOO_NOISY_FLOOR, Ratio, Verdict
from .witnesses import ONE_CORE, Statistic

# If the outputs of two models have a cosine similarity below this value, the models have different weights. A badly
# quantized model stays above this value when its outputs are compared with the outputs of its source model.
_ANOTHER_MODEL = 0.5
# A baseline this many times as slow as itself with fewer threads has threads that wait for one another.
_WAITING = 2.0

# What decides beside other work.
_WITNESSES: Mapping[str, str] = {
    "fast runs": "the speedups compare the fastest runs of each model, as the other times depend on chance",
    "cpu time": "the speedups compare the CPU time of the runs, which is about their time on a quiet machine, as each "
    "model keeps one core busy",
}


def disturbed(statistic: str | None, lost: float | None) -> str:
    """Returns a sentence that says what decides the verdicts beside other work. ``lost`` is the share of the cores that
    other work takes. Returns "" if the medians decide."""
    if statistic is None or statistic not in _WITNESSES:
        return ""
    share = f", and takes {lost:.0%} of the cores' time" if (lost or 0.0) > SPOILED else ""
    return f"other work slows this machine down{share}: {_WITNESSES[statistic]}"


if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console, ConsoleOptions
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one candidate. Times are in ms per run, over all iterations. If the candidate was not timed, the
    times per run are None.

    ``error`` is the reason why the candidate was not timed, or None. ``speedup`` is the baseline's time divided by the
    candidate's time, by the report's ``statistic``, and ``ci95`` is its 95% interval. ``max_abs_diff``,
    ``max_rel_diff`` and ``cosine`` compare the candidate's outputs with the outputs of the baseline. ``max_rel_diff``
    is ||difference||₂ / ||reference||₂ of the worst output, and ``cosine`` is the cosine similarity of the worst
    sample. ``round_medians_ms`` and ``round_cpu_ms`` hold the median time and the CPU time of a run in each round.
    ``load_ms`` is the time to open the session. ``first_run_ms`` is the time of the first run. ``peak_rss_mb`` is the
    peak memory of the candidate's process in MiB, including the library. ``samples_per_second`` is the number of
    samples in all runs divided by the time of all blocks. ``joules_per_run`` is the energy of the CPU packages, or None
    if the machine has no readable counter. ``phases_ms`` holds the times of ``host_to_device``, ``compute`` and
    ``device_to_host`` on a GPU, measured by CUDA events. ``options`` holds the options of the session, including
    threads and streams (concurrent runs). ``cores`` is the number of cores that the runs kept busy, or would have kept
    busy without other work.
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
    round_cpu_ms: tuple[float, ...] = ()
    load_ms: float | None = None
    first_run_ms: float | None = None
    peak_rss_mb: float | None = None
    cores: float | None = None
    samples_per_second: float | None = None
    joules_per_run: float | None = None
    phases_ms: Mapping[str, float] | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class BenchReport:
    """The results of a benchmark, with one row per candidate in the given order.

    ``noise_floor`` is the smallest significant effect, as a fraction. ``twin`` is the speedup between two processes of
    the baseline. The noise floor is computed from ``twin``. ``order`` has a tuple of candidates for each round, in the
    order of their timing. ``streams`` is the largest number of concurrent runs. If ``streams`` is above 1, every
    ``speedup`` compares throughputs. ``statistic`` says what every ``speedup`` compares: the ``median`` of the runs in
    each round, or, because other work disturbed the machine, the ``fast runs`` or the ``cpu time``. ``lost`` is the
    share of the cores' time that other work took from the runs. ``repeated`` is the number of blocks that were timed
    again, because other work spoiled them. ``notes`` are about the data. ``samples`` maps
    each candidate to one array per round, with the nanoseconds of every run. ``samples`` is not part of the JSON.
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
    statistic: Statistic = "median"
    lost: float = 0.0
    repeated: int = 0
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def too_noisy(self) -> bool:
        """Tells whether the machine was too noisy to tell which candidate is faster."""
        return self.noise_floor > TOO_NOISY_FLOOR

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns a warning for each problem that makes the figures less reliable."""
        found = [
            f"{row.name} gives other outputs than {self.baseline} (cosine {row.cosine:.2f}): are they the same model, "
            f"with the same {option('weights')}?"
            for row in self.rows
            if row.cosine is not None and row.cosine < _ANOTHER_MODEL
        ]
        if said := disturbed(self.statistic, self.lost):
            found.append(said)
        found += self._waiting()
        if self.noise_floor >= NOISY_FLOOR:
            found.append(
                f"the machine is noisy: differences under {self.noise_floor:.1%} can't be seen; end what else is "
                f"running, or give more {option('rounds')} and {option('budget_seconds')}{self._with_one_thread()}"
            )
        return tuple(found)

    def _with_one_thread(self) -> str:
        """Returns advice for a machine with other work, if several threads wait for one another."""
        several = any((row.cores or 0.0) > 1 + ONE_CORE for row in self.rows)
        if self.lost <= SPOILED or self.statistic == "cpu time" or self.streams > 1 or not several:
            return ""
        return f"; or compare with {option('threads', 1)}, as then no thread waits for another, and CPU time can decide"

    def _waiting(self) -> list[str]:
        """Returns a warning if the baseline is much slower than itself with fewer threads. Threads that wait for a core
        that other work uses make a run up to a hundred times as long, so every speedup would be too large."""
        medians = {row.name: row.median_ms for row in self.rows if row.median_ms}
        base = medians.get(self.baseline)
        fewer = {name: median for name, median in medians.items() if name.startswith(f"{self.baseline}, ")}
        name = min(fewer, key=fewer.__getitem__, default="")
        if not base or not name or base < _WAITING * fewer[name]:
            return []
        return [
            f"{self.baseline} is {base / fewer[name]:.1f} times as slow as {name}, because its threads wait for one "
            f"another: compare with {name}, or measure on a quiet machine"
        ]

    def row(self, name: str) -> Row:
        """Returns the row of a candidate. Raises ``KeyError`` if no candidate has this name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def table(self) -> str:
        """Returns the table of all candidates as text of at most 100 columns."""
        return as_text(AsWideAsFits(self))

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{row.name} too noisy" if row.verdict == "too noisy" else f"{row.name} {row.speedup:.3g}x"
            for row in self.rows
            if row.speedup is not None
        )
        noisy = f", too noisy to tell (noise floor {self.noise_floor:.0%})" if self.too_noisy else ""
        return f"<accel benchmark against {self.baseline}: {rows or 'nothing was timed'}{noisy}>"

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        return f"<pre>{html.escape(self.table())}</pre>"

    def write(self, path: Path) -> None:
        """Write the report as JSON, Markdown or HTML. The suffix of ``path`` decides the format."""
        page.write(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, with None for numbers that aren't finite."""
        twin = self.twin and {"ratio": self.twin.value, "ci95": [self.twin.low, self.twin.high]}
        body = {
            "results": [asdict(row) for row in self.rows],
            "baseline": self.baseline,
            "noise_floor": self.noise_floor,
            "baseline_against_itself": twin,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "sizes": dict(self.sizes),
            "environment": dict(self.environment),
            "seed": self.seed,
            "block_seconds": self.block_seconds,
            "order": self.order,
            "streams": self.streams,
            "statistic": self.statistic,
            "lost": self.lost,
            "repeated": self.repeated,
        }
        return _plain(body)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The reports of the same candidates at several shapes."""

    reports: tuple[BenchReport, ...]

    def write(self, path: Path) -> None:
        """Write all reports to one file as JSON, Markdown or HTML. The suffix of ``path`` decides the format."""
        page.write(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {"points": [report.to_json() for report in self.reports]}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        # Six significant digits are more precise than the clock, and keep a committed JSON file readable.
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


_COLORS = {"faster": "green", "slower": "red", "no measurable difference": "yellow", "too noisy": "yellow"}


def table(report: BenchReport, width: int | None = None) -> Table:
    """Returns the report as a table for a terminal of ``width`` characters (None: any width).

    The caption names the columns that don't fit.
    """
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    point = report.to_json()
    rows = point["results"]
    columns = with_values(rows)
    shown = columns if width is None else fitting(rows, columns, width)
    caption = page.noise_of(point)
    if left_out := [column.title for column in columns if column not in shown]:
        caption += f" Left out: {', '.join(left_out)}; --wide, --json and -o report.html have all."
    made = Table(
        title=escape(f"{page.shape_of(point)}, {report.environment.get('cpu', '')}"),
        caption=escape(caption),
        title_justify="left",
        caption_justify="left",
    )
    for column in shown:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        # Text columns share the width that remains beside the numeric columns.
        least = None if width is None or column.readable else column.least_width(rows)
        made.add_column(column.title, justify=justify, no_wrap=column.whole, overflow="fold", width=least)
    for row in rows:
        color = "red" if row["error"] is not None else _COLORS.get(row["verdict"], "")
        made.add_row(*(Text(column.text(row), style=color if column.title == "verdict" else "") for column in shown))
    return made


@dataclass(frozen=True)
class AsWideAsFits:
    """Prints ``table(report)``, fitted to the terminal's width."""

    report: BenchReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield table(self.report, options.max_width)
