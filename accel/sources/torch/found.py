"""Defines ``Found``, which holds an opened PyTorch module and the known facts about its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel.signature import DimRange, Signature, TensorSpec

from ..checkpoints.checkpoint import Checkpoint
from ..structure import Template


@dataclass(frozen=True, kw_only=True)
class Found:
    """A module, the files that it was read from, and the inputs that the spec declares.

    ``path`` is the main file. ``inputs``, ``outputs`` and ``dims`` are empty if the spec doesn't declare them.
    ``checkpoint`` holds the weights that were loaded into the module. ``forms`` lists possible signatures of the
    module. Running the module shows which signature is right. ``example`` holds example declarations of the module's
    inputs, and ``tensors`` holds example tensors by name. ``name`` is the name of a live module in messages. ``live``
    holds the facts that the manifest records about a live module. ``arguments`` maps the parameters of ``forward`` to
    the structure of their arguments, if the file of the model tells it.
    """

    module: torch.nn.Module
    path: Path
    files: tuple[Path, ...]
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    dims: Mapping[str, DimRange] | None = None
    checkpoint: Checkpoint | None = None
    forms: tuple[Signature, ...] = ()
    example: tuple[str, ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    name: str = ""
    live: Mapping[str, Any] | None = None
    arguments: Mapping[str, Template] = field(default_factory=dict)
