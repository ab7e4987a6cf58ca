"""The first node at which two ONNX models part, in O(log n) runs.

The tensors that both have are put into the reference's topological order. Behind each of them the graph can be cut:
what crosses the cut is all that later nodes see of earlier ones. If everything that crosses agrees, whatever went wrong
on the way to the outputs went wrong later; if something doesn't, it went wrong before. So a binary search ends at a
tensor that differs while all it is computed from agrees, and only what crosses one cut is in memory at a time.

A difference may also heal: a masked value, a ReLU, a rounding swallow it. A tensor that differs while everything that
is computed from it agrees is put aside as harmless, and the search goes on without it. What the search never looked at
it can't vouch for: ``scan`` looks at every tensor before the one that was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accel.progress import report
from accel.verify.compare import Difference, difference, worst
from accel.verify.tensor_match import Graph, Match, match_tensors, module_path

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from accel.runtimes.onnx_rounded import RoundedModel

# Below these both sides mean "not here": a mask of -1e9 or -inf is -65504 or -inf in float16.
MASKED_REFERENCE = -1e8
MASKED_CANDIDATE = -6e4

# How often a harmless difference is put aside before the search takes what it has.
_MOST_HARMLESS = 16

# What a scan holds of each side at a time.
SCAN_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node by its ONNX name (or its first output, where it has none), operator and torch module path."""

    name: str
    operator: str
    module: str

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Node:
        return cls(name=node.name or next(iter(node.output), ""), operator=node.op_type, module=module_path(node))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """``tensor``: of the reference; ``candidate_tensor``: its counterpart. ``node`` makes it, ``candidate_node`` its
    counterpart. ``between``: nodes of each side that lie between it and what it was compared from, where more than
    one. ``inputs``: how far apart the tensors are that it is computed from."""

    tensor: str
    candidate_tensor: str
    node: Node
    candidate_node: Node
    numbers: Difference
    inputs: Mapping[str, Difference]
    between: tuple[Node, ...] = ()
    candidate_between: tuple[Node, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "tensor": self.tensor,
            "candidate_tensor": self.candidate_tensor,
            "node": asdict(self.node),
            "candidate_node": asdict(self.candidate_node),
            "numbers": self.numbers.to_json(),
            "inputs": {name: d.to_json() for name, d in self.inputs.items()},
            "between": [asdict(n) for n in self.between],
            "candidate_between": [asdict(n) for n in self.candidate_between],
        }


@dataclass(frozen=True, kw_only=True)
class Search:
    """``found`` is None where the outputs agree. ``runs``: of each model. ``harmless``: tensors that differ while all
    that is computed from them agrees. ``earlier``: what a scan saw to differ before ``found``; None: not scanned."""

    found: Divergence | None
    outputs: Mapping[str, Difference]
    runs: int
    match: Match
    harmless: tuple[str, ...] = ()
    earlier: tuple[str, ...] | None = None


@dataclass
class _Order:
    """Matched tensors in topological order, contracted: a parent is the nearest matched tensor above."""

    names: list[str]
    parents: dict[str, list[str]]
    children: dict[str, list[str]] = field(default_factory=dict)

    def crossing(self, cut: int, outputs: Sequence[str]) -> list[str]:
        """What is computed up to place ``cut`` and read behind it."""
        place = {name: index for index, name in enumerate(self.names)}
        return [
            name
            for name in self.names[: cut + 1]
            if name in outputs or any(place[c] > cut for c in self.children.get(name, ()))
        ]


