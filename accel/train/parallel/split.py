"""Cuts a chain into pipeline stages by the measured times of its modules and of the tensors between them.

This is the planner of PipeDream (Narayanan et al. 2019, section 3.1) for stages of one rank each. A first cut minimizes
the time of the slowest stage or link by dynamic programming. Then boundaries move as long as the simulated time of a
whole step falls, from this cut and from random cuts. Small nets try all cuts. The simulation runs the passes in the
order of torch's schedule. A pass waits for its rank, and for the tensor from the neighboring stage. Ranks send while
they compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import comb

from .pipeline import Turn, balance

# If there are at most this number of cuts, all are tried.
_ALL = 1000
# A search begins at PipeDream's cut and at this number of random cuts.
_STARTS = 24
# The search ends after this number of simulated passes, which take a few seconds.
_PASSES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds of each module of a chain for one micro-batch. ``links`` has the seconds in which the output of a
    module, except the last, goes to another rank. A gradient takes as long as the output."""

    forward: Sequence[float]
    backward: Sequence[float]
    links: Sequence[float]

    def of(self, units: Sequence[range]) -> Times:
        """Returns the times of groups of modules that stay together."""
        forward, backward = (
            [sum(seconds[i] for i in unit) for unit in units] for seconds in (self.forward, self.backward)
        )
        return Times(forward=forward, backward=backward, links=[self.links[unit.stop - 1] for unit in units[:-1]])


def best(times: Times, order: Sequence[Sequence[Turn]], stages: int) -> list[range]:
    """Returns the modules of each stage. ``order`` has the passes of each rank in order, as ``pipeline.turns`` gives
    them. The same arguments always give the same cut. Raises ``BadConfig`` if there are fewer modules than stages."""
    count, known = len(times.forward), dict[tuple[int, ...], float]()
    most = _PASSES // sum(map(len, order))

    def seconds_of(inner: Sequence[int]) -> float:
        key = tuple(inner)
        if key not in known:
            known[key] = step_seconds(_runs(inner, count), times, order)
        return known[key]

    if comb(count - 1, stages - 1) <= _ALL:
        return _runs(min(combinations(range(1, count), stages - 1), key=seconds_of), count)
    whole = [one + two for one, two in zip(times.forward, times.backward, strict=True)]
    first = balance(whole, stages, [2 * seconds for seconds in times.links])
    draw = random.Random(0)
    starts = [[run.start for run in first[1:]]]
    starts += [sorted(draw.sample(range(1, count), stages - 1)) for _ in range(_STARTS)]
    for start in starts:
        inner: list[int] | None = start
        while inner is not None and len(known) < most:
            now = seconds_of(inner)
            inner = next((other for other in _neighbors(inner, count) if seconds_of(other) < now), None)
    fastest = min(known, key=known.__getitem__)
    return _runs(fastest, count)


def _neighbors(inner: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yields the cuts that differ in one boundary, those in which two boundaries move by one, and those in which
    several neighboring boundaries move together by one."""
    ends = [0, *inner, count]
    for index in range(len(inner)):
        for place in range(ends[index] + 1, ends[index + 2]):
            if place != inner[index]:
                yield [*inner[:index], place, *inner[index + 1 :]]
    steps = product(combinations(range(len(inner)), 2), (-1, 1), (-1, 1))
    moves = [{one: step, two: other} for (one, two), step, other in steps]
    moves += [
        dict.fromkeys(range(one, two + 1), step)
        for one, two in combinations(range(len(inner)), 2)
        if two > one + 1
        for step in (-1, 1)
    ]
    for move in moves:
        moved = [place + move.get(index, 0) for index, place in enumerate(inner)]
        if all(a < b for a, b in pairwise([0, *moved, count])):
            yield moved


def _runs(inner: Sequence[int], count: int) -> list[range]:
    return [range(a, b) for a, b in pairwise([0, *inner, count])]


def step_seconds(runs: Sequence[range], times: Times, order: Sequence[Sequence[Turn]]) -> float:
    """Returns the seconds of a step, without the optimizer, if stage i has the modules ``runs[i]``.

    The first half of a backward pass that has two halves takes half of its time.
    """
    forth, back = ([sum(seconds[i] for i in run) for run in runs] for seconds in (times.forward, times.backward))
    cost = {"F": forth, "B": back, "I": [one / 2 for one in back], "W": [one / 2 for one in back]}
    owner = {stage: rank for rank, mine in enumerate(order) for _, stage, _ in mine}
    links = [
        times.links[run.stop - 1] if owner[stage] != owner[stage + 1] else 0.0 for stage, run in enumerate(runs[:-1])
    ]
    last, done = len(runs) - 1, dict[tuple[str, int, int], float]()
    free, place = [0.0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for rank, mine in enumerate(order):
            while place[rank] < len(mine):
                kind, stage, batch = mine[place[rank]]
                ready: float | None = 0.0
                if kind == "F" and stage:
                    ready = _after(done.get(("F", stage - 1, batch)), links[stage - 1])
                elif kind in "BI" and stage < last:
                    ready = _after(done.get(("B", stage + 1, batch)), links[stage])
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + cost[kind][stage]
                done["B" if kind == "I" else kind, stage, batch] = free[rank]
                place[rank] += 1
                left -= 1
        assert left < before, "the passes wait for one another"
    return max(free)


def _after(done: float | None, seconds: float) -> float | None:
    return None if done is None else done + seconds
