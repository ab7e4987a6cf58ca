"""``accel bisect``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output_options
from .options import source_options

if TYPE_CHECKING:
    from accel.api.bisect import BisectReport
    from accel.proof.bisect import Divergence, Node
    from accel.sources.source import SourceOptions

    from . import Output


@click.command("bisect")
@click.argument("reference")
@click.argument("candidate")
@click.option("--data", type=click.Path(path_type=Path), help=".npz with one array an input, or a folder of them.")
@click.option(
    "--limit",
    type=click.FloatRange(min=0),
    help="Largest relative error of a tensor. Default: by precision. 0 asks for equal bits.",
)
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="Samples of the data to use.")
@click.option(
    "--scan", is_flag=True, help="Also compare every tensor before the first difference, which takes more runs."
)
@source_options
@output_options
def command(
    reference: str,
    candidate: str,
    data: Path | None,
    limit: float | None,
    samples: int,
    scan: bool,
    source: SourceOptions,
    say: Output,
) -> None:
    """Find the first node at which CANDIDATE differs from REFERENCE. REFERENCE and CANDIDATE are ONNX files of one
    model.

    The exit code is 1 if the outputs differ, and 0 if the outputs agree.
    """
    from accel.api.bisect import bisect

    found = bisect(reference, candidate, data=data, limit=limit, samples=samples, scan=scan, **source)
    say.result(found.to_json(), lambda: _human(found, scan))
    if found.divergence is not None or found.as_run is not None:
        sys.exit(1)


def _human(found: BisectReport, scan: bool) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    looked = f"{found.tensors} tensors paired"
    looked += f", {found.by_structure} of them by structure" if found.by_structure else ""
    looked += f", {found.unmatched} without a counterpart" if found.unmatched else ""
    looked += f"; {found.runs} {'run' if found.runs == 1 else 'runs'}, limit {found.limit:g}"
    looked += "".join(f"\n{note}" for note in found.notes)
    if found.as_run is not None:
        off = f"{found.as_run.output} is off by {found.as_run.rel_l2:.3g} (rel_l2)"
        looked += (
            f"\nits own runtime computes something else: {off} from that file, but every node of the file is right; "
            "run accel optimize with another --precision or --target"
        )
    if found.divergence is None:
        inside = (
            "so does every tensor before them" if scan else "nothing else was looked at; --scan looks at every tensor"
        )
        if found.harmless:
            inside = f"differ without consequence: {', '.join(found.harmless)}"
        what = "the outputs agree" if found.as_run is None else "the ONNX forms agree"
        return escape(f"{what}: {looked}\n{inside}")
    d = found.divergence
    lines = [f"first difference: {_node(d.node)}"]
    if d.node.module:
        lines.append(f"  module     {d.node.module}")
    if (d.candidate_node.name, d.candidate_node.operator) != (d.node.name, d.node.operator):
        lines.append(f"  candidate  {_node(d.candidate_node)}")
    lines += _between(d)
    table = Table(title_justify="left")
    for column in ("tensor", "rel l2", "max abs", "cosine", ""):
        table.add_column(column, justify="left" if column in ("tensor", "") else "right", overflow="fold")
    for name, n in {d.tensor: d.numbers, **d.inputs}.items():
        role = n.problem or ("differs" if name == d.tensor else "what it is computed from")
        table.add_row(escape(name), f"{n.rel_l2:.3g}", f"{n.max_abs:.3g}", f"{n.cosine:.6f}", role)
    parts: list[Any] = [escape("\n".join(lines)), table, escape(looked)]
    if found.harmless:
        parts.append(escape(f"differ without consequence: {', '.join(found.harmless)}"))
    if found.earlier is None:
        parts.append("on the way to the outputs; --scan looks at every tensor before it as well")
    elif found.earlier:
        parts.append(escape(f"differ before it: {', '.join(found.earlier)}"))
    else:
        parts.append("every tensor before it agrees")
    return Group(*parts)


def _node(node: Node) -> str:
    return f"{node.name} ({node.operator})"


def _between(d: Divergence) -> list[str]:
    rows = (("between", d.between), ("in it", d.candidate_between))
    return [f"  {label:<10} {', '.join(_node(n) for n in nodes[:12])}" for label, nodes in rows if nodes]
