"""Proves the formulas of ``accel plan --compare`` by a simulation that sends every message."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest

from accel.cli import group, run
from accel.plan.compare import (
    Reduction,
    compare,
    hierarchical_reduction,
    ring_reduction,
    server_reduction,
    tree_reduction,
)
from accel.plan.spec import Layout, Machine, ModelSpec

# Whole numbers, so that the simulated times are exact.
MACHINE = Machine(bandwidth=10, node_bandwidth=40, latency=3, node_size=4)
# The number of values in the gradients, which all tested numbers of ranks and servers divide. A value has one byte.
SIZE = 240

# A message: sender, receiver, the first value and the number of values, and whether the receiver adds the values.
Message = tuple[int, int, int, int, bool]


class _Network:
    """Processes with ``SIZE`` values each, which send messages in rounds. Counts bytes and seconds."""

    def __init__(self, values: Sequence[Sequence[int]], near: Callable[[int, int], bool]) -> None:
        self.values = [list(one) for one in values]
        self.near = near
        self.sent, self.received = Counter[int](), Counter[int]()
        self.seconds, self.rounds = Fraction(0), 0

    def round(self, messages: Sequence[Message]) -> None:
        """Sends all messages at once. A process sends one message after the other, and receives one after the
        other."""
        before = [list(one) for one in self.values]
        busy = Counter[tuple[str, int]]()
        for source, target, first, count, add in messages:
            time = Fraction(count, 40 if self.near(source, target) else 10)
            busy["out", source] += time  # type: ignore[assignment]
            busy["in", target] += time  # type: ignore[assignment]
            self.sent[source] += count
            self.received[target] += count
            for at in range(first, first + count):
                self.values[target][at] = before[source][at] + (self.values[target][at] if add else 0)
        self.seconds += 3 + max(busy.values())
        self.rounds += 1


def _ring(
    network: _Network, members: Sequence[int], first: int, count: int, *, halves: str = "both"
) -> list[list[Message]]:
    """Returns the rounds of a ring all-reduce over ``members``, of ``count`` values from ``first`` on."""
    n, size = len(members), count // len(members)
    rounds = []
    for add in {"both": (True, False), "reduce": (True,), "gather": (False,)}[halves]:
        for step in range(n - 1):
            shift = 0 if add else 1
            rounds.append(
                [(members[i], members[(i + 1) % n], first + (i + shift - step) % n * size, size, add) for i in range(n)]
            )
    return rounds


def _run_ring(network: _Network, ranks: int) -> None:
    for messages in _ring(network, range(ranks), 0, SIZE):
        network.round(messages)


def _run_tree(network: _Network, ranks: int) -> None:
    steps = [1 << k for k in range((ranks - 1).bit_length())]
    for step in steps:
        network.round([(r, r - step, 0, SIZE, True) for r in range(step, ranks, 2 * step)])
    for step in reversed(steps):
        network.round([(r - step, r, 0, SIZE, False) for r in range(step, ranks, 2 * step)])


def _run_servers(network: _Network, ranks: int, servers: int) -> None:
    share = SIZE // servers
    pairs = [(rank, ranks + s, s * share) for rank in range(ranks) for s in range(servers)]
    network.round([(rank, server, first, share, True) for rank, server, first in pairs])
    network.round([(server, rank, first, share, False) for rank, server, first in pairs])


def _run_hierarchical(network: _Network, ranks: int, node: int) -> None:
    nodes = [list(range(start, start + node)) for start in range(0, ranks, node)]
    share = SIZE // node
    for halves in ("reduce", "between", "gather"):
        if halves == "between":
            # After the reduce-scatter, member i of a node holds share (i + 1) % node.
            rings = [_ring(network, [one[i] for one in nodes], (i + 1) % node * share, share) for i in range(node)]
        else:
            rings = [_ring(network, one, 0, SIZE, halves=halves) for one in nodes]
        for rounds in zip(*rings, strict=True):
            network.round([message for messages in rounds for message in messages])


def _check(network: _Network, found: Reduction, ranks: int) -> None:
    total = [sum(column) for column in zip(*(_values(rank) for rank in range(ranks)), strict=True)]
    assert all(network.values[rank] == total for rank in range(ranks))
    assert found.sent == pytest.approx(max(network.sent[rank] for rank in range(ranks)))
    assert found.seconds == pytest.approx(float(network.seconds))
    assert found.rounds == network.rounds


def _values(rank: int) -> list[int]:
    return [(rank + 1) * (at + 3) for at in range(SIZE)]


def _network(ranks: int, node: int, servers: int = 0) -> _Network:
    values = [_values(rank) for rank in range(ranks)] + [[0] * SIZE] * servers
    return _Network(values, lambda a, b: max(a, b) < ranks and a // node == b // node)


@pytest.mark.parametrize(("ranks", "node"), [(2, 4), (3, 4), (4, 4), (5, 4), (8, 4), (12, 4), (6, 1)])
def test_rings_and_trees_send_what_the_formulas_say(ranks: int, node: int) -> None:
    """Fails if the bytes, the rounds or the seconds of a ring or a tree differ from the simulated messages, whose sums
    are right on every rank. All ranks may be in one node, or in several."""
    network = _network(ranks, node)
    _run_ring(network, ranks)
    _check(network, ring_reduction(SIZE, ranks, MACHINE, node), ranks)
    assert network.sent[0] == 2 * SIZE * (ranks - 1) / ranks
    network = _network(ranks, node)
    _run_tree(network, ranks)
    # The first rounds of a tree over several nodes stay in a node, which the formula leaves out.
    found = tree_reduction(SIZE, ranks, MACHINE, node)
    if ranks > node > 1:
        assert found.seconds > network.seconds
        network.seconds = Fraction(found.seconds)
    _check(network, found, ranks)


@pytest.mark.parametrize(("ranks", "servers"), [(4, 1), (4, 2), (8, 8), (4, 8)])
def test_servers_send_what_the_formula_says(ranks: int, servers: int) -> None:
    """Fails if the bytes of a parameter server, or the seconds with few or many servers, differ from the messages."""
    network = _network(ranks, 1, servers)
    _run_servers(network, ranks, servers)
    found = server_reduction(SIZE, ranks, MACHINE, servers)
    _check(network, found, ranks)
    assert found.server == network.sent[ranks] + network.received[ranks] == 2 * SIZE * ranks / servers


@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (8, 4), (12, 4), (6, 3)])
def test_a_hierarchy_sends_what_the_formula_says(ranks: int, node: int) -> None:
    """Fails if the bytes or seconds of a hierarchical all-reduce differ from the messages in and between the nodes."""
    network = _network(ranks, node)
    _run_hierarchical(network, ranks, node)
    _check(network, hierarchical_reduction(SIZE, ranks, MACHINE, node), ranks)


def test_the_fastest_comes_first() -> None:
    """Fails if the order isn't by time, if tensor-parallel ranks count as data-parallel ranks, or if one server for 64
    ranks isn't the slowest."""
    spec = ModelSpec(params=int(7e9), layers=32, hidden=4096, heads=32)
    found = compare(spec, Layout(world=128, tp=2), Machine(), servers=1)
    assert [one.name for one in found] == ["hierarchical (16 x 4)", "ring", "tree", "parameter server (1)"]
    assert next(one for one in found if one.name == "ring").sent == 2 * 7e9 / 2 * 2 * 63 / 64
    assert all(one.source for one in found)


def test_the_command_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """Checks the table and the JSON of ``--compare``, and that options which it would ignore are refused."""
    line = "plan --params 7e9 --world 64 --compare --servers 8 --bandwidth 10G --latency 1e-5"
    assert run(group, [*line.split(), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["reductions"]}
    assert rows["parameter server (8)"]["server"] == 2 * 14e9 * 64 / 8
    assert rows["ring"]["seconds"] == pytest.approx(126e-5 + 2 * 14e9 * 63 / 64 / 10e9)
    assert run(group, line.split()) == 0
    said = capsys.readouterr().out
    assert "Patarasuk" in said
    assert "hierarchical (8 x 8)" in said
    assert run(group, ["plan", "--params", "7e9", "--world", "64", "--servers", "8"]) != 0
    assert "--servers is for --compare" in capsys.readouterr().err
    assert run(group, ["plan", "--params", "7e9", "--inference", "--compare"]) != 0
    assert "leave out --compare" in capsys.readouterr().err
