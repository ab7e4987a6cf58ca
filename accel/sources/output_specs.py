"""Finds the input dims that determine each output dim, by running the model at several sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accel.errors import BadSource
from accel.signature import Dim, DimRange, Feeds, Signature, TensorSpec, is_sum, size_at
from accel.signature.decoder import PAST, SEQUENCE, TOTAL
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np


# The numbers that ``step_advice`` tries as the step of a dim. Nets with downsampling or windows often run only at
# multiples of a number in this list.
_STEPS = (2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 28, 32, 56, 64)


def probe_cases(signature: Signature) -> list[dict[str, int]]:
    """Returns the dim sizes for several runs of a model. The first run uses the usual sizes. For each dynamic dim, one
    more run changes only the size of that dim."""
    cases = [dict(signature.sizes())]
    for dim, bounds in signature.dims.items():
        others = (bounds.opt + steps * bounds.step for steps in (1, 2, -1, -2))
        size = next((s for s in others if s <= bounds.max), 0)
        if size >= bounds.min and size != bounds.opt:
            cases.append(signature.sizes(**{dim: size}))
    return cases


def far_runs(
    signature: Signature, run: Callable[[Feeds], Mapping[str, np.ndarray]]
) -> tuple[list[dict[str, int]], list[Mapping[str, np.ndarray]]]:
    """Runs a model at sizes other than its usual sizes, and returns the sizes and the outputs. Each dynamic dim except
    the batch gets a size far from its usual size. Strides and pooling may map neighboring input sizes to the same
    output size. Leaves out sizes at which ``run`` raises an error, because the export will report the error.
    """
    cases, runs = [], []
    for dim, bounds in signature.dims.items():
        size = bounds.min if 4 * bounds.opt >= 5 * bounds.min else bounds.max
        if dim == signature.batch_dim or size == bounds.opt:
            continue
        case = signature.sizes(**{dim: size})
        with contextlib.suppress(Exception):
            runs.append(run(signature.example_inputs(**case)))
            cases.append(case)
    return cases, runs


def same_output(one: np.ndarray, other: np.ndarray) -> bool:
    """Tells whether two outputs are equal. Floats may differ by rounding errors, because threads sum numbers in varying
    order."""
    import numpy as np

    if one.shape != other.shape:
        return False
    if one.dtype.kind == "f" or str(one.dtype) == "bfloat16":
        rtol, atol = (2e-2, 1e-3) if one.dtype.itemsize < 4 else (1e-3, 1e-5)
        return np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True)
    return np.array_equal(one, other)


def farthest(runs: Callable[[int], bool], good: int, bad: int) -> int:
    """Returns the size nearest to ``bad`` at which a model still runs. The model runs at the size ``good`` and fails at
    the size ``bad``."""
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if runs(middle) else (good, middle)
    return good


def step_advice(signature: Signature, run: Callable[[Feeds], object]) -> str:
    """Returns advice for a model that fails at some sizes of its ``signature``. The advice is to restrict dims to
    multiples of a step. Tries the numbers in ``_STEPS`` in order, and takes the first step with which the model runs.
    Returns "" if the model fails with every step in ``_STEPS``.
    """
    batch = signature.batch_dim
    free = [d for d, r in signature.dims.items() if d != batch and r.step == 1]
    known: dict[tuple[int, ...], bool] = {}

    def runs_at(case: Mapping[str, int]) -> bool:
        try:
            run(signature.example_inputs(**case))
        except Exception:  # a model may raise any type of error
            return False
        return True

    def fits(ranges: Signature) -> bool:
        for case in _tried(ranges):
            sizes = tuple(case.values())
            if sizes not in known:
                known[sizes] = runs_at(case)
            if not known[sizes]:
                return False
        return True

    for step in _STEPS:
        found = {d: r for d in free if (r := _in_steps(signature.dims[d], step)) is not None}
        if not found:
            break
        stepped = signature.with_dims(found)
        if not fits(stepped):
            continue
        for dim in found:
            for looser in (signature.dims[dim], replace(found[dim], step=1)):
                every = replace(stepped, dims={**stepped.dims, dim: looser})
                if fits(every):
                    stepped = every
                    break
        if not any(stepped.dims[d].step == step for d in found):  # no dim needs the step, only a narrower range
            return ""
        ranges = {d: str(stepped.dims[d]) for d in found if stepped.dims[d] != signature.dims[d]}
        return f"; it runs at multiples of {step}: pass {option('dims', ranges)}"
    return ""


def _tried(signature: Signature) -> list[dict[str, int]]:
    batch = signature.batch_dim
    smallest = {d: r.min for d, r in signature.dims.items() if d != batch}
    return [*probe_cases(signature), signature.sizes(**smallest)]


def _in_steps(bounds: DimRange, step: int) -> DimRange | None:
    """Returns the range of the multiples of ``step`` in ``bounds``, or None if there are fewer than two multiples."""
    found = DimRange.within(bounds.min, bounds.opt, bounds.max, step)
    return found if found is not None and found.min < found.max else None


def output_specs(
    signature: Signature,
    cases: Sequence[Mapping[str, int]],
    runs: Sequence[Mapping[str, np.ndarray]],
    where: str,
    names: Mapping[str, str] | None = None,
) -> tuple[TensorSpec, ...]:
    """Derives the specs of a model's outputs from several runs. ``cases`` has the dim sizes of each run, and ``runs``
    has the outputs of each run.

    A dim with the same size in all runs is fixed. An output dim gets the name of an input dim, or of a sum of dims in
    an input, if both always have the same size. The cache of a decoder may also have ``past+sequence`` tokens. Any
    other dim is called ``<output>_<axis>``. ``names`` maps the model's output names to new names. Raises ``BadSource``
    if the rank of an output varies.
    """
    specs = []
    known = dict.fromkeys([*signature.dims, *(d for spec in signature.inputs for d in spec.shape if is_sum(d))])
    if {PAST, SEQUENCE} <= signature.dims.keys():
        known[TOTAL] = None
    if other := next((run for run in runs if set(run) != set(runs[0])), None):
        name = sorted(set(other) ^ set(runs[0]))[0]
        raise BadSource(
            f"{where} returns the tensor {name!r} only at some sizes of its inputs; return the same tensors at every "
            f"size, or give every dim a fixed size with {option('inputs')}"
        )
    for name, value in runs[0].items():
        if any(run[name].ndim != value.ndim for run in runs):
            raise BadSource(
                f"the output {name!r} of {where} changes its rank with the size of the input; "
                "return tensors of a fixed rank"
            )
        shape: list[Dim] = []
        for axis in range(value.ndim):
            sizes_seen = [run[name].shape[axis] for run in runs]
            if len(set(sizes_seen)) == 1:
                shape.append(sizes_seen[0])
            else:
                same = [dim for dim in known if [size_at(dim, case) for case in cases] == sizes_seen]
                shape.append(same[0] if same else f"{name}_{axis}")
        dtype = "string" if value.dtype.kind in "OUS" else str(value.dtype)
        specs.append(TensorSpec((names or {}).get(name, name), dtype, tuple(shape)))
    return tuple(specs)
