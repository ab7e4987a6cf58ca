"""Which precision each layer takes: the order in which layers are raised from int8, by what that gains for its cost.

Every assignment that is tried is a head of one list. What a layer loses adds up over the layers about as their squares
(rounding errors of different layers are unrelated), so the list is sorted by how much of the squared error a step takes
away for each unit of time it costs: the greedy solution of the knapsack (Dantzig 1957) that the fastest assignment is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accel.converters.quantize_sensitivity import Sensitivity

# What one multiply-add takes in each precision beside int8, where the hardware has them all: half the bits, half the
# time.
COSTS = {"int8": 1.0, "fp16": 2.0, "bf16": 2.0, "fp32": 4.0}

_LARGEST_ERROR = 1e15  # stands for infinity, of which there is no difference


@dataclass(frozen=True)
class Upgrade:
    """Let the layer ``node`` compute in ``precision``. ``worth``: squared error that goes, for each unit of cost."""

    node: str
    precision: str
    worth: float


# (node, precision) of each layer that isn't int8, in the order of the layers: the most sensitive first.
Assignment = tuple[tuple[str, str], ...]


def upgrades(layers: Sequence[Sensitivity], base: str, *, beyond: bool) -> list[Upgrade]:
    """Every step from all int8 to all float, the one that is worth most first. A layer goes to ``base``, and where
    ``beyond`` says that single layers can be in float32, from there to that, or to it at once if that is worth more."""
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
    return sorted(found, key=lambda step: -step.worth)  # stable: the two of a layer stay in their order


def assigned(steps: Iterable[Upgrade], layers: Sequence[Sensitivity]) -> Assignment:
    """What the layers compute in after these steps."""
    return assigned_after({}, steps, layers)


def assigned_after(before: Mapping[str, str], steps: Iterable[Upgrade], layers: Sequence[Sensitivity]) -> Assignment:
    """The same, where the layers in ``before`` compute in something else than int8 already."""
    chosen = {**before, **{step.node: step.precision for step in steps}}
    return tuple((layer.node, chosen[layer.node]) for layer in layers if layer.node in chosen)


def cost(layer: Sensitivity, precision: str) -> float:
    """What this layer costs more in ``precision`` than in int8."""
    return layer.work * (COSTS[precision] - COSTS["int8"])
