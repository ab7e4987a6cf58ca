"""Passes the inputs of a batch to a model, moves inputs and targets to a device, and names the inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel.errors import BadConfig

# A batch holds inputs and targets. Inputs and targets are a tensor, a tuple of tensors, or a dict of tensors. The
# targets are None if a rank has no sample.
Batch = tuple[Any, Any]


def call(module: nn.Module, inputs: Any) -> Any:
    """Runs ``module`` on the inputs of a batch: one tensor, a tuple of tensors, or a dict of tensors by name.

    Returns the first tensor of a tuple, and any other output unchanged.
    """
    if isinstance(inputs, Mapping):
        found = module(**inputs)
    else:
        found = module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
    return found[0] if isinstance(found, tuple) else found


def to_device(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns the inputs on ``device``. Converts floating-point inputs to ``dtype``."""
    if isinstance(inputs, Mapping):
        return {name: to_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(to_device(value, device, dtype) for value in inputs)
    return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)


def moved(targets: Any, device: torch.device) -> Any:
    """Returns the targets on ``device``: one tensor, a tuple of tensors, or a dict of tensors by name. Keeps the dtypes
    of the targets."""
    if isinstance(targets, Mapping):
        return {name: moved(value, device) for name, value in targets.items()}
    if isinstance(targets, tuple | list):
        return tuple(moved(value, device) for value in targets)
    return targets.to(device)


def one_tensor(targets: Any, who: str) -> torch.Tensor:
    """Returns ``targets`` if ``targets`` is a tensor, and raises ``BadConfig`` for a tuple or dict."""
    if not isinstance(targets, torch.Tensor):
        raise BadConfig(
            f"{who} splits the targets, so the targets can't be a tuple or dict; let the data give one target tensor"
        )
    return targets


def input_names(module: nn.Module) -> list[str]:
    """Returns the names of the parameters of ``module``'s ``forward``."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def named_inputs(names: Sequence[str], inputs: Any) -> dict[str, torch.Tensor]:
    """Returns the inputs of a batch as a dict whose keys are the names of ``forward``'s parameters."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return dict(zip(names, several, strict=False))
