"""A batch's inputs: given to a model, moved to its device, named."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def call(module: nn.Module, inputs: Any) -> torch.Tensor:
    """``module`` on a batch's inputs: one tensor, a tuple of them, or a dict by name."""
    if isinstance(inputs, Mapping):
        found = module(**inputs)
    else:
        found = module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
    tensor: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return tensor


def to_device(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs on ``device``, floating ones in ``dtype``."""
    if isinstance(inputs, Mapping):
        return {name: to_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(to_device(value, device, dtype) for value in inputs)
    return inputs.to(device, dtype) if inputs.is_floating_point() else inputs.to(device)


def moved(targets: Any, device: torch.device) -> Any:
    """Targets on ``device``, each in its own type: one tensor, a tuple of them, or a dict by name."""
    if isinstance(targets, Mapping):
        return {name: moved(value, device) for name, value in targets.items()}
    if isinstance(targets, tuple | list):
        return tuple(moved(value, device) for value in targets)
    return targets.to(device)


def input_names(module: nn.Module) -> list[str]:
    """The parameters of ``module``'s ``forward``."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def named_inputs(names: Sequence[str], inputs: Any) -> dict[str, torch.Tensor]:
    """A batch's inputs by the names of ``forward``'s parameters."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    several = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return dict(zip(names, several, strict=False))
