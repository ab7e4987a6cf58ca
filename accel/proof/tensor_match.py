"""Matches the tensors of an ONNX graph to the tensors of a second graph that was made from the first graph."""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel.sources.onnx.file import NAME_SCOPES

if TYPE_CHECKING:
    import onnx

# Operators that return their input with another dtype or name. Casting or quantizing a model inserts these operators in
# many places.
TRANSPARENT = frozenset({"Cast", "CastLike", "Identity", "QuantizeLinear", "DequantizeLinear"})


@dataclass(frozen=True)
class Graph:
    """The top-level nodes of a graph in topological order, and the index of the node that makes each tensor."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, tuple[int, ...]] = field(repr=False)  # shape by name
    producer: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Graph:
        graph = model.graph
        constants = {t.name: tuple(int(d) for d in t.dims) for t in graph.initializer}
        nodes = tuple(graph.node)
        producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        for name, index in producer.items():
            if nodes[index].op_type == "Constant":
                value = next((a.t.dims for a in nodes[index].attribute if a.name == "value"), ())
                constants[name] = tuple(int(d) for d in value)
        inputs = tuple(v.name for v in graph.input if v.name not in constants)
        return cls(nodes, inputs, tuple(v.name for v in graph.output), constants, producer)

    def reads(self, node: onnx.NodeProto) -> list[str]:
        """Returns the tensors that a node reads, including the outer tensors that its subgraphs read."""
        return [name for name in (*node.input, *_captured(node)) if name]

    def root(self, name: str) -> str:
        """Follows casts and QDQ nodes back from ``name``, and returns the tensor before them. Returns ``name`` itself
        if no cast or QDQ node computes ``name``."""
        while name in self.producer and self.nodes[self.producer[name]].op_type in TRANSPARENT:
            name = self.nodes[self.producer[name]].input[0]
        return name

    def operator(self, name: str) -> str:
        """Returns the operator that computes the tensor, or the word ``constant`` or ``input``."""
        name = self.root(name)
        if name in self.constants:
            return "constant"
        return self.nodes[self.producer[name]].op_type if name in self.producer else "input"


@dataclass(frozen=True, kw_only=True)
class Match:
    """The matched tensors.

    ``tensors`` maps each tensor's name in the reference to its name in the candidate, in the reference's topological
    order. ``by_structure`` lists the tensors whose name differs in the candidate. ``unmatched`` lists the reference's
    computed tensors without a counterpart in the candidate.
    """

    tensors: Mapping[str, str]
    by_structure: frozenset[str]
    unmatched: tuple[str, ...]


def match_tensors(reference: Graph, candidate: Graph, known: tuple[frozenset[str], frozenset[str]]) -> Match:
    """Match tensors by name and operator, then by structure, then by name alone.

    Tensors match by structure if the same operator with the same attributes computes them from matched inputs. A fusion
    changes the operator that computes a tensor but keeps the tensor's name. ``known`` holds, for each model, the
    tensors that a run can return.
    """
    here = [n for n in _computed(reference) if n in known[0]]
    there = [n for n in _computed(candidate) if n in known[1]]
    there_set = set(there)
    sure = {n for n in here if n in there_set and reference.operator(n) == candidate.operator(n)}
    sure |= set(reference.outputs) & set(candidate.outputs)
    anchors = sure | (set(reference.inputs) & set(candidate.inputs))
    found = {n: n for n in here if n in sure}
    ours, theirs = _signatures(reference, anchors), _signatures(candidate, anchors)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in there:
        if name not in sure and not _transparent(candidate, name):
            groups[theirs[name]].append(name)
    wanted: dict[str, list[str]] = defaultdict(list)
    for name in here:
        if name not in sure and not _transparent(reference, name):
            wanted[ours[name]].append(name)
    by_structure: set[str] = set()
    taken = set(found.values())
    for signature, names in wanted.items():
        others = groups.get(signature, [])
        if len(others) == len(names):  # if both groups have equally many tensors, pairs the tensors in order
            found |= dict(zip(names, others, strict=True))
            by_structure |= {a for a, b in zip(names, others, strict=True) if a != b}
            taken |= set(others)
    for name in here:
        if name not in found and name in there_set and name not in taken:
            found[name] = name
    ordered = {name: found[name] for name in here if name in found}
    rest = tuple(n for n in here if n not in found and not _transparent(reference, n))
    return Match(tensors=ordered, by_structure=frozenset(by_structure), unmatched=rest)


def module_path(node: onnx.NodeProto) -> str:
    """Returns the torch module that a node comes from (``encoder.layer.0.attention``), or "" if no module is recorded.

    The older exporter records the module in the node's name, such as ``/encoder/layer.0/MatMul``.
    """
    text = next((p.value for p in node.metadata_props if p.key == NAME_SCOPES), "")
    if text:
        try:
            scopes = [str(s) for s in ast.literal_eval(text)]
        except (ValueError, SyntaxError):
            scopes = []
        scopes = [s for s in scopes[:-1] if s]  # the last scope names the operator, not a module
        path = scopes[-1] if scopes else ""
        # accel exports models inside a wrapper whose only child is called `module`.
        return path.removeprefix("module").removeprefix(".") if scopes and scopes[0] == "module" else path
    if node.name.startswith("/"):
        return ".".join(node.name.strip("/").split("/")[:-1]).removeprefix("module").removeprefix(".")
    return ""


def _computed(graph: Graph) -> list[str]:
    return [name for node in graph.nodes for name in node.output if name and node.op_type != "Constant"]


def _transparent(graph: Graph, name: str) -> bool:
    return graph.nodes[graph.producer[name]].op_type in TRANSPARENT


def _signatures(graph: Graph, anchors: set[str]) -> dict[str, str]:
    """Returns each tensor's digest, which covers how the tensor is computed from inputs, constants and ``anchors``.

    Uses only the shapes of constants, so that tensors match even if a constant's value differs.
    """
    found: dict[str, str] = {name: f"input {name}" for name in graph.inputs}
    found |= {name: f"constant {list(shape)}" for name, shape in graph.constants.items()}
    for node in graph.nodes:
        inputs = [found.get(name, name) for name in graph.reads(node)]
        for index, name in enumerate(node.output):
            if name in graph.constants or not name:
                continue
            if name in anchors:
                found[name] = f"tensor {name}"
            elif node.op_type in TRANSPARENT:
                found[name] = inputs[0]
            else:
                found[name] = _digest([node.domain, node.op_type, str(index), *_attributes(node), *inputs])
    return found


def _attributes(node: onnx.NodeProto) -> list[str]:
    """Returns the attributes that identify a node, such as axes and strides.

    Leaves out float attributes, because a wrong float may be the cause of a difference between the models.
    """
    return sorted(f"{a.name}={a.i or list(a.ints) or a.s!r}" for a in node.attribute if a.type in (2, 3, 7))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _captured(node: onnx.NodeProto) -> list[str]:
    found: list[str] = []
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
            own = {t.name for t in graph.initializer} | {v.name for v in graph.input}
            own |= {name for inner in graph.node for name in inner.output}
            reads = [n for inner in graph.node for n in (*inner.input, *_captured(inner))]
            reads += [value.name for value in graph.output]
            found += [n for n in reads if n and n not in own]
    return found
