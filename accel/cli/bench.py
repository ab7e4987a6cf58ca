"""``accel bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options
from accel.cli.options import read_dims, read_sizes, source_options

if TYPE_CHECKING:
    from accel.cli import Output


@click.command("bench")
@click.argument("candidates", nargs=-1, required=True)
@click.option("--against", metavar="MODEL", help="What to compare with: a source or an artifact. Default: the first.")
@click.option("--also", multiple=True, metavar="RUNTIME", help="Run the PyTorch sources with this too: torch-compile.")
@click.option("--sizes", metavar="DIM=N,...", help="Sizes of the dynamic dims: batch=1,sequence=128.")
@click.option("--data", type=click.Path(path_type=Path), help=".npz with one array an input, instead of random inputs.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of every candidate. Default: all cores.")
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
@click.option("--seed", type=int, default=0, show_default=True, help="Of the inputs and of the order.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the report there as JSON as well.")
@source_options
@output_options
def command(
    candidates: tuple[str, ...],
    against: str | None,
    also: tuple[str, ...],
    sizes: str | None,
    data: Path | None,
    threads: int | None,
    rounds: int,
    block_seconds: float,
    budget_seconds: float,
    seed: int,
    out: Path | None,
    inputs: tuple[str, ...],
    weights: Path | None,
    dims: tuple[str, ...],
    say: Output,
) -> None:
    """Time CANDIDATES beside one another, and compare their outputs before.

    A candidate is an artifact, the folder it is in, an ONNX file or a PyTorch source. Each runs in a process of its
    own, all others paused; "faster" and "slower" mean beyond the noise that was measured in the same run. Exit code 1
    where no candidate could be compared.
    """
    from accel.api.bench import bench
    from accel.api.export import check_writable
    from accel.bench.report import table

    if out is not None:
        check_writable(out)
    report = bench(
        candidates,
        against=against,
        also=also,
        sizes=read_sizes(sizes),
        data=data,
        rounds=rounds,
        block_seconds=block_seconds,
        budget_seconds=budget_seconds,
        threads=threads,
        seed=seed,
        inputs=inputs or None,
        weights=weights,
        dims=read_dims(dims),
    )
    if out is not None:
        report.write(out)

    def human() -> Any:
        return table(report)

    say.result(report.to_json(), human)
    compared = [row for row in report.rows if row.name != report.baseline]
    if compared and all(row.error for row in compared):
        sys.exit(1)
