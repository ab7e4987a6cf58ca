"""Reads weights from a .safetensors file, from the shards that an index file lists, or from a file of torch.save (such
as a .ckpt file of Lightning or Fabric)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel
from accel.spelling import option

from .checkpoint import Checkpoint, LazyTensor
from .unpickle import read_torch

# The keys of the state dict in the checkpoint files of various trainers.
_NESTED = ("state_dict", "model_state_dict", "model", "module")
# Suffixes of files that hold only one rank's shard.
_SHARES = ("_model_states.pt", "_optim_states.pt", ".distcp", "model_optim_rng.pt")


def detect(path: Path) -> bool:
    """Tells whether ``path`` is a file."""
    return path.is_file()


def read(path: Path) -> Checkpoint:
    """Reads the tensors of one file, or of the shards that an index file lists."""
    if path.name.endswith(_SHARES):
        raise BadSource(
            f"{path} is one rank's part of a checkpoint; give the checkpoint's folder: {option('weights', path.parent)}"
        )
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save the weights again")
    if path.name.endswith(".json"):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return Checkpoint(format="safetensors", path=path, tensors=safetensors(path), files=(path,))
    body = read_torch(path)
    kind = "PyTorch state dict"
    if isinstance(body, dict) and "pytorch-lightning_version" in body:
        kind = f"Lightning checkpoint ({body['pytorch-lightning_version']})"
    return Checkpoint(format=kind, path=path, tensors=_state(body, path), files=(path,))


def safetensors(path: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a .safetensors file. A tensor is read only when it is used."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidModel(f"{path} is no safetensors file or is truncated; save the weights again") from error

    def get(name: str) -> torch.Tensor:
        with safe_open(str(path), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return {name: LazyTensor(shape=shape, read=partial(get, name)) for name, shape in shapes.items()}


def _sharded(index: Path) -> Checkpoint:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidModel(f"{index} is no safetensors index (it has no weight_map); save the weights again") from error
    found: dict[str, LazyTensor] = {}
    files = [index]
    for name in names:
        if Path(name).name != name:
            raise InvalidModel(f"{index} points to the file {name!r} outside its folder; save the weights again")
        shard = index.with_name(name)
        if not shard.is_file():
            raise BadSource(f"{index} names the shard {name}, which is missing; put the shard into the same folder")
        found |= safetensors(shard) if shard.suffix == ".safetensors" else _state(read_torch(shard), shard)
        files.append(shard)
    absent = [name for name in weight_map if name not in found]
    if absent:
        raise InvalidModel(
            f"{index} names the tensor {absent[0]!r}, which is in none of its shards; save the weights again"
        )
    return Checkpoint(format="sharded weights", path=index, tensors=found, files=tuple(files))


def _state(body: Any, path: Path) -> dict[str, LazyTensor]:
    for key in _NESTED:
        if isinstance(body, Mapping) and isinstance(body.get(key), Mapping) and body[key]:
            body = body[key]
            break
    # Leaves out the entries with the suffix ``_extra_state``, which Transformer Engine and torch.nn save for objects
    # other than tensors.
    tensors = (
        {n: v for n, v in body.items() if not str(n).endswith("_extra_state")} if isinstance(body, Mapping) else {}
    )
    if not tensors or not all(isinstance(v, torch.Tensor) for v in tensors.values()):
        raise BadSource(f"{path} is no state dict (tensors by name); save model.state_dict()")
    return {str(name): LazyTensor.of(value) for name, value in tensors.items()}
