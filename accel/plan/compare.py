"""Compares the ways to sum the gradients of all data-parallel ranks: ring, tree and hierarchical all-reduce, and a
parameter server.

The gradients have Φ bytes, and there are n ranks. A link has B bytes per second in each direction, and each round of
messages takes α seconds more. A rank sends and receives at the same time, but one message at a time in each direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel.errors import BadConfig

from .memory import stage_params
from .spec import PRECISIONS, Layout, Machine, ModelSpec
from .traffic import ring


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One way to sum the gradients. ``sent`` is the number of bytes that the busiest rank sends, and ``server`` the
    number of bytes that a server sends and receives. ``seconds`` is the time without overlap, in ``rounds`` rounds of
    messages."""

    name: str
    sent: float
    server: float
    rounds: int
    seconds: float
    source: str


def compare(spec: ModelSpec, layout: Layout, machine: Machine, servers: int = 1) -> list[Reduction]:
    """Returns the ways to sum the gradients of ``layout``, fastest first. ``servers`` is the number of parameter
    servers, each on a machine of its own. Raises ``BadConfig`` for less than one server."""
    if servers < 1:
        raise BadConfig(f"{servers} parameter servers can't hold the model; use at least 1")
    size = PRECISIONS[layout.precision][1] * stage_params(spec, layout)
    ranks, node = layout.dp * layout.cp, max(1, machine.node_size // layout.tp)
    found = [
        ring_reduction(size, ranks, machine, node),
        tree_reduction(size, ranks, machine, node),
        server_reduction(size, ranks, machine, servers),
    ]
    if 1 < node < ranks and ranks % node == 0:
        found.append(hierarchical_reduction(size, ranks, machine, node))
    return sorted(found, key=lambda one: one.seconds)


def ring_reduction(size: float, ranks: int, machine: Machine, node: int) -> Reduction:
    """Returns the cost of a ring all-reduce: 2 (n - 1) rounds of Φ / n bytes. ``node`` is the number of ranks in a
    node. The slowest link of the ring sets the time."""
    sent, rounds = 2 * ring(size, ranks), 2 * (ranks - 1)
    return Reduction(
        name="ring",
        sent=sent,
        server=0.0,
        rounds=rounds,
        seconds=rounds * machine.latency + sent / _link(machine, ranks, node),
        source="Patarasuk and Yuan 2009; Horovod (Sergeev and Del Balso 2018)",
    )


def tree_reduction(size: float, ranks: int, machine: Machine, node: int) -> Reduction:
    """Returns the cost of a binomial tree, which reduces to one rank and then broadcasts: 2 ceil(log2 n) rounds of Φ
    bytes. The root sends Φ in each round of the broadcast."""
    depth = (ranks - 1).bit_length()
    return Reduction(
        name="tree",
        sent=depth * size,
        server=0.0,
        rounds=2 * depth,
        seconds=2 * depth * (machine.latency + size / _link(machine, ranks, node)),
        source="Thakur et al. 2005, sections 4.3 and 4.5 (binomial trees)",
    )


def server_reduction(size: float, ranks: int, machine: Machine, servers: int) -> Reduction:
    """Returns the cost of s parameter servers, which hold Φ / s bytes each. Every rank sends Φ bytes and gets Φ bytes
    back, so that a server receives n Φ / s bytes and sends as many. All links go between nodes."""
    each_way = max(size, ranks * size / servers)
    return Reduction(
        name=f"parameter server ({servers})",
        sent=size,
        server=2 * ranks * size / servers,
        rounds=2,
        seconds=2 * (machine.latency + each_way / machine.bandwidth),
        source="Li et al. 2014, section 3",
    )


def hierarchical_reduction(size: float, ranks: int, machine: Machine, node: int) -> Reduction:
    """Returns the cost of an all-reduce in two dimensions: a reduce-scatter in each node of g ranks, a ring all-reduce
    of Φ / g bytes between the n / g nodes, and an all-gather in each node."""
    nodes = ranks // node
    near, far = 2 * ring(size, node), 2 * ring(size / node, nodes)
    rounds = 2 * (node - 1) + 2 * (nodes - 1)
    return Reduction(
        name=f"hierarchical ({nodes} x {node})",
        sent=near + far,
        server=0.0,
        rounds=rounds,
        seconds=rounds * machine.latency + near / machine.node_bandwidth + far / machine.bandwidth,
        source="Mikami et al. 2018 (2D-torus all-reduce)",
    )


def _link(machine: Machine, ranks: int, node: int) -> float:
    """Returns the bandwidth of the slowest link between ``ranks`` ranks."""
    return machine.node_bandwidth if ranks <= node else machine.bandwidth
