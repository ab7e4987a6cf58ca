"""``accel verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import output_options
from .options import source_options

if TYPE_CHECKING:
    from accel.sources.source import SourceOptions

    from . import Output


@click.command("verify")
@click.argument("reference")
@click.argument("candidate")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help=".npz with one array an input, or a folder of them. Default: random inputs.",
)
@click.option("--limit", type=float, help="Largest relative error of any output. Default: by precision.")
@click.option("--samples", type=click.IntRange(min=1), default=64, show_default=True, help="Samples to compare on.")
@source_options
@output_options
def command(
    reference: str,
    candidate: str,
    data: Path | None,
    limit: float | None,
    samples: int,
    source: SourceOptions,
    say: Output,
) -> None:
    """Compare every output of CANDIDATE with REFERENCE. The exit code is 1 if an output differs by more than the
    limit."""
    from accel.api.verify import verify

    found = verify(
        reference,
        candidate,
        data=data,
        limit=limit,
        samples=samples,
        **source,
    )

    for note in found.notes:
        click.echo(f"accel: note: {note}", err=True)

    inputs = "" if data else " on random inputs"
    title = f"{candidate} against {reference}{inputs}: "
    say.result(found.to_json(), lambda: found.rich_table(title))
    if not found.passed:
        sys.exit(1)
