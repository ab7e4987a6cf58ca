"""Writes the advice for inputs of other sizes than a model's fixed dims."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from accel.spelling import is_command_line, option

from .dim_range import BATCH
from .spec import TensorSpec

# The usual names of the axes of images.
_IMAGE = {2: "height", 3: "width"}


def other_sizes(
    spec: TensorSpec, shape: Sequence[int | str], inputs: Sequence[TensorSpec], taken: Container[str]
) -> str:
    """Returns the sizes that the model takes, and the options that make the fixed dims of ``spec``, one of ``inputs``,
    dynamic where ``shape`` has another size. Only the source knows whether it takes other sizes: the number of features
    is often fixed by the weights. The ranks agree. The new names aren't in ``taken``."""
    pairs = enumerate(zip(spec.shape, shape, strict=True))
    wrong = [axis for axis, (dim, size) in pairs if isinstance(dim, int) and dim != size]
    names = {axis: _name(axis, len(shape), taken) for axis in wrong}
    dynamic = tuple(names.get(axis, dim) for axis, dim in enumerate(spec.shape))
    declared = [replace(one, shape=dynamic) if one == spec else one for one in inputs if one == spec or len(inputs) < 5]
    named = option("inputs", list(map(str, declared)))
    for_module = "" if is_command_line() else f"{option('dynamic', {spec.name: names})} for a model in memory, or with "
    takes = " and ".join(f"{spec.shape[axis]} on axis {axis}" for axis in wrong)
    return f"give {takes}, or if the source takes other sizes there, export it again with {for_module}{named}"


def _name(axis: int, rank: int, taken: Container[str]) -> str:
    name = BATCH if axis == 0 else _IMAGE[axis] if rank == 4 and axis in _IMAGE else "length" if axis == 1 else ""
    return name if name and name not in taken else f"size_{axis}"
