"""Says in one sentence why samples can't be stacked into a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accel.errors import kind_of, one_line

from ..loss import IGNORED

_ARRAYS = (torch.Tensor, np.ndarray)


def unlike(samples: Sequence[tuple[int, Any]], error: Exception) -> str:
    """Returns why numbered samples can't be stacked. ``error`` is what stacking them raised."""
    for number, sample in samples:
        if not (isinstance(sample, tuple | list) and len(sample) == 2):
            return f"sample {number} is {_kind(sample)}; let each sample be a tuple (inputs, targets)"
    for number, sample in samples[1:]:
        for one, two, where in _pairs(samples[0][1], sample):
            arrays = isinstance(one, _ARRAYS) and isinstance(two, _ARRAYS)
            fix = (
                f"bring them to one shape, for example with padding (the loss ignores targets of {IGNORED})"
                if arrays
                else "give every sample the same kind of value"
            )
            return (
                f"samples {samples[0][0]} and {number} can't be in one batch, because their {where} differ "
                f"({_kind(one)} and {_kind(two)}); {fix}"
            )
    for number, sample in samples:
        for value, where in _leaves(sample, ""):
            if not isinstance(value, _ARRAYS) and not isinstance(value, int | float | np.number):
                part = where.partition("[")[0]
                return f"sample {number} has {_kind(value)} among its {part}; give tensors, arrays or numbers"
    return f"the samples {', '.join(str(number) for number, _ in samples)} can't be stacked ({one_line(error, 200)})"


def _pairs(one: Any, two: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yields the places in which two samples differ, each with what the samples have there."""
    own, other = _parts(one, where), _parts(two, where)
    if own is None or other is None:
        if _shape(one) != _shape(two) or (own is None) != (other is None):
            yield one, two, where
    elif own.keys() != other.keys():
        yield one, two, where
    else:
        for name in own:
            yield from _pairs(own[name], other[name], name)


def _leaves(value: Any, where: str) -> Iterator[tuple[Any, str]]:
    parts = _parts(value, where)
    if parts is None:
        yield value, where
    else:
        for name, part in parts.items():
            yield from _leaves(part, name)


def _parts(value: Any, where: str) -> dict[str, Any] | None:
    """Returns the parts of a tuple, list or dict by name, or None for any other value. A sample's own parts are its
    inputs and its targets."""
    if isinstance(value, Mapping):
        return {f"{where}[{key!r}]": part for key, part in value.items()}
    if isinstance(value, tuple | list):
        names = [f"{where}[{index}]" for index in range(len(value))] if where else ["inputs", "targets"]
        return dict(zip(names, value, strict=True))
    return None


def _shape(value: Any) -> Any:
    """Returns the shape of an array, () for a number, and the type of any other value."""
    if isinstance(value, _ARRAYS):
        return tuple(value.shape)
    return () if isinstance(value, int | float | np.number) else type(value)


def _kind(value: Any) -> str:
    if isinstance(value, _ARRAYS):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return kind_of(value)
