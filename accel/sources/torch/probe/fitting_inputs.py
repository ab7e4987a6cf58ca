"""Finds declarations of inputs that a module takes, if it fails on the declared ones at some sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations

import torch

from accel.errors import AccelError
from accel.signature import Dim, Feeds, Signature, TensorSpec
from accel.spelling import option

from ...output_specs import probe_cases

# The attributes in which PyTorch's layers keep the size of an axis of their input.
_SIZES = ("in_channels", "in_features", "input_size", "num_features", "embed_dim", "normalized_shape")
_IMAGES = (28, 32, 64, 96, 112, 128, 160, 192, 224, 256, 299, 384, 512)
# A module with wrong inputs fails in its first layers, so a try takes little time.
_TRIES = 100
_LARGEST = 8192


def fitting_inputs(module: torch.nn.Module, signature: Signature, run: Callable[[Feeds], object]) -> str:
    """Returns the advice for declared inputs on which ``run`` fails because the size of an axis, the order of the axes
    or a dtype is wrong. Returns "" if ``run`` takes the declared inputs at their usual sizes, or if no single change
    helps."""
    if _takes(signature, run, usual=True):
        return ""
    for inputs in islice(_changed(signature.inputs, _sizes_of(module)), _TRIES):
        try:
            bare = Signature(inputs)
            dims = {dim: bounds for dim, bounds in signature.dims.items() if dim in bare.dims}
            tried = Signature(inputs, (), dims)
        except AccelError:  # a bound names a dim that is gone
            continue
        if _takes(tried, run):
            return f"; the model takes other inputs: declare {option('inputs', list(map(str, inputs)))}"
    return ""


def axes_of_one_size(signature: Signature, run: Callable[[Feeds], object]) -> str:
    """Returns the advice to give two axes of the inputs one name, if ``run`` fails only because their sizes differ, or
    "" if that doesn't help. Tries axes that have the same usual size."""
    if not _takes(signature, run, usual=True):
        return ""
    usual = signature.sizes()
    places = [
        (place, axis, dim, usual.get(dim, dim) if isinstance(dim, str) else dim)
        for place, spec in enumerate(signature.inputs)
        for axis, dim in enumerate(spec.shape)
    ]
    for (_, _, dim, size), (place, axis, other, same) in islice(permutations(places, 2), _TRIES):
        if size != same or dim == other or dim not in signature.dims:
            continue
        inputs = list(signature.inputs)
        shape = inputs[place].shape
        inputs[place] = replace(inputs[place], shape=(*shape[:axis], dim, *shape[axis + 1 :]))
        named = {one for spec in inputs for one in spec.shape}
        try:
            tried = Signature(tuple(inputs), (), {d: bounds for d, bounds in signature.dims.items() if d in named})
        except AccelError:  # a bound names a dim that is gone
            continue
        if _takes(tried, run):
            return (
                f"; the axes have one size, so give them one name: declare {option('inputs', list(map(str, inputs)))}"
            )
    return ""


def _takes(signature: Signature, run: Callable[[Feeds], object], *, usual: bool = False) -> bool:
    try:
        for sizes in probe_cases(signature)[: 1 if usual else None]:
            run(signature.inputs_at(sizes))
    except Exception:  # a model may raise any type of error
        return False
    return True


def _sizes_of(module: torch.nn.Module) -> list[int]:
    """Returns the sizes that the layers take, those of the first layers first."""
    found: dict[int, None] = {}
    for layer in module.modules():
        for name in _SIZES:
            size = getattr(layer, name, None)
            size = size[-1] if isinstance(size, tuple) and size else size
            if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _LARGEST:
                found[size] = None
    return list(found)


def _changed(inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> Iterator[tuple[TensorSpec, ...]]:
    """Yields ``inputs`` with a single change."""
    for place, spec in enumerate(inputs):
        for changed in _changed_specs(spec, sizes):
            if changed != spec:
                yield (*inputs[:place], changed, *inputs[place + 1 :])


def _changed_specs(spec: TensorSpec, sizes: Sequence[int]) -> Iterator[TensorSpec]:
    if spec.dtype in ("float32", "int64", "int32"):
        yield replace(spec, dtype="int64" if spec.is_float else "float32", values=None)
    first, rest = spec.shape[:1], spec.shape[1:]
    shapes: list[tuple[Dim, ...]] = [(*first, *order) for order in permutations(rest)] if len(rest) < 4 else []
    for size in sizes:
        shapes += [(*first, *rest[:axis], size, *rest[axis + 1 :]) for axis in range(len(rest))]
    if len(rest) == 3 and all(isinstance(dim, int) for dim in rest[1:]):  # a dynamic dim only needs another range
        shapes += [(*first, rest[0], size, size) for size in _IMAGES]
    for shape in dict.fromkeys(shapes):
        yield replace(spec, shape=shape)
