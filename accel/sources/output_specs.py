"""Which dims of a model's outputs follow which dims of its inputs: seen by running it at several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accel.errors import BadSource
from accel.signature import Dim, Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np


def probe_cases(signature: Signature) -> list[dict[str, int]]:
    """The usual sizes, then for each dynamic dim another size of it with the rest as they were."""
    cases = [dict(signature.sizes())]
    for dim, bounds in signature.dims.items():
        size = next((s for s in (bounds.opt + 1, bounds.opt + 2, bounds.opt - 1, bounds.opt - 2) if s <= bounds.max), 0)
        if size >= bounds.min and size != bounds.opt:
            cases.append(signature.sizes(**{dim: size}))
    return cases


def output_specs(
    signature: Signature,
    cases: Sequence[Mapping[str, int]],
    runs: Sequence[Mapping[str, np.ndarray]],
    where: str,
    names: Mapping[str, str] | None = None,
) -> tuple[TensorSpec, ...]:
    """The outputs of ``runs`` (one for each of ``cases``) as specs: a dim that never changed is fixed, one that went
    with an input's dim has its name, any other is ``<output>_<axis>``. ``names``: what outputs are to be called.

    Raises ``BadSource`` where an output changes its rank.
    """
    specs = []
    for name, value in runs[0].items():
        if any(run[name].ndim != value.ndim for run in runs):
            raise BadSource(
                f"the output {name!r} of {where} changes its rank with the input's size; that can't be exported"
            )
        shape: list[Dim] = []
        for axis in range(value.ndim):
            sizes_seen = [run[name].shape[axis] for run in runs]
            if len(set(sizes_seen)) == 1:
                shape.append(sizes_seen[0])
            else:
                same = [d for d in signature.dims if [case[d] for case in cases] == sizes_seen]
                shape.append(same[0] if same else f"{name}_{axis}")
        dtype = "string" if value.dtype.kind in "OUS" else str(value.dtype)
        specs.append(TensorSpec((names or {}).get(name, name), dtype, tuple(shape)))
    return tuple(specs)
