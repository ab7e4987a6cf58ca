"""Lays out a graph's nodes in layers from top to bottom, with few crossings of edges."""

from __future__ import annotations

from collections.abc import Sequence

STEP_X, STEP_Y = 190, 84
_PASSES = 4


def layout(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int, int]:
    """Returns the center of each of ``count`` nodes, and the width and the height of the drawing, in pixels.

    The nodes are numbered in topological order, so each edge leads from a lower to a higher number. A node's layer is
    the length of its longest path from an input (Sugiyama's method). A pass from top to bottom moves each node to the
    mean position of its neighbors above. The next pass, from bottom to top, moves each node to the mean position of its
    neighbors below. The two kinds of passes alternate.
    """
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for start, end in edges:
        if start < end:
            above[end].append(start)
            below[start].append(end)
    layer = [0] * count
    for node in range(count):
        layer[node] = max((layer[other] + 1 for other in above[node]), default=0)
    # An input is drawn right above the first node that reads it, instead of in the top layer.
    for node in range(count):
        if not above[node] and below[node]:
            layer[node] = min(layer[other] for other in below[node]) - 1
    rows: dict[int, list[int]] = {}
    for node in range(count):
        rows.setdefault(layer[node], []).append(node)
    order = sorted(rows)
    place = {node: float(i) for row in rows.values() for i, node in enumerate(row)}
    for turn in range(_PASSES):
        near = above if turn % 2 == 0 else below
        for level in order if turn % 2 == 0 else reversed(order):
            row = rows[level]
            wanted = {n: sum(place[o] for o in near[n]) / len(near[n]) if near[n] else place[n] for n in row}
            row.sort(key=lambda n: (wanted[n], n))
            shift = sum(wanted[n] - i for i, n in enumerate(row)) / len(row)
            for index, node in enumerate(row):
                place[node] = index + shift
    left = min(place.values(), default=0.0)
    spots = [(round((place[n] - left + 0.5) * STEP_X), (layer[n] + 1) * STEP_Y - STEP_Y // 2) for n in range(count)]
    width = max((x for x, _ in spots), default=0) + STEP_X // 2
    height = max((y for _, y in spots), default=0) + STEP_Y // 2
    return spots, width, height
