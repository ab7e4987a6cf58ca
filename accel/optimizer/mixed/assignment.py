"""Orders the steps of the search for mixed precision by gain per cost, the largest first.

A step raises a layer from int8 to a wider precision. The gain of a step is the squared error that the step removes, and
its cost is the additional time. The errors of different layers are unrelated, so their squares add up. Finding the
fastest assignment of precisions to layers is a knapsack problem. Sorting the steps by gain per cost gives the greedy
solution (Dantzig 1957). The search finds how many steps from the front of the sorted list bring the accuracy drop
within the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel.converters.quantize.sensitivity import Sensitivity
from accel.tables.precision import PRECISIONS

# The time of a multiply-add in each precision, relative to int8. The time is assumed to be proportional to the number
# of bits.
COSTS = {
    name: (PRECISIONS[name].weight_bytes or 0.0) / (PRECISIONS["int8"].weight_bytes or 1.0)
    for name in ("int8", "fp16", "bf16", "fp32")
}

_LARGEST_ERROR = 1e15  # replaces infinity, because the difference of two infinities is NaN


@dataclass(frozen=True)
class Upgrade:
    """A step that raises the precision of the layer ``node`` to ``precision``.

    ``worth`` is the squared error that the step removes per unit of cost.
    """

    node: str
    precision: str
    worth: float


# A pair (node, precision) for each layer that isn't int8, ordered from the most to the least sensitive layer.
Assignment = tuple[tuple[str, str], ...]


def upgrades(layers: Sequence[Sensitivity], base: str, *, beyond: bool) -> list[Upgrade]:
    """Returns the steps that raise every layer from int8 to float, the step with the largest ``worth`` first.

    A step raises a layer to ``base``. With ``beyond``, a second step raises the layer from ``base`` to float32. If the
    second step has a larger ``worth`` than the first step, a single step raises the layer from int8 to float32.
    """
    found: list[Upgrade] = []
    for layer in layers:
        in_int8, in_base = (min(error, _LARGEST_ERROR) ** 2 for error in (layer.error, layer.error_in_base))
        to_base = layer.work * (COSTS[base] - COSTS["int8"])
        if not beyond or base == "fp32":
            found.append(Upgrade(layer.node, base, in_int8 / to_base))
            continue
        further = layer.work * (COSTS["fp32"] - COSTS[base])
        first, second = (in_int8 - in_base) / to_base, in_base / further
        if second > first:
            found.append(Upgrade(layer.node, "fp32", in_int8 / (to_base + further)))
        else:
            found += [Upgrade(layer.node, base, first), Upgrade(layer.node, "fp32", second)]
    return sorted(found, key=lambda step: -step.worth)  # the sort is stable, so the two steps of a layer stay in order


def assigned(steps: Iterable[Upgrade], layers: Sequence[Sensitivity]) -> Assignment:
    """Returns the assignment after ``steps`` were applied to a model with all layers in int8."""
    return assigned_after({}, steps, layers)


def assigned_after(before: Mapping[str, str], steps: Iterable[Upgrade], layers: Sequence[Sensitivity]) -> Assignment:
    """Returns the assignment after ``steps`` were applied.

    ``before`` holds the precision of each layer that was already wider than int8.
    """
    chosen = {**before, **{step.node: step.precision for step in steps}}
    return tuple((layer.node, chosen[layer.node]) for layer in layers if layer.node in chosen)


def cost(layer: Sensitivity, precision: str) -> float:
    """Returns how much more time the layer takes in ``precision`` than in int8."""
    return layer.work * (COSTS[precision] - COSTS["int8"])
