"""Finds dims that limit the values of integer inputs without a declared range. For example, a sequence length can't
exceed the padded length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from accel.signature import Bound, Feeds, Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np

# The largest batch size in the runs of the model. A larger batch would take longer and show nothing more.
_LARGEST_BATCH = 3


def find_bounds(signature: Signature, run: Callable[[Feeds], object]) -> Signature:
    """If ``run`` raises for some integer inputs at some sizes, returns ``signature`` with dims as the bounds of these
    inputs.

    Tries each dim, and each dim minus 1, as the largest value. First changes one input at a time, and then all inputs
    together. Returns ``signature`` unchanged if ``run`` raises nothing, or if no bound helps. Only inputs without
    declared ``values`` are changed.
    """
    batch = signature.batch_dim
    dims = [dim for dim in signature.dims if dim != batch]
    free = [spec for spec in signature.inputs if _is_free(spec)]
    if not dims or not free or _runs(signature, run):
        return signature
    for names in [*([spec.name] for spec in free), *([[spec.name for spec in free]] if len(free) > 1 else [])]:
        for dim, less in product(dims, ("", "-1")):
            values = {spec.name: _values(spec, f"{dim}{less}") for spec in free if spec.name in names}
            inputs = tuple(replace(s, values=values.get(s.name, s.values)) for s in signature.inputs)
            tried = replace(signature, inputs=inputs)
            if _runs(tried, run):
                return tried
    return signature


def bounds_words(before: Signature, after: Signature) -> str:
    """Describes the bounds that ``find_bounds`` found as text, or returns "" if there are none."""
    found = [new for old, new in zip(before.inputs, after.inputs, strict=True) if old.values != new.values]
    if not found:
        return ""
    said = " and ".join(f"{spec.name} is in {spec.values[0]}..{spec.values[1]}" for spec in found if spec.values)
    return f"{said}: the model fails on larger integers at some sizes"


def _is_free(spec: TensorSpec) -> bool:
    integers = spec.dtype.startswith(("int", "uint"))
    return integers and spec.values is None and not spec.optional and not spec.name.endswith("mask")


def _values(spec: TensorSpec, high: Bound) -> tuple[Bound, Bound]:
    return (1 if spec.seen is not None and spec.seen[0] > 0 else 0), high


def _runs(signature: Signature, run: Callable[[Feeds], object]) -> bool:
    """Tells whether ``run`` raises no error for the smallest, the largest and random integers at the sizes of every
    case."""
    for case in signature.cases(_LARGEST_BATCH):
        for feeds in _draws(signature, case):
            try:
                run(feeds)
            except Exception:  # a model may raise any type of error
                return False
    return True


def _draws(signature: Signature, case: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
    import numpy as np

    feeds = signature.example_inputs(**case)
    yield feeds
    free = [spec for spec in signature.inputs if spec.bound_dims or _is_free(spec)]
    for end in (0, 1):
        ends = {spec.name: (spec.range_at(signature.sizes(**case)) or spec.seen or (0, 1))[end] for spec in free}
        yield {name: np.full_like(value, ends[name]) if name in ends else value for name, value in feeds.items()}
