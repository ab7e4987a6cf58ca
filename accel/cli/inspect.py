"""``accel inspect``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output_options
from .options import read_sizes, source_options

if TYPE_CHECKING:
    from accel.api.inspect import Inspection
    from accel.sources.source import SourceOptions

    from . import Output

# The suffixes of the files that netron can show.
_NETRON = (".onnx", ".tflite", ".keras", ".h5", ".hdf5", ".pb", ".xml", ".param", ".pt2", ".pt")


@click.command("inspect")
@click.argument("model")
@click.option(
    "--check", is_flag=True, help="Compute every hash of the chain again, read engines; exit code 1 if wrong."
)
@click.option("--graph", "page", type=click.Path(path_type=Path), help="Write an HTML page that shows the graph.")
@click.option("--against", help="A second model to show beside it on the page, with the changes.")
@click.option("--sizes", metavar="NAME=SIZE,...", help="The shape for counting FLOPs: batch=1,sequence=128.")
@source_options
@output_options
def command(
    model: str,
    check: bool,
    page: Path | None,
    against: str | None,
    sizes: str | None,
    source: SourceOptions,
    say: Output,
) -> None:
    """Show the signature, cost, history and proofs of MODEL.

    MODEL is any model that accel export takes or writes.
    """
    from accel.api.inspect import inspect

    found = inspect(
        model,
        check=check,
        page=page,
        against=against,
        sizes=read_sizes(sizes) or None,
        **source,
    )
    say.result(found.to_json(), lambda: _human(found))
    if found.intact is False:
        names = ", ".join(f"{link.what} {link.path}".strip() for link in found.changed) or "a file of the artifact"
        said = found.problem or f"the chain is broken at {names}; make the artifact again"
        click.echo(f"accel: error: {said}", err=True)
        sys.exit(1)


def _human(found: Inspection) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from accel.timing.columns import session_of

    artifact = found.artifact
    known = {**artifact.properties, **({"precision": _precision(found)} if found.precision else {})}
    properties = ", ".join(f"{k} {_plain(v)}" for k, v in known.items() if k != "profiles")
    lines = [f"{artifact.path}: {artifact.kind}, {found.bytes / 1e6:.1f} MB; {properties}"]
    lines += [f"  in   {spec}" for spec in artifact.signature.inputs]
    lines += [f"  out  {spec}" for spec in artifact.signature.outputs]
    lines += [f"  dim  {name} {r}" for name, r in artifact.signature.dims.items()]
    session = artifact.manifest.session if artifact.manifest else {}
    if session:
        own = ", ".join(filter(None, [str(session.get("runtime", "")), session_of(session)]))
        lines.append(f"  runs in {own}")
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
        parts += _graph(found.graph)
    if found.kernels:
        parts += _kernels(list(found.kernels))
    if find_spec("netron") is not None and artifact.path.suffix in _NETRON:
        parts.append(escape(f"netron is installed and shows this file as well: netron {artifact.path}"))
    return Group(*parts)


def _precision(found: Inspection) -> str:
    own = found.artifact.properties.get("precision")
    return found.precision if own in (None, found.precision) else f"{found.precision} (the file's weights: {own})"


def _graph(graph: dict[str, Any]) -> list[Any]:
    """Formats the operators, the weights, the FLOPs by operator, the most expensive nodes and the warnings for
    printing."""
    from rich.markup import escape

    counts = ", ".join(f"{op} {n}" for op, n in list(graph.get("operators", {}).items())[:12])
    nodes = f"{graph['nodes']} nodes, " if "nodes" in graph else ""
    weights = ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in graph["weight_bytes"].items())
    said = f"{nodes}{graph['parameters']:,} parameters ({weights or 'no weights'})"
    parts: list[Any] = [escape(said + (f": {counts}" if counts else ""))]
    if "flops" in graph:
        parts += _cost(graph)
    return parts + [escape(f"warning: {line}") for line in graph["warnings"]]


def _cost(graph: dict[str, Any]) -> list[Any]:
    from rich.markup import escape
    from rich.table import Table

    from accel.proof.gates import case_name

    sizes = case_name(graph["sizes"])
    total = graph["flops"] or 1
    shares = ", ".join(f"{op} {n / total:.0%}" for op, n in list(graph["flops_by_operator"].items())[:6])
    form = f", counted as {graph['counted_as']}" if "counted_as" in graph else ""
    text = f"{graph['flops'] / 1e9:.3g} GFLOPs at {sizes}{form}: {shares}"
    text += f"\nquantized products: {graph['quantized_share']:.0%}"
    nodes = Table(title="most expensive", title_justify="left")
    for column in ("node", "operator", "MFLOPs", "share", "output"):
        nodes.add_column(column, overflow="fold")
    for node in graph["most_expensive"]:
        shape = "x".join(map(str, node["shape"] or ()))
        share = f"{node['flops'] / total:.1%}"
        nodes.add_row(escape(node["name"]), node["operator"], f"{node['flops'] / 1e6:.2f}", share, shape)
    return [escape(text), nodes] if graph["most_expensive"] else [escape(text)]


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _kernels(rows: list[dict[str, Any]]) -> list[Any]:
    """Returns a table of the ONNX nodes in each kernel, and a line with the numbers of fused and single nodes."""
    from rich.markup import escape
    from rich.table import Table

    from accel.converters.to_tensorrt.kernel_table import fusions

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
