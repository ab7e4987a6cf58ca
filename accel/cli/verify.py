"""``accel verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    def human() -> Any:
        from rich.table import Table

        verdict = "same within the limit" if found.passed else "; ".join(found.problems)
        inputs = "" if data else " on random inputs"
        table = Table(title=f"{candidate} against {reference}{inputs}: {verdict}", title_justify="left")
        for column in ("output", "max abs", "rel l2", "middle sample", "limit", "cosine (worst sample)"):
            table.add_column(column, justify="left" if column == "output" else "right")
        for name, d in found.outputs.items():
            middle = f"{found.middle_sample[name]:.3g}" if name in found.middle_sample else ""
            table.add_row(name, f"{d.max_abs:.3g}", f"{d.rel_l2:.3g}", middle, f"{found.limit:g}", f"{d.cosine:.6f}")
        return table

    say.result(found.to_json(), human)
    if not found.passed:
        sys.exit(1)
