"""Writes the user's names and dims into a converted file."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.errors import SignatureDrift, UnknownName
from accel.signature import TensorSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Contract:
    """The inputs and outputs that a converted file must have."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def give_names(model: onnx.ModelProto, names: Mapping[str, str], contract: Contract) -> None:
    """Renames the inputs and outputs of ``model`` in place, and gives them the order and the shapes in ``contract``.

    ``names`` maps the file's names to the user's names. If an inner value already has one of the user's names,
    the inner value is renamed. An Identity node is added if an input is also an output, or if two outputs are the same
    value. Raises ``SignatureDrift`` if an output is missing.
    """
    import onnx

    graph = model.graph
    starts = {spec.name: spec for spec in contract.inputs}
    ends = {spec.name: spec for spec in contract.outputs}
    used = {value.name for value in (*graph.input, *graph.initializer)} | _names(graph)
    for old, new in names.items():
        if new in ends and old not in used:
            raise SignatureDrift(f"the output {new!r} is missing in the converted model; export the model again")
    # If a value inside the graph already has one of the new names, this value is renamed first.
    moved: dict[str, str] = {}
    for name in (*starts, *ends, *names):
        if name in used and name not in moved:
            fresh = f"{name}_inner"
            while fresh in used:
                fresh += "_"
            used.add(fresh)
            moved[name] = fresh
    rename_values(graph, moved)
    given = {moved[old]: new for old, new in names.items() if new in starts and old in moved}
    rename_values(graph, given)
    for old, new in names.items():
        if new in ends:
            inner = given.get(moved[old], moved[old])
            graph.node.append(onnx.helper.make_node("Identity", [inner], [new], name=f"output_{new}"))
    _declare(graph, starts, ends)
    _drop_identities(graph, set(ends), set(starts))


def _declare(graph: onnx.GraphProto, starts: Mapping[str, TensorSpec], ends: Mapping[str, TensorSpec]) -> None:
    import onnx

    from accel.signature import numpy_dtype

    def value(spec: TensorSpec) -> onnx.ValueInfoProto:
        kind = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(spec.dtype))
        return onnx.helper.make_tensor_value_info(spec.name, kind, list(spec.shape))

    del graph.input[:]
    graph.input.extend(value(spec) for spec in starts.values())
    del graph.output[:]
    graph.output.extend(value(spec) for spec in ends.values())
    # The shapes of inner values use the converter's own symbols. Shape inference computes the shapes of inner values
    # again.
    del graph.value_info[:]


def _drop_identities(graph: onnx.GraphProto, outputs: set[str], inputs: set[str]) -> None:
    """Removes the Identity in front of an output if no other node reads the Identity's input."""
    constants = {t.name for t in graph.initializer}
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in set(node.input):
            readers[name] = readers.get(name, 0) + 1
    inner = {name for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) for name in _names(g)}
    gone = []
    for node in graph.node:
        if node.op_type != "Identity" or node.output[0] not in outputs:
            continue
        name = node.input[0]
        if name in inputs or name in constants or name in outputs or name in inner or readers[name] != 1:
            continue
        rename_values(graph, {name: node.output[0]})
        gone.append(node)
    for node in gone:
        graph.node.remove(node)


def _names(graph: onnx.GraphProto) -> set[str]:
    """Returns every value that the nodes of ``graph`` and of its subgraphs read or produce."""
    own = {name for node in graph.node for name in (*node.input, *node.output)}
    return own | {n for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) for n in _names(g)}


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames values wherever they occur, in subgraphs too."""
    rename_in_nodes(graph.node, names)
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)


def rename_in_nodes(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Renames the values that ``nodes`` and their subgraphs read and produce. Doesn't rename the inputs, outputs and
    initializers of the graph that contains ``nodes``."""
    for node in nodes:
        for field in (node.input, node.output):
            for index, name in enumerate(field):
                field[index] = names.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                rename_values(inner, names)


def nodes_matching(nodes: Sequence[onnx.NodeProto], pattern: str) -> list[int]:
    """Returns the indices of the nodes whose name, operator or output matches the shell pattern ``pattern``.

    Raises ``UnknownName`` if no node matches.
    """
    found = [
        i for i, n in enumerate(nodes) if any(fnmatch.fnmatchcase(x, pattern) for x in (n.name, n.op_type, *n.output))
    ]
    if not found:
        raise UnknownName(f"no node and no operator is called {pattern!r}; accel inspect lists the names")
    return found
