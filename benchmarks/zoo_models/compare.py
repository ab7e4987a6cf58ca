"""Compares the outputs of a file with the outputs of a model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# The largest relative error that counts as rounding. In the zoo's small nets, the rounding errors of float32 stay below
# this limit.
LIMIT = 1e-3


def leaves(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a result, in order. Arrays become tensors."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, np.ndarray | np.generic):
        return [torch.from_numpy(np.asarray(value))]
    if hasattr(value, "numpy") and not isinstance(value, type):  # a tensor of TensorFlow
        return [torch.from_numpy(np.asarray(value.numpy()))]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple | set):
        return [leaf for item in value for leaf in leaves(item)]
    if layers := getattr(value, "layers", None):  # a cache of transformers
        kept = [[getattr(layer, "keys", None), getattr(layer, "values", None)] for layer in layers]
        return [tensor for pair in kept for tensor in pair if isinstance(tensor, torch.Tensor)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name))]
    return []


def call(module: Any, arguments: Any) -> Any:
    """Calls ``module`` with a tuple or a dict of arguments."""
    with torch.no_grad():
        return module(**arguments) if isinstance(arguments, dict) else module(*arguments)


def copied(value: Any) -> Any:
    """Returns the arguments with copies of all tensors, for a model that writes to its inputs."""
    return copy.deepcopy(value)


def in_double(value: Any) -> Any:
    """Returns the arguments with all float32 tensors converted to float64."""
    if isinstance(value, torch.Tensor):
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        return value.to(wide.get(value.dtype, value.dtype))
    if isinstance(value, dict):
        return {key: in_double(item) for key, item in value.items()}
    return type(value)(map(in_double, value)) if isinstance(value, list | tuple) else value


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Returns the largest relative error of a tensor, or infinity if a shape, an integer or a NaN differs."""
    if len(found) != len(wanted):
        return float("inf")
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        if tuple(one.shape) != tuple(other.shape):
            return float("inf")
        if not (other.is_floating_point() or other.is_complex()):
            if not torch.equal(one.to(torch.int64), other.to(torch.int64)):
                return float("inf")
            continue
        a, b = (torch.nan_to_num(t.to(torch.complex128 if t.is_complex() else torch.float64)) for t in (one, other))
        odd = [~torch.isfinite(t) for t in (one, other)]
        # For a masked value, one of the two tensors may have -1e38 and the other tensor minus infinity.
        if bool((odd[0] != odd[1]).any()):
            odd = [t.abs() > 1e30 for t in (a, b)]
            if bool((odd[0] != odd[1]).any()):
                return float("inf")
        kept = ~odd[1] & (b.abs() < 1e30)
        a, b = a[kept], b[kept]
        scale = float(torch.linalg.vector_norm(b)) or 1.0
        worst = max(worst, float(torch.linalg.vector_norm(a - b)) / scale)
    return worst


def judged(module: Any, arguments: Any, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> tuple[float, bool]:
    """Returns the error of ``found`` against the model in float32, and whether ``found`` counts as right.

    If ``found`` differs much from ``wanted``, both are compared with the result of the model in float64. ``found`` then
    counts as right if its error is at most four times the error of ``wanted``.
    """
    apart = error(found, wanted)
    if apart <= LIMIT:
        return apart, True
    try:
        exact = leaves(call(copy.deepcopy(module).double(), in_double(arguments)))
        own = error(wanted, exact)
        return apart, error(found, exact) <= max(LIMIT, 4 * own) if own < 0.1 else False
    except Exception:  # some models don't run in float64
        return apart, False
