"""Builds the zoo's models and their inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Maps each family to the module that makes the family's models.
FAMILIES = {
    "own": "zoo_models.own",
    "transformers": "zoo_models.families.transformers",
    "torchvision": "zoo_models.families.torchvision",
    "timm": "zoo_models.families.timm",
    "segmentation": "zoo_models.families.segmentation",
    "diffusers": "zoo_models.families.diffusers",
    "torchaudio": "zoo_models.families.torchaudio",
    "keras": "zoo_models.families.keras",
    "files": "zoo_models.families.files",
}


class NotMade(Exception):
    """Raised if the zoo can't make a model. If a model can't be made, the zoo doesn't count the model, because no
    exporter was tried."""


@dataclass(frozen=True)
class Case:
    """A model with its inputs.

    ``example(batch, size)`` draws the arguments of a call with torch's generator, as a tuple or a dict. ``size`` is an
    element of ``sizes``, which is ``(0,)`` if the model's inputs have a fixed size. The model is exported at the first
    size, and compared at every size.

    ``dynamic`` names the dynamic axes of the arguments in the form that ``accel.export`` takes. If ``dynamic`` is None,
    only the batch may be dynamic.

    For a model that ONNX can't express, ``refusal`` is a text that the error message of ``accel.export`` must contain.
    A model that draws random numbers needs no ``refusal``, because the zoo detects such models itself. ``words`` holds
    further arguments of ``accel.export``.
    """

    module: Any
    example: Callable[[int, int], Any]
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    sizes: tuple[int, ...] = (0,)
    is_torch: bool = True
    refusal: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


def names_of(family: str) -> tuple[str, ...]:
    """Returns the names of the models of ``family``."""
    module = importlib.import_module(FAMILIES[family])
    return tuple(module.names() if hasattr(module, "names") else module.NAMES)


def make(family: str, name: str) -> Case:
    """Builds a model with random weights. Raises ``NotMade`` if the zoo can't make the model."""
    import random

    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    made: Case = importlib.import_module(FAMILIES[family]).make(name)
    if made.is_torch:
        made.module.eval()
    return made
