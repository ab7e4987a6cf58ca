"""``accel bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options
from accel.cli.options import read_dims, read_sizes, source_options, tensorflow_options

if TYPE_CHECKING:
    from accel.cli import Output


def read_numbers(_: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """``1,8,32`` as numbers."""
    parts = [part.strip() for part in (text or "").split(",")] if text is not None else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"can't read {text!r}; write numbers from 1 up, e.g. 1,8,32", param=option)
    return tuple(dict.fromkeys(map(int, parts)))


@click.command("bench")
@click.argument("candidates", nargs=-1, required=True)
@click.option("--against", metavar="MODEL", help="What to compare with: a source or an artifact. Default: the first.")
@click.option("--also", multiple=True, metavar="RUNTIME", help="Run the PyTorch sources with this too: torch-compile.")
@click.option("--sizes", metavar="DIM=N,...", help="Sizes of the dynamic dims: batch=1,sequence=128.")
@click.option("--batch", "batches", callback=read_numbers, metavar="N,...", help="Measure at each of these batches.")
@click.option("--length", "lengths", callback=read_numbers, metavar="N,...", help="And at each of these lengths.")
@click.option("--data", type=click.Path(path_type=Path), help=".npz with one array an input, instead of random inputs.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of every candidate. Default: as recorded with it, or all cores.",
)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    help="Runs of every candidate under way at once: throughputs are compared. Default: as recorded with it, or 1.",
)
@click.option("--cuda-graph", is_flag=True, help="Launch the kernels of engines as CUDA graphs.")
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True, help="Blocks of each candidate.")
@click.option(
    "--block-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.2,
    show_default=True,
    help="How long a block is.",
)
@click.option(
    "--budget-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Go on for up to this long, and four times the rounds, while an interval is wide.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the inputs and of the order."
)
@click.option(
    "-o",
    "--out",
    "--output",
    "outs",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Write the report there as well: .json, .md or .html. Repeatable.",
)
@source_options
@tensorflow_options
@output_options
def command(
    candidates: tuple[str, ...],
    against: str | None,
    also: tuple[str, ...],
    sizes: str | None,
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
    data: Path | None,
    threads: int | None,
    streams: int | None,
    cuda_graph: bool,
    rounds: int,
    block_seconds: float,
    budget_seconds: float,
    seed: int,
    outs: tuple[Path, ...],
    inputs: tuple[str, ...],
    weights: Path | None,
    dims: tuple[str, ...],
    tensorflow: dict[str, Any],
    say: Output,
) -> None:
    """Time CANDIDATES beside one another, and compare their outputs before.

    A candidate is an artifact, the folder it is in, an ONNX file or a source (PyTorch, TensorFlow). Each runs in
    a process of its own, all others paused; "faster" and "slower" mean beyond the noise that was measured in the same
    run. With --batch and --length all of it is done at each shape. Exit code 1 where no candidate could be compared.
    """
    from accel.api.bench import bench, sweep
    from accel.api.export import check_writable
    from accel.bench.page import check_ending
    from accel.bench.report import AsWideAsFits, BenchReport, Sweep

    for out in outs:
        check_writable(out)
        check_ending(out)
    options: dict[str, Any] = {
        "against": against,
        "also": also,
        "sizes": read_sizes(sizes),
        "data": data,
        "rounds": rounds,
        "block_seconds": block_seconds,
        "budget_seconds": budget_seconds,
        "threads": threads,
        "streams": streams,
        "cuda_graph": cuda_graph,
        "seed": seed,
        "inputs": inputs or None,
        "weights": weights,
        "dims": read_dims(dims),
        "tensorflow": tensorflow,
    }
    found: BenchReport | Sweep
    try:
        if batches or lengths:
            found = sweep(candidates, batches=batches, lengths=lengths, **options)
        else:
            found = bench(candidates, **options)
    except KeyboardInterrupt as error:  # figures of two runs can't be joined: nothing is kept to go on with
        said = "interrupted, no report was written; run the same command again, with fewer --rounds to be done sooner"
        raise KeyboardInterrupt(said) from error
    for out in outs:
        found.write(out)
    reports = found.reports if isinstance(found, Sweep) else (found,)

    if not say.quiet:  # the table and the JSON have them, too
        for warning in dict.fromkeys(warning for report in reports for warning in report.warnings):
            click.echo(f"accel: warning: {warning}", err=True)

    def human() -> Any:
        from rich.console import Group

        return Group(*(AsWideAsFits(report) for report in reports))

    say.result(found.to_json(), human)
    compared = [row for report in reports for row in report.rows if row.name != report.baseline]
    if compared and all(row.error for row in compared):
        sys.exit(1)
