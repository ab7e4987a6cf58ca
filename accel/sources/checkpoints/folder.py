"""Reads folders of weights that were written by Accelerate's ``save_state`` or ``save_model``, or by the transformers
Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accel.errors import BadSource
from accel.spelling import option

from . import dcp, file
from .checkpoint import Checkpoint

# Possible names of the file with the weights, in the order of the search.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
)
# The file names that Accelerate's save_state uses for the weights of the second prepared model.
_SECOND = ("model_1.safetensors", "pytorch_model_1.bin", "pytorch_model_fsdp_1.bin", "pytorch_model_fsdp_1")


def _weights(path: Path) -> Path | None:
    return next((path / name for name in _NAMES if (path / name).exists()), None)


def detect(path: Path) -> bool:
    """Tells whether ``path`` is a folder with weights under one of the known names."""
    return path.is_dir() and _weights(path) is not None


def read(path: Path) -> Checkpoint:
    """Reads the weights of the model in ``path``. Raises ``BadSource`` if the folder holds several models."""
    weights = _weights(path)
    assert weights is not None
    second = next((name for name in _SECOND if (path / name).exists()), None)
    if second is not None:
        raise BadSource(
            f"{path} holds several models; choose one model with {option('weights', weights)} or "
            f"{option('weights', path / second)}"
        )
    found = dcp.read(weights) if weights.is_dir() else file.read(weights)
    return replace(found, format=f"folder with {weights.name}" if weights.is_file() else f"FSDP folder, {found.format}")
