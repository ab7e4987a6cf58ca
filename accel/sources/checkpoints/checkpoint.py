"""Opens a training checkpoint as a ``Checkpoint``, which holds the weights of one model. Reading a checkpoint doesn't
need the library that wrote it, such as DeepSpeed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel, one_line
from accel.spelling import option

# Each module has detect(path) -> bool and read(path) -> Checkpoint. The first module that detects its format reads the
# checkpoint. ``deepspeed`` comes before ``folder``, because the transformers Trainer saves a model.safetensors beside
# DeepSpeed's files. Only DeepSpeed's files hold the float32 master weights.
FORMATS = (
    "accel.sources.checkpoints.deepspeed",
    "accel.sources.checkpoints.megatron",
    "accel.sources.checkpoints.dcp",
    "accel.sources.checkpoints.folder",
    "accel.sources.checkpoints.file",
)


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor of a checkpoint. To save memory, the tensor is assembled only when ``read`` is called."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor) -> LazyTensor:
        """Wraps an existing tensor, which is usually memory-mapped from its file."""
        return LazyTensor(shape=tuple(tensor.shape), read=lambda: tensor)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Holds the weights of one model by name, merged from all ranks.

    ``files`` lists every file that was read. ``notes`` lists choices that the manifest records, such as the use of
    master weights or a removed prefix. ``spare`` lists names that may be missing in the model, such as optimizer states
    and copies of tied weights. ``rounded`` lists the weights that lack master weights in a checkpoint with master
    weights. A rounded weight that is tied to a weight with master weights gets these.
    """

    format: str
    path: Path
    tensors: Mapping[str, LazyTensor]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    spare: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Returns the format, path and notes for the manifest. The manifest lists the files and their sha256
        separately."""
        return {"format": self.format, "path": str(self.path), "notes": list(self.notes)}


def detect(path: Path) -> Any | None:
    """Returns the module that reads ``path``, or None if no format fits."""
    modules = (importlib.import_module(name) for name in FORMATS)
    return next((module for module in modules if module.detect(path)), None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in the file or folder ``path``. Executes no code from the checkpoint.

    Raises ``BadSource`` if the checkpoint is not found or has an unknown format, and ``InvalidModel`` if it is damaged.
    """
    if not path.exists():
        raise BadSource(f"the path {path} does not exist; check {option('weights')}")
    reader = detect(path)
    if reader is None:
        raise BadSource(
            f"{path} is no checkpoint that accel reads; give the folder that has one of these files or folders: "
            "DeepSpeed's latest, .metadata of torch.distributed.checkpoint, Megatron's mp_rank_XX, model.safetensors "
            "or pytorch_model.bin"
        )
    try:
        checkpoint: Checkpoint = reader.read(path)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError, OverflowError) as error:
        reason = one_line(error, 160)  # reading a damaged file raises errors of many types
        raise InvalidModel(
            f"{path} doesn't have the layout that its trainer writes ({reason}); save the checkpoint again"
        ) from error
    if not checkpoint.tensors:
        raise InvalidModel(f"{path} holds no weights; save the checkpoint again")
    return checkpoint


def part_of(parts: list[torch.Tensor], offset: int, count: int) -> torch.Tensor:
    """Concatenates the flat tensors ``parts``, and returns ``count`` numbers from ``offset`` on. Copies only the
    returned numbers."""
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
