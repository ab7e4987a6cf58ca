"""Folders with whole weights in them: Accelerate's ``save_state`` and ``save_model``, the transformers Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accel.errors import BadSource
from accel.sources import checkpoint_dcp, checkpoint_file
from accel.sources.checkpoint import Checkpoint

# What they are called, in the order in which they are looked for.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
)
# What save_state calls the second model that was prepared.
_SECOND = ("model_1.safetensors", "pytorch_model_1.bin", "pytorch_model_fsdp_1.bin", "pytorch_model_fsdp_1")


def _weights(path: Path) -> Path | None:
    return next((path / name for name in _NAMES if (path / name).exists()), None)


def detect(path: Path) -> bool:
    """A folder with weights under one of their names."""
    return path.is_dir() and _weights(path) is not None


def read(path: Path) -> Checkpoint:
    """The weights of the one model in ``path``."""
    weights = _weights(path)
    assert weights is not None
    second = next((name for name in _SECOND if (path / name).exists()), None)
    if second is not None:
        raise BadSource(f"{path} holds several models; name one: --weights {weights} or --weights {path / second}")
    found = checkpoint_dcp.read(weights) if weights.is_dir() else checkpoint_file.read(weights)
    return replace(found, format=f"folder with {weights.name}" if weights.is_file() else f"FSDP folder, {found.format}")
