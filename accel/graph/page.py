"""Writes an HTML file that shows a graph, or two graphs and their differences. The page loads no external resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import beside
from accel.errors import MissingExtra
from accel.folders.writing import make_folder

from .cost import GraphCost
from .layout import layout

if TYPE_CHECKING:
    import onnx

# A browser can move a drawing of at most this many nodes without stuttering. The page of a larger graph shows only the
# first nodes, and a note about the missing nodes.
MAX_NODES = 4000


def graph_data(title: str, model: onnx.ModelProto, cost: GraphCost) -> dict[str, Any]:
    """Returns the data of one model for the page: nodes with their positions and details, edges, and a summary."""
    graph = model.graph
    constants = {t.name: t for t in graph.initializer}
    nodes: list[dict[str, Any]] = []
    maker: dict[str, int] = {}

    def add(kind: str, name: str, **details: Any) -> int:
        nodes.append({"id": len(nodes), "kind": kind, "name": name, "details": details})
        return len(nodes) - 1

    for value in graph.input:
        if value.name not in constants:
            maker[value.name] = add("Input", value.name, type=_type(value))
    edges: list[tuple[int, int, str]] = []
    for node, priced in zip(graph.node[:MAX_NODES], cost.nodes, strict=False):
        if node.op_type == "Constant":
            continue
        place = add(
            node.op_type,
            priced.name,
            domain=node.domain,
            inputs=[f"{n} {_constant(constants[n])}" if n in constants else n for n in node.input if n],
            outputs=list(node.output),
            shape=list(priced.shape) if priced.shape is not None else "unknown",
            flops=priced.flops,
            parameters=priced.parameters,
            attributes={a.name: _attribute(a) for a in node.attribute},
        )
        edges += [(maker[name], place, name) for name in dict.fromkeys(node.input) if name in maker]
        maker |= dict.fromkeys(node.output, place)
    for value in graph.output:
        place = add("Output", value.name, type=_type(value))
        if value.name in maker:
            edges.append((maker[value.name], place, value.name))
    places, width, height = layout(len(nodes), [(a, b) for a, b, _ in edges])
    for node_data, (x, y) in zip(nodes, places, strict=True):
        node_data["x"], node_data["y"] = x, y
    return {
        "title": title,
        "nodes": nodes,
        "edges": [list(edge) for edge in edges],
        "width": width,
        "height": height,
        "summary": {
            "nodes": len(graph.node),
            "parameters": cost.parameters,
            "flops": cost.flops,
            "quantized": f"{cost.quantized_share:.0%}",
        },
        "warnings": [
            *cost.warnings,
            *(
                [f"only the first {MAX_NODES} of {len(graph.node)} nodes are drawn"]
                if len(graph.node) > MAX_NODES
                else []
            ),
        ],
    }


def mark_changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Sets ``change`` of each node of two models to ``same``, ``changed``, ``removed`` or ``added``, and returns the
    count of each.

    Two nodes match if their first outputs have the same name. Nodes without outputs match by their own names. A matched
    node has changed if its operator, attributes, shape or parameters differ.
    """

    def key(node: Mapping[str, Any]) -> tuple[str, str]:
        if node["kind"] in ("Input", "Output"):
            return node["kind"], node["name"]
        return "node", node["details"]["outputs"][0] if node["details"]["outputs"] else node["name"]

    old, new = {key(n): n for n in before["nodes"]}, {key(n): n for n in after["nodes"]}
    counts = {"same": 0, "changed": 0, "added": 0, "removed": 0}
    for name, node in old.items():
        node["change"] = "removed" if name not in new else "same" if _alike(node, new[name]) else "changed"
        counts[node["change"]] += 1
    for name, node in new.items():
        node["change"] = "added" if name not in old else "same" if _alike(node, old[name]) else "changed"
        counts["added"] += node["change"] == "added"
    return counts


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("attributes", "shape", "type", "parameters")
    return one["kind"] == other["kind"] and all(one["details"].get(n) == other["details"].get(n) for n in names)


def write_page(models: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes the page of one or two models (from ``graph_data``) to ``out``. Raises ``MissingExtra`` without jinja2."""
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "report") from None
    changes = mark_changes(models[0], models[1]) if len(models) == 2 else {}
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # Escaped names from the model's file can't end the script element or start another element.
    data = json.dumps({"models": list(models), "changes": changes}, allow_nan=False, default=str)
    for char, escaped in (
        ("<", "\\u003c"),
        (">", "\\u003e"),
        ("&", "\\u0026"),
        ("\u2028", "\\u2028"),
        ("\u2029", "\\u2029"),
    ):
        data = data.replace(char, escaped)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    title = " and ".join(m["title"] for m in models)
    page = environment.from_string(template).render(title=title, data=data)
    make_folder(out.parent)
    with beside(out) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _type(value: onnx.ValueInfoProto) -> str:
    from onnx import TensorProto

    kind = value.type.tensor_type
    dims = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
    return f"{TensorProto.DataType.Name(kind.elem_type).lower()}[{','.join(dims)}]"


def _constant(tensor: onnx.TensorProto) -> str:
    from onnx import TensorProto

    return f"({TensorProto.DataType.Name(tensor.data_type).lower()}[{','.join(map(str, tensor.dims))}])"


def _attribute(attribute: onnx.AttributeProto) -> str:
    import onnx

    if attribute.HasField("t"):
        return _constant(attribute.t)
    if attribute.HasField("g") or attribute.graphs:
        return "a graph"
    value = onnx.helper.get_attribute_value(attribute)
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text[:200]
