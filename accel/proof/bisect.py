"""Finds the first node at which two ONNX models differ, with O(log n) runs of the models.

Tensors with a counterpart in the other model are sorted in the topological order of the reference. If the graph is cut
after a tensor, later nodes only see the tensors that cross the cut. If all tensors that cross the cut agree between the
models, the error is after the cut. If a tensor that crosses the cut differs, the error is before the cut. A binary
search over the cuts ends at a tensor that differs although all its inputs agree. Only the tensors that cross one cut
are in memory at a time.

A mask, a ReLU or rounding may remove a difference, so that later tensors agree. The search skips harmless tensors,
which differ although all tensors computed from them agree. The search doesn't compare all tensors, but ``scan``
compares every tensor before the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accel.errors import RunFailed, one_line
from accel.progress import report
from accel.signature import shapes_of
from accel.spelling import option

from .compare import Difference, difference, worst
from .tensor_match import Graph, Match, match_tensors, module_path

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from accel.runtimes.onnx_rounded import RoundedModel

# A pair of values counts as mask values if the reference's value is at most MASKED_REFERENCE (for example -1e9 or -inf)
# and the candidate's value is at most MASKED_CANDIDATE (for example -65504 or -inf in float16).
MASKED_REFERENCE = -1e8
MASKED_CANDIDATE = -6e4

# A tensor is harmless if it differs although all tensors computed from it agree. A search skips at most this number of
# harmless tensors. After the last skipped tensor, the search returns the next tensor that differs.
_MOST_HARMLESS = 16

# The maximum size in bytes of the tensors that a scan holds in memory.
SCAN_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's ONNX name, operator and torch module path. A node without a name gets the name of its first output."""

    name: str
    operator: str
    module: str

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Node:
        return cls(name=node.name or next(iter(node.output), ""), operator=node.op_type, module=module_path(node))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first tensor that differs between the reference and the candidate.

    ``tensor`` and ``candidate_tensor`` are the tensor's names in the reference and in the candidate. ``node`` and
    ``candidate_node`` are the nodes that compute the tensor. ``numbers`` is the difference between the tensor's values
    in the reference and in the candidate. ``inputs`` maps the names of the nearest matched tensors before ``tensor`` to
    their differences. ``between`` and ``candidate_between`` list the nodes from the tensors of ``inputs`` to
    ``tensor``. A list with a single node is replaced by an empty list.
    """

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
    """The result of a search. ``found`` is None if the outputs agree. ``runs`` is the number of runs of each model.

    ``harmless`` lists tensors that differ although all tensors computed from them agree. ``earlier`` lists the tensors
    before ``found`` that differ, and is None without a scan.
    """

    found: Divergence | None
    outputs: Mapping[str, Difference]
    runs: int
    match: Match
    harmless: tuple[str, ...] = ()
    earlier: tuple[str, ...] | None = None


@dataclass
class _Order:
    """The matched tensors in topological order. The parents of a tensor are the nearest matched tensors that the tensor
    is computed from."""

    names: list[str]
    parents: dict[str, list[str]]
    children: dict[str, list[str]] = field(default_factory=dict)

    def crossing(self, cut: int, outputs: Sequence[str]) -> list[str]:
        """Returns the tensors that are computed up to position ``cut`` and read after this position."""
        place = {name: index for index, name in enumerate(self.names)}
        return [
            name
            for name in self.names[: cut + 1]
            if name in outputs or any(place[c] > cut for c in self.children.get(name, ()))
        ]


class Bisection:
    """Compares two models in memory on given inputs. Both models run with the real rounding of 16-bit floats."""

    def __init__(
        self,
        reference: onnx.ModelProto,
        candidate: onnx.ModelProto,
        feeds: Sequence[Mapping[str, np.ndarray]],
        *,
        limit: float,
        threads: int = 0,
    ) -> None:
        from accel.runtimes.onnx_rounded import RoundedModel
        from accel.sources.onnx.functions import inlined

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
        """Find the first node at which the candidate differs. With ``scan``, also compares all tensors before the first
        difference."""
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
        """Tells whether a difference is over the limit."""
        return bool(found.problem) or not found.rel_l2 <= self.limit

    def _boundary(self, order: _Order, outputs: Sequence[str]) -> int:
        """Returns the position of a tensor that differs. If the graph is cut before this tensor, all tensors that cross
        the cut agree."""
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
        """Returns each tensor's largest differences over all feeds. Runs the models only for tensors that weren't
        compared before."""
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
        first = _asked("reference", self.sides[0], feeds, names)
        second = _asked("candidate", self.sides[1], feeds, there)
        for name, other in zip(names, there, strict=True):
            yield name, first.pop(name), second[other]

    def _scan(self, names: Sequence[str]) -> list[str]:
        """Returns the tensors of ``names`` that differ. Compares a few tensors at a time to bound the memory."""
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


def _asked(
    role: str, side: RoundedModel, feeds: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    try:
        return side.run(feeds, list(dict.fromkeys(names)))
    except Exception as error:  # the errors of ONNX Runtime have no base class of their own
        raise RunFailed(
            f"the {role} fails on the inputs {shapes_of(feeds)} ({one_line(error, 160)}); give two versions of one "
            f"model, and {option('data')} that both take"
        ) from error


def _differ(name: str, reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """Returns the difference of two arrays after setting mask values to 0, because models may use different mask
    values."""
    import numpy as np

    if reference.shape == candidate.shape and reference.dtype.kind == "f" == candidate.dtype.kind:
        masked = (reference <= MASKED_REFERENCE) & (candidate <= MASKED_CANDIDATE)
        if masked.any():
            zero = np.zeros((), np.float32)
            return difference(name, np.where(masked, zero, reference), np.where(masked, zero, candidate))
    return difference(name, reference, candidate)


def _maker(graph: Graph, name: str) -> Node:
    """Returns the node that computes a tensor. Skips casts and QDQ nodes."""
    root = graph.root(name)
    return Node.of(graph.nodes[graph.producer[root if root in graph.producer else name]])


def _between(graph: Graph, name: str, stop: set[str]) -> tuple[Node, ...]:
    """Returns the nodes between the tensors ``stop`` and the tensor ``name``, in topological order. The last node
    computes ``name``."""
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
    """Returns the maximum number of runs of a search that finds no harmless tensors.

    The search runs the models once for the outputs, once for each step of the binary search, and once for the tensors
    computed from the found tensor.
    """
    return 3 + math.ceil(math.log2(max(2, tensors)))
