"""Finds the sizes of dynamic dims that a module takes, by running the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from accel.errors import BadInputSpec, one_line
from accel.signature import DimRange, Feeds, Signature

from ...output_specs import farthest, probe_cases

Run = Callable[[Feeds], object]


def runs_at(signature: Signature, run: Run, sizes: Mapping[str, int]) -> bool:
    """Tells whether ``run`` takes random inputs of ``sizes``."""
    return not _failure(signature, run, sizes)


def shared_batch(signature: Signature) -> str | None:
    """Returns the batch dim if it is the first axis of every input, or else None. A model that has inputs with another
    first axis may not take every batch: the offsets of bags, for example, are at most the number of items."""
    batch = signature.batch_dim
    return batch if all(spec.shape[:1] in ((batch,), ()) for spec in signature.inputs) else None


def within_reach(signature: Signature, run: Run, dims: Iterable[str]) -> Signature:
    """Returns ``signature`` with the ranges of ``dims`` narrowed to the sizes that ``run`` takes. A range stays as it
    is if ``run`` fails at every tested size."""
    for dim in dims:
        signature = signature.with_dims({dim: _reach(signature, run, dim, signature.dims[dim])})
    return signature


def _reach(signature: Signature, run: Run, dim: str, bounds: DimRange) -> DimRange:
    def runs(size: int) -> bool:
        return runs_at(signature, run, signature.sizes(**{dim: size}))

    ends = {end: runs(end) for end in (bounds.max, bounds.min)}
    if all(ends.values()):
        return bounds
    good = next((size for size in (bounds.opt, bounds.opt // 2, bounds.min) if size and runs(size)), 0)
    if not good:
        return bounds
    high, low = (end if ends[end] else farthest(runs, good, end) for end in (bounds.max, bounds.min))
    return replace(bounds, min=low, opt=min(max(bounds.opt, low), high), max=high)


def guessed_within_reach(signature: Signature, run: Run, dims: Iterable[str]) -> Signature:
    """Returns ``signature`` with the ranges of ``dims``, which nobody declared, narrowed to the sizes that ``run``
    takes. Changes nothing if ``run`` fails beside the usual sizes, as models that take only multiples of a number do:
    the error about these sizes advises a step."""
    dims = tuple(dims)
    if not dims or not all(runs_at(signature, run, case) for case in probe_cases(signature)):
        return signature
    return within_reach(signature, run, dims)


def reach_words(before: Signature, after: Signature) -> str:
    """Returns a text with the dims whose ranges were narrowed, or ""."""
    found = []
    for dim, bounds in after.dims.items():
        old = before.dims.get(dim, bounds)
        if old.min < bounds.min:
            found.append(f"the range of {dim} begins at {bounds.min}, because the model fails at {old.min}")
        if bounds.max < old.max:
            found.append(f"the range of {dim} ends at {bounds.max}, because the model fails at {old.max}")
    return " and ".join(found)


def refused_empty(signature: Signature, run: Run) -> dict[str, str]:
    """Returns the dims that can't have the size 0, each with the reason why ``run`` fails there.

    An exported model may give outputs for an empty dim where PyTorch raises an error. For example, the maximum of
    nothing is -inf in ONNX.
    """
    found = {}
    for dim in signature.dims:
        try:
            empty = Signature(tuple(spec.with_dims({dim: 0}) for spec in signature.inputs))
        except BadInputSpec:  # no integer is in the range of an input, such as 1..length
            continue
        sizes = {other: size for other, size in signature.sizes().items() if other != dim}
        found[dim] = _failure(empty, run, sizes)
    return {dim: reason for dim, reason in found.items() if reason}


def _failure(signature: Signature, run: Run, sizes: Mapping[str, int]) -> str:
    """Returns the reason why ``run`` fails on random inputs of ``sizes``, or "" if it runs."""
    try:
        run(signature.inputs_at(sizes))
    except Exception as error:  # a model may raise any type of error, which is reported later
        return one_line(error, 120) or type(error).__name__
    return ""
