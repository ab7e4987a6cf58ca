"""``accel reproduce``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output_options

if TYPE_CHECKING:
    from accel.api.reproduce import Reproduction

    from . import Output


@click.command("reproduce")
@click.argument("artifact")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file that a stage read, such as calibration data; recognized by its sha256. Repeatable.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Keep the new artifact under this name.")
@output_options
def command(artifact: str, data: tuple[Path, ...], out: Path | None, say: Output) -> None:
    """Make ARTIFACT again from its source with the stages in its manifest, and compare the result of each stage.

    The exit code is 1 if a stage gives another result, or if the files of the artifact were changed.
    """
    from accel.api.reproduce import reproduce

    found = reproduce(artifact, data=data, out=out)
    say.result(found.to_json(), lambda: _human(found, artifact))
    if not found.passed:
        sys.exit(1)


def _human(found: Reproduction, artifact: str) -> Any:
    from rich.markup import escape
    from rich.table import Table

    verdict = "reproduced" if found.passed else "not reproduced"
    said = f"{verdict}, byte for byte" if found.identical else verdict
    if not found.intact:
        said = "changed since it was made (accel inspect --check says where); the stages are compared with its manifest"
    table = Table(title=escape(f"{artifact}: {said}"), title_justify="left")
    for column in ("stage", "result", "note", "other versions"):
        table.add_column(column, overflow="fold")
    for row in found.stages:
        table.add_row(row.stage, row.status, escape(row.note), ", ".join(row.versions))
    return table
