"""State dicts from files, read without executing anything in them."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from accel.errors import BadSource, InvalidModel

# Where trainers put the state dict inside what they save.
_NESTED = ("state_dict", "model_state_dict", "model")
# What wrappers put in front of every name.
_PREFIXES = ("module.", "_orig_mod.")


def load_weights(module: torch.nn.Module, path: Path) -> list[Path]:
    """Load ``path`` (.safetensors, sharded safetensors' index.json, .pt, .pth, .bin, .ckpt) into ``module``.

    Returns the files that were read. Names must match exactly, wrappers' prefixes aside; ``BadSource`` names the first
    that doesn't. Pickles are read with ``weights_only=True``: one that holds code is refused.
    """
    if not path.is_file():
        raise BadSource(f"{path} does not exist; check --weights")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; save the weights again")
    if path.name.endswith(".json"):
        state, files = _sharded(path)
    elif path.suffix == ".safetensors":
        state, files = _safetensors(path), [path]
    else:
        state, files = _pickled(path), [path]
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    wanted = module.state_dict()
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    if missing or unexpected:
        what = f"lacks {missing[0]!r}" if missing else f"holds {unexpected[0]!r}, which the model doesn't have"
        raise BadSource(
            f"{path} {what} ({len(missing)} missing, {len(unexpected)} unexpected); "
            "give the weights of this factory's model"
        )
    for name, value in state.items():
        if tuple(value.shape) != tuple(wanted[name].shape):
            raise BadSource(
                f"{path}: {name!r} is {list(value.shape)}, the model's is {list(wanted[name].shape)}; "
                "give the weights of this factory's model"
            )
    module.load_state_dict(state, strict=True)
    return files


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidModel(f"{path} is no safetensors file or is truncated; save the weights again") from error


def _sharded(index: Path) -> tuple[dict[str, torch.Tensor], list[Path]]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidModel(f"{index} is no safetensors index (it has no weight_map); save the weights again") from error
    state: dict[str, torch.Tensor] = {}
    files = [index]
    for name in names:
        if Path(name).name != name:
            raise InvalidModel(f"{index} points to {name!r} outside its folder; refused")
        shard = index.with_name(name)
        if not shard.is_file():
            raise BadSource(f"{index} names the shard {name}, which is not beside it; put it there")
        state |= _safetensors(shard)
        files.append(shard)
    absent = [name for name in weight_map if name not in state]
    if absent:
        raise InvalidModel(f"{index} names {absent[0]!r}, which is in none of its shards; save the weights again")
    return state, files


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of here is refused below
            body: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadSource(
            f"{path} holds more than weights (or is no PyTorch file) and is not unpickled; "
            "save model.state_dict() alone, best as .safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InvalidModel(f"{path} is no PyTorch file or is truncated; save the weights again") from error
    for key in _NESTED:
        if isinstance(body, dict) and isinstance(body.get(key), dict):
            body = body[key]
            break
    if not isinstance(body, dict) or not all(isinstance(v, torch.Tensor) for v in body.values()) or not body:
        raise BadSource(f"{path} is not a state dict (tensors by name); save model.state_dict()")
    return {str(name): value for name, value in body.items()}
