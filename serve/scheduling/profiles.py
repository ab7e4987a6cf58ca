"""Finds the batch sizes that an engine takes for given sizes of the other dims, from the engine's optimization
profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]
# The smallest and the largest shape of each input. The first dim is the batch.
Profile = Mapping[str, tuple[Shape, Shape]]
# The shape of each input without the batch dim.
Shapes = tuple[tuple[str, Shape], ...]

_MOST_KEPT = 4096


def read_profiles(properties: Mapping[str, Any]) -> tuple[Profile, ...]:
    """Returns the profiles of an engine from the manifest's properties, or () if the artifact isn't an engine."""
    return tuple(
        {name: (tuple(ends[0]), tuple(ends[-1])) for name, ends in profile.items()}
        for profile in properties.get("profiles", ())
    )


def rows_of(profiles: Iterable[Profile], shapes: Shapes | None, most: int, step: int = 1) -> tuple[int, ...]:
    """Returns the batch sizes for which at least one of ``profiles`` accepts ``shapes``, in ascending order. If
    ``shapes`` is None, every profile counts. The batch sizes are multiples of ``step`` up to ``most``."""
    found: set[int] = set()
    for profile in profiles:
        low = max((ends[0][0] for ends in profile.values() if ends[0]), default=1)
        high = min((ends[1][0] for ends in profile.values() if ends[1]), default=most)
        if shapes is None or all(_holds(profile[name], shape) for name, shape in shapes if name in profile):
            found.update(range(-(-max(low, 1) // step) * step, min(high, most) + 1, step))
    return tuple(sorted(found))


def _holds(ends: tuple[Shape, Shape], shape: Shape) -> bool:
    low, high = ends[0][1:], ends[1][1:]
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


class FittingRows:
    """Calls ``rows_of`` and caches the results by shapes."""

    def __init__(self, profiles: Sequence[Profile], most: int, step: int = 1) -> None:
        self._profiles = profiles
        self._most = most
        self._step = step
        self._known: dict[Shapes, tuple[int, ...]] = {}

    def of(self, shapes: Shapes) -> tuple[int, ...]:
        found = self._known.get(shapes)
        if found is None:
            found = rows_of(self._profiles, shapes, self._most, self._step)
            if len(self._known) < _MOST_KEPT:
                self._known[shapes] = found
        return found
