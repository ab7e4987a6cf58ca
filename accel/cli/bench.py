"""``accel bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import ANY_WIDTH, TABLE_WIDTH, output_options
from .options import read_sizes, source_options, wide_option

if TYPE_CHECKING:
    from accel.sources.source import SourceOptions

    from . import Output


def read_numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Converts a text such as ``1,8,32`` to a tuple of numbers."""
    parts = [part.strip() for part in (text or "").split(",")] if text is not None else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"can't read {text!r}; write numbers from 1 up, e.g. 1,8,32", param=option)
    return tuple(dict.fromkeys(map(int, parts)))


@click.command("bench")
@click.argument("candidates", nargs=-1, required=True)
@click.option(
    "--against",
    metavar="MODEL",
    help="The model to compare with: a source or an artifact. Default: the first candidate.",
)
@click.option(
    "--also", multiple=True, metavar="RUNTIME", help="Run the PyTorch sources with this runtime as well: torch-compile."
)
@click.option("--sizes", metavar="DIM=N,...", help="Sizes of the dynamic dims: batch=1,sequence=128.")
@click.option("--batch", "batches", callback=read_numbers, metavar="N,...", help="Measure at each of these batches.")
@click.option("--length", "lengths", callback=read_numbers, metavar="N,...", help="Measure at each of these lengths.")
@click.option("--data", type=click.Path(path_type=Path), help=".npz with one array an input, instead of random inputs.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of every candidate. Default: the number recorded with the candidate, or all cores.",
)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    help="Simultaneous runs of every candidate, to compare throughputs. Default: the number recorded with it, or 1.",
)
@click.option("--cuda-graph", is_flag=True, help="Launch the kernels of engines as CUDA graphs.")
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Blocks of each candidate.")
@click.option(
    "--block-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.2,
    show_default=True,
    help="Length of a block.",
)
@click.option(
    "--budget-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="While an interval is wide, go on for up to this time and four times the rounds.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the inputs and of the order."
)
@click.option(
    "-o",
    "--out",
    "--output",
    "outs",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also write the report to this file: .json, .md or .html. Repeatable.",
)
@wide_option
@source_options
@output_options
def command(
    candidates: tuple[str, ...],
    sizes: str | None,
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
    outs: tuple[Path, ...],
    wide: bool,
    source: SourceOptions,
    say: Output,
    **given: Any,
) -> None:
    """Compare the outputs of CANDIDATES, then time them beside one another.

    A candidate is an artifact, the folder of an artifact, an ONNX file or a source (PyTorch, TensorFlow). Each
    candidate runs in its own process while all other processes are paused. "faster" and "slower" mean a difference
    beyond the noise of the same run. With --batch or --length, the measurement is repeated at each shape. The exit code
    is 1 if no candidate could be compared.
    """
    from accel.api.bench import bench, sweep
    from accel.api.export import check_writable
    from accel.timing.page import check_ending
    from accel.timing.report import AsWideAsFits, BenchReport, Sweep

    for out in outs:
        check_writable(out)
        check_ending(out)
    options: dict[str, Any] = {"sizes": read_sizes(sizes), **source, **given}
    found: BenchReport | Sweep
    try:
        if batches or lengths:
            found = sweep(candidates, batches=batches, lengths=lengths, **options)
        else:
            found = bench(candidates, **options)
    except KeyboardInterrupt as error:  # measurements of two runs can't be combined
        said = "interrupted, no report was written; run the same command again, with fewer --rounds to end sooner"
        raise KeyboardInterrupt(said) from error
    for out in outs:
        found.write(out)
    reports = found.reports if isinstance(found, Sweep) else (found,)

    if not say.quiet:
        # The table contains the warnings.
        warnings = [warning for report in reports for warning in report.warnings] if say.as_json else []
        for warning in dict.fromkeys(warnings):
            click.echo(f"accel: warning: {warning}", err=True)
        for note in dict.fromkeys(note for report in reports for note in report.notes):
            click.echo(f"accel: note: {note}", err=True)

    def human() -> Any:
        from rich.console import Group

        return Group(*(AsWideAsFits(report) for report in reports))

    say.result(found.to_json(), human, columns=ANY_WIDTH if wide else TABLE_WIDTH)
    compared = [row for report in reports for row in report.rows if row.name != report.baseline]
    if compared and all(row.error for row in compared):
        sys.exit(1)
