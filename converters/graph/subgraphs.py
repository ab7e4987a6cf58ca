"""Finds the subgraphs of nodes (branches of an If, bodies of a Loop) and the outer values that subgraphs capture."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import AttributeProto, NodeProto


def subgraphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the direct subgraphs of ``node``."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def captured(node: NodeProto) -> list[str]:
    """Returns the unique names of the outer values that the subgraphs of ``node`` read."""
    return list(dict.fromkeys(name for graph in subgraphs(node) for name in _free_names(graph)))


def reads(node: NodeProto) -> Iterator[str]:
    """Yields the names that ``node`` and the nodes of its subgraphs read, and the outputs of the subgraphs."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from reads(inner)
        yield from (value.name for value in graph.output)


def _free_names(graph: onnx.GraphProto) -> Iterator[str]:
    own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    for node in graph.node:
        yield from (n for n in (*node.input, *captured(node)) if n and n not in own)
        own.update(node.output)
    yield from (v.name for v in graph.output if v.name not in own)
