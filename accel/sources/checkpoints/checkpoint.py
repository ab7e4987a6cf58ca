"""Checkpoints of trainers, read without their libraries: what one is, and the table of formats."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel, one_line

# Each module has detect(path) -> bool and read(path) -> Checkpoint; the first that detects its format reads. A folder
# of the transformers Trainer holds DeepSpeed's files beside model.safetensors: DeepSpeed, with the float32 weights, is
# first.
FORMATS = (
    "accel.sources.checkpoint_deepspeed",
    "accel.sources.checkpoint_megatron",
    "accel.sources.checkpoint_dcp",
    "accel.sources.checkpoint_folder",
    "accel.sources.checkpoint_file",
)


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor of a checkpoint that is put together when ``read`` is called, so that one is in memory at a time."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor) -> LazyTensor:
        """A tensor that is there already (mapped from its file, mostly)."""
        return LazyTensor(shape=tuple(tensor.shape), read=lambda: tensor)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The weights of one model by name, whole, whatever ranks they were spread over.

    ``files``: every file that was read. ``notes``: what was chosen on the way (master weights, a prefix), for the
    manifest. ``spare``: names that the model needn't have (optimizer states, copies of tied weights).
    """

    format: str
    path: Path
    tensors: Mapping[str, LazyTensor]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    spare: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """For the manifest; the sha256 of the files stand beside it."""
        return {"format": self.format, "path": str(self.path), "notes": list(self.notes)}


def detect(path: Path) -> Any | None:
    """The module that reads ``path``, or None."""
    modules = (importlib.import_module(name) for name in FORMATS)
    return next((module for module in modules if module.detect(path)), None)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the file or folder ``path``; nothing in it is executed.

    Raises ``BadSource`` where it can't be found or is no format of the table, ``InvalidModel`` where it is damaged.
    """
    if not path.exists():
        raise BadSource(f"{path} does not exist; check --weights")
    reader = detect(path)
    if reader is None:
        raise BadSource(
            f"{path} is no checkpoint that accel reads: it has no DeepSpeed 'latest', no .metadata of "
            "torch.distributed.checkpoint, no Megatron mp_rank_XX folders, no model.safetensors and no "
            "pytorch_model.bin; give the folder that has one of them"
        )
    try:
        checkpoint: Checkpoint = reader.read(path)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError, OverflowError) as error:
        reason = one_line(error, 160)  # a damaged file holds anything anywhere
        raise InvalidModel(
            f"{path} isn't laid out as its trainer does ({reason}); save the checkpoint again"
        ) from error
    if not checkpoint.tensors:
        raise InvalidModel(f"{path} holds no weights; save the checkpoint again")
    return checkpoint


def part_of(parts: list[torch.Tensor], offset: int, count: int) -> torch.Tensor:
    """``count`` numbers from ``offset`` on of the flat tensors in ``parts`` laid end to end, copying only these."""
    found: list[torch.Tensor] = []
    for part in parts:
        if offset < part.numel() and count > 0:
            piece = part[offset : offset + count]
            found.append(piece)
            count -= piece.numel()
            offset = 0
        else:
            offset -= part.numel()
    return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)
