"""``accel inspect``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from accel.cli import output_options

if TYPE_CHECKING:
    from accel.api.inspect import Inspection
    from accel.cli import Output


@click.command("inspect")
@click.argument("model")
@click.option("--check", is_flag=True, help="Compute every hash of the chain anew; exit code 1 where one differs.")
@output_options
def command(model: str, check: bool, say: Output) -> None:
    """Show what MODEL is, how it came to be and what was proven about it."""
    from accel.api.inspect import inspect

    found = inspect(model, check=check)
    say.result(found.to_json(), lambda: _human(found))
    if found.intact is False:
        names = ", ".join(f"{link.what} {link.path}".strip() for link in found.changed) or "a file of the artifact"
        click.echo(f"accel: error: the chain is broken at {names}; make the artifact again", err=True)
        sys.exit(1)


def _human(found: Inspection) -> Any:
    from rich.console import Group
    from rich.table import Table

    artifact = found.artifact
    properties = ", ".join(f"{k} {_plain(v)}" for k, v in artifact.properties.items() if k != "profiles")
    lines = [f"{artifact.path}: {artifact.kind}, {found.bytes / 1e6:.1f} MB; {properties}"]
    lines += [f"  in   {spec}" for spec in artifact.signature.inputs]
    lines += [f"  out  {spec}" for spec in artifact.signature.outputs]
    lines += [f"  dim  {name} {r.min}:{r.opt}:{r.max}" for name, r in artifact.signature.dims.items()]
    if artifact.source:
        lines.append(f"  from {artifact.source.get('spec', '')}")
    parts: list[Any] = ["\n".join(lines).replace("[", "\\[")]
    if artifact.history:
        stages = Table(title="stages", title_justify="left")
        for column in ("stage", "seconds", "gate", "sha256"):
            stages.add_column(column)
        proof = {p["stage"]: p["summary"] for p in artifact.proof()}
        for record in artifact.history:
            gate = proof.get(record["name"], "none")
            stages.add_row(record["name"], f"{record['seconds']:.1f}", gate, str(record["output"][0])[:12])
        parts.append(stages)
    if found.chain:
        chain = Table(title="chain", title_justify="left")
        for column in ("what", "path", "sha256", "status"):
            chain.add_column(column, overflow="fold")
        for link in found.chain:
            chain.add_row(link.what, link.path, link.recorded[:12], link.status)
        parts.append(chain)
    if found.graph:
        counts = ", ".join(f"{op} {n}" for op, n in list(found.graph["operators"].items())[:12])
        parts.append(f"{found.graph['nodes']} nodes, {found.graph['parameters']:,} parameters: {counts}")
    if found.kernels:
        parts += _kernels(list(found.kernels))
    return Group(*parts)


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _kernels(rows: list[dict[str, Any]]) -> list[Any]:
    """What became of the ONNX nodes: a row a kernel, then what was fused and what wasn't, counted."""
    from rich.markup import escape
    from rich.table import Table

    from accel.converters.kernel_table import fusions

    table = Table(title="kernels", title_justify="left")
    for column in ("#", "type", "in", "out", "ONNX nodes"):
        table.add_column(column, justify="right" if column == "#" else "left", overflow="fold")
    for number, row in enumerate(rows, start=1):
        nodes = ", ".join(row["onnx"]) or f"none: {row['name'][:80]}"
        table.add_row(str(number), row["type"], "+".join(row["inputs"]), "+".join(row["outputs"]), escape(nodes))
    found = fusions(rows)
    inside = sum(len(row["onnx"]) for row in found["fused"])
    said = f"{len(rows)} kernels: {len(found['fused'])} fused from {inside} nodes, {len(found['alone'])} of one node, "
    said += f"{len(found['added'])} that stand for none; {len(found['split'])} nodes split over several"
    return [table, said]