class Bisection:
    """Two models in memory, with real rounding of 16-bit floats, and the inputs to compare them on."""

    def __init__(
        self,
        reference: onnx.ModelProto,
        candidate: onnx.ModelProto,
        feeds: Sequence[Mapping[str, np.ndarray]],
        *,
        limit: float,
        threads: int = 0,
    ) -> None:
        from accel.runtimes.onnx_rounded import RoundedModel, inlined

        reference, candidate = inlined(reference), inlined(candidate)
        self.sides = (RoundedModel(reference, threads=threads), RoundedModel(candidate, threads=threads))
        self.graphs = (Graph.of(reference), Graph.of(candidate))
        self.feeds = feeds
        self.limit = limit
        known = (frozenset(self.sides[0].tensors), frozenset(self.sides[1].tensors))
        self.match = match_tensors(*self.graphs, known)
        self.runs = 0
        self._seen: dict[str, Difference] = {}

    def search(self, *, scan: bool = False) -> Search:
        """Find the first node at which the candidate parts from the reference, on the way to the outputs."""
        outputs = [name for name in self.graphs[0].outputs if name in self.match.tensors]
        seen = self._differences(outputs)
        at_end = {name: seen[name] for name in outputs}
        if not any(self.differs(d) for d in at_end.values()):
            inside = self._scan(list(self.match.tensors)) if scan else []
            return Search(found=None, outputs=at_end, runs=self.runs, match=self.match, harmless=tuple(inside))
        harmless: list[str] = []
        while True:
            order = self._order(frozenset(harmless))
            place = self._boundary(order, outputs)
            name = order.names[place]
            children = order.children.get(name, [])
            after = self._differences(children)
            if name in outputs or any(self.differs(after[c]) for c in children) or len(harmless) >= _MOST_HARMLESS:
                break
            harmless.append(name)
        earlier = None
        if scan:
            before = [n for n in self.match.tensors if n in set(order.names[:place])]
            earlier = tuple(n for n in self._scan(before) if n not in harmless)
        found = self._divergence(name, order.parents[name])
        return Search(
            found=found,
            outputs=at_end,
            runs=self.runs,
            match=self.match,
            harmless=tuple(harmless),
            earlier=earlier,
        )

    def differs(self, found: Difference) -> bool:
        return bool(found.problem) or not found.rel_l2 <= self.limit

    def _boundary(self, order: _Order, outputs: Sequence[str]) -> int:
        """The place of a tensor that differs while everything that crosses the cut before it agrees."""
        agrees, differs = -1, len(order.names) - 1
        while differs - agrees > 1:
            middle = (agrees + differs) // 2
            report(f"bisect: {differs - agrees} tensors left", None)
            found = self._differences(order.crossing(middle, outputs))
            if any(self.differs(d) for d in found.values()):
                differs = middle
            else:
                agrees = middle
        return differs

    def _differences(self, names: Sequence[str]) -> dict[str, Difference]:
        """The worst of each number over all feeds; what was seen before isn't run again."""
        new = [name for name in names if name not in self._seen]
        if new:
            rows = [[_differ(name, a, b) for name, a, b in self._run(new, feeds)] for feeds in self.feeds]
            self._seen |= worst(rows)
        return {name: self._seen[name] for name in names}

    def _run(
        self, names: Sequence[str], feeds: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        self.runs += 1
        there = [self.match.tensors[name] for name in names]
        first = _asked(self.sides[0], feeds, names)
        second = _asked(self.sides[1], feeds, there)
        for name, other in zip(names, there, strict=True):
            yield name, first.pop(name), second[other]

    def _scan(self, names: Sequence[str]) -> list[str]:
        """Every one of ``names`` that differs, looked at a few at a time, so that memory stays bounded."""
        found: list[str] = []
        position, count = 0, 4
        while position < len(names):
            chunk = names[position : position + count]
            report("bisect: scanning", position / len(names))
            size = 0
            rows = []
            for feeds in self.feeds:
                row = []
                for name, a, b in self._run(chunk, feeds):
                    size = max(size, a.nbytes + b.nbytes)
                    row.append(_differ(name, a, b))
                rows.append(row)
            self._seen |= worst(rows)
            found += [name for name in chunk if self.differs(self._seen[name])]
            position += len(chunk)
            count = max(1, min(64, SCAN_BYTES // max(1, size)))
        return found

    def _order(self, without: frozenset[str]) -> _Order:
        graph = self.graphs[0]
        names = [name for name in self.match.tensors if name not in without]
        kept = set(names)
        above: dict[str, list[str]] = {name: [] for name in (*graph.inputs, *graph.constants)}
        parents: dict[str, list[str]] = {}
        for node in graph.nodes:
            sources: dict[str, None] = {}
            for read in graph.reads(node):
                sources |= dict.fromkeys([read] if read in kept else above.get(read, []))
            for name in node.output:
                above[name] = list(sources)
                if name in kept:
                    parents[name] = list(sources)
        order = _Order(names, parents)
        for name, sources_of in parents.items():
            for source in sources_of:
                order.children.setdefault(source, []).append(name)
        return order

    def _divergence(self, name: str, parents: Sequence[str]) -> Divergence:
        other = self.match.tensors[name]
        seen = self._differences([name, *parents])
        here, there = self.graphs
        between = _between(here, name, set(parents))
        beyond = _between(there, other, {self.match.tensors[p] for p in parents})
        return Divergence(
            tensor=name,
            candidate_tensor=other,
            node=_maker(here, name),
            candidate_node=_maker(there, other),
            numbers=seen[name],
            inputs={p: seen[p] for p in parents},
            between=between if len(between) > 1 else (),
            candidate_between=beyond if len(beyond) > 1 else (),
        )


def _asked(side: RoundedModel, feeds: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    return side.run(feeds, list(dict.fromkeys(names)))


def _differ(name: str, reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """As ``difference``, but two masked values are alike whatever stands for them."""
    import numpy as np

    if reference.shape == candidate.shape and reference.dtype.kind == "f" == candidate.dtype.kind:
        masked = (reference <= MASKED_REFERENCE) & (candidate <= MASKED_CANDIDATE)
        if masked.any():
            zero = np.zeros((), np.float32)
            return difference(name, np.where(masked, zero, reference), np.where(masked, zero, candidate))
    return difference(name, reference, candidate)


def _maker(graph: Graph, name: str) -> Node:
    """The node that computes a tensor: not the cast or the QDQ around it."""
    root = graph.root(name)
    return Node.of(graph.nodes[graph.producer[root if root in graph.producer else name]])


def _between(graph: Graph, name: str, stop: set[str]) -> tuple[Node, ...]:
    """The nodes between ``stop`` and the tensor, it included, in order."""
    found: set[int] = set()
    queue = [name]
    while queue:
        index = graph.producer.get(queue.pop())
        if index is None or index in found or graph.nodes[index].op_type == "Constant":
            continue
        found.add(index)
        queue += [read for read in graph.reads(graph.nodes[index]) if read not in stop]
    return tuple(Node.of(graph.nodes[index]) for index in sorted(found))


def most_runs(tensors: int) -> int:
    """How many runs a search without harmless differences takes at most: one for the outputs, a binary search, one for
    what follows the tensor that was found."""
    return 3 + math.ceil(math.log2(max(2, tensors)))
