"""``accel doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output_options

if TYPE_CHECKING:
    from . import Output

# The table shows an install command only once if the command has more than ``_LONG`` characters.
_LONG = 80


@click.command("doctor")
@output_options
def command(say: Output) -> None:
    """Show the installed and the missing packages, and what each missing package would add."""
    from accel.api.doctor import doctor

    found = {**doctor(), "serve": _serve()}

    def serve_line() -> str:
        row = found["serve"]
        if not row["transport"]:
            return ""
        why = f": {row['why_not']}" if row["why_not"] else ""
        missing = row["native_why_not"]
        native = f"\naccel serve --transport native can't be compiled here: {missing}" if missing else ""
        return f"accel serve answers gRPC calls with --transport {row['transport']}{why}{native}"

    def human() -> Any:
        from rich.console import Group
        from rich.table import Table

        parts = Table(title="parts", title_justify="left")
        for column in ("part", "version", "brings", "install"):
            parts.add_column(column)
        told: dict[str, str] = {}  # maps an install command to the first package that needs the command
        for part in found["parts"]:
            version = part["version"] or "[red]missing[/red]"
            if part["version"] and not part["installed"]:
                version += " [red]broken[/red]"
            install = part["install"] or ""
            first = told.setdefault(install, part["name"])
            if len(install) > _LONG and first != part["name"]:
                install = f"the command of {first}"
            parts.add_row(part["name"], version, part["brings"], install.replace("[", "\\["))
        kernels = Table(title="compiled kernels", title_justify="left")
        for column in ("kernels", "built", "brings", "build"):
            kernels.add_column(column)
        for row in found["kernels"]:
            kernels.add_row(row["name"], _yes(row["build"] is None), row["brings"], row["build"] or "")
        targets = Table(title="targets", title_justify="left")
        for column in ("target", "builds", "runs here", "brings", "why not"):
            targets.add_column(column)
        for row in found["targets"]:
            why = row["why_not"].replace("[", "\\[")
            targets.add_row(row["name"], _yes(row["builds"]), _yes(row["runs"]), row["brings"], why)
        box = found["machine"]
        words = f"{box['cpu']}, {box['cores']} cores, {box['memory_gb']} GB; {' '.join(box['cpu_features'])}"
        cache = f"cache {found['cache']['path']}: {found['cache']['megabytes']} MB"
        return Group(
            parts, kernels, targets, f"python {found['python']}; {words}", cache, *filter(None, [serve_line()])
        )

    say.result(found, human)


def _serve() -> dict[str, str]:
    """Returns the gRPC transport that `accel serve` chooses, or "" without grpcio, why it isn't a faster one, and why
    the native transport, if it isn't built, can't be."""
    try:
        from accel.serve.transports.grpc.choice import NATIVE, best
        from accel.serve.transports.native.build import why_not
    except ModuleNotFoundError:
        return {"transport": "", "why_not": "", "native_why_not": ""}
    transport, reason = best()
    return {"transport": transport, "why_not": reason, "native_why_not": "" if transport == NATIVE else why_not()}


def _yes(value: bool) -> str:
    return "yes" if value else "no"
