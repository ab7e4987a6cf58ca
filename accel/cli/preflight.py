"""``accel preflight``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output_options

if TYPE_CHECKING:
    from accel.api.preflight import PreflightReport
    from accel.artifact import Artifact

    from . import Output


@click.command("preflight")
@click.argument("model")
@click.option("--target", default="tensorrt-rtx", show_default=True, help="tensorrt-rtx or tensorrt.")
@click.option("--compute-capability", "compute_capabilities", multiple=True, help="GPU to build for: 8.6. Repeatable.")
@click.option(
    "--fix", is_flag=True, help="Rewrite the nodes that can be rewritten safely, write the model to -o, and check it."
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The ONNX file that --fix writes.")
@click.option("--data", type=click.Path(path_type=Path), help="Samples for the check of --fix.")
@output_options
def command(
    model: str,
    target: str,
    compute_capabilities: tuple[str, ...],
    fix: bool,
    out: Path | None,
    data: Path | None,
    say: Output,
) -> None:
    """List each node of an ONNX MODEL that an engine build refuses, with the cause and the fix.

    Builds nothing. The exit code is 1 if a node is refused. With --fix, the exit code
    is 1 only if a node is still refused.
    """
    from accel.api.preflight import preflight

    found = preflight(model, target=target, compute_capabilities=compute_capabilities, fix=fix, out=out, data=data)
    say.result(found.to_json(), lambda: _human(found, target))
    if not found.passed:
        sys.exit(1)


def _human(found: PreflightReport, target: str) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    parts: list[Any] = []
    table = Table(title=f"{target} refuses {_nodes(len(found.refusals))}", title_justify="left")
    for column in ("node", "operator", "cause", "fix"):
        table.add_column(column, overflow="fold")
    left = {row.node for row in found.left}
    for row in found.refusals:
        fix = "rewritten" if found.fixed and row.node not in left else row.fix
        table.add_row(escape(row.node), row.operator, escape(row.cause), escape(fix))
    parts.append(table if found.refusals else f"{target} refuses no node, as far as can be told before the build")
    if not found.asked_parser:
        parts.append(f"{target} is not installed, so its parser could not check the operators")
    if found.fixed:
        left_over = f"{_nodes(len(found.left))} still refused"
        parts.append(escape(f"{found.fixed.path}: rewritten {_rewritten(found.fixed) or 'nothing'}; {left_over}"))
        parts += [escape(f"  gate {p['stage']}: {p['summary']}") for p in found.fixed.proof()[-1:]]
    return Group(*parts)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


# Maps each plural in the stage's notes to its singular.
_COUNTED = {"biases": "bias", "weights": "weight", "activations": "activation"}


def _rewritten(fixed: Artifact) -> str:
    notes = fixed.history[-1]["notes"]
    counts = [f"{notes[name]} {one if notes[name] == 1 else name}" for name, one in _COUNTED.items() if notes.get(name)]
    return ", ".join([*counts, *(["float64 as float32"] if notes.get("float64") else [])])
