"""Finds integers outside the ranges of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .signature import Feeds
from .spec import TensorSpec

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class OutOfRange:
    """Describes an integer that is outside the range of its input. ``sample`` is the integer's index on axis 0."""

    input: str
    value: int
    low: int
    high: int
    sample: int

    def __str__(self) -> str:
        return f"input {self.input!r} holds {self.value}, it takes {self.low}..{self.high}"


@dataclass(frozen=True)
class IntegerRanges:
    """Checks whether the integers in feeds are inside the ranges of a model's ``inputs``."""

    inputs: Sequence[TensorSpec] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the inputs that have a range."""
        return tuple(spec.name for spec in self._ranged)

    @cached_property
    def _ranged(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.values is not None and not spec.is_float)

    @cached_property
    def _columns(self) -> Mapping[str, np.ndarray]:
        """Returns the largest integer of each column, for the inputs whose columns differ."""
        import numpy as np

        return {spec.name: np.array(spec.columns) for spec in self._ranged if spec.columns is not None}

    @cached_property
    def _by_dims(self) -> bool:
        return any(spec.bound_dims for spec in self._ranged)

    def first_outside(self, feeds: Feeds, shapes: Mapping[str, Sequence[int]] | None = None) -> OutOfRange | None:
        """Returns the first integer outside its range, or None. Skips missing inputs, arrays whose values aren't
        integers, and ranges that name a dim of unknown size. ``shapes`` gives the shapes of the inputs that aren't in
        ``feeds``.
        """
        if not self._ranged:
            return None
        import numpy as np

        sizes = self.sizes(feeds, shapes or {}) if self._by_dims else {}
        for spec in self._ranged:
            value, found = feeds.get(spec.name), spec.range_at(sizes)
            if value is None or found is None or not value.size or value.dtype.kind not in "iu":
                continue
            low, high = found
            largest, smallest = int(value.max()), int(value.min())
            if low <= smallest and largest <= high:
                if spec.name not in self._columns:
                    continue
                highs = np.broadcast_to(self._columns[spec.name], value.shape)
                outside = value > highs
                if not outside.any():
                    continue
                high = int(highs[outside].flat[0])
            else:
                outside = (value > high) if largest > high else (value < low)
            sample = int(outside.reshape(len(value), -1).any(1).argmax()) if value.ndim else 0
            return OutOfRange(spec.name, int(value[outside].flat[0]), low, high, sample)
        return None

    def sizes(self, feeds: Feeds, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Returns the sizes of the dims in ``feeds`` and ``shapes``."""
        return dict(_sizes(self.inputs, {**shapes, **{name: value.shape for name, value in feeds.items()}}))


def _sizes(inputs: Iterable[TensorSpec], shapes: Mapping[str, Sequence[int]]) -> Iterable[tuple[str, int]]:
    for spec in inputs:
        for dim, size in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
            if isinstance(dim, str):
                yield dim, size
