"""Weights from a file or a checkpoint's folder into a module, read without executing anything in them."""

from __future__ import annotations

from pathlib import Path

import torch

from accel.errors import BadSource
from accel.sources.checkpoint import Checkpoint, open_checkpoint
from accel.sources.checkpoint_names import fit


def load_weights(module: torch.nn.Module, path: Path) -> Checkpoint:
    """Load ``path`` into ``module``: one file (.safetensors, a sharded index, .pt, .pth, .bin, .ckpt) or the folder of
    a training checkpoint (see ``accel.sources.checkpoint.FORMATS``).

    Returns what was read: format, files, notes. Names must match, wrappers' prefixes aside; ``BadSource`` names the
    first that doesn't. Tensors are put together and copied one by one. Pickles that hold code are refused.
    """
    checkpoint = fit(open_checkpoint(path), module)
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    if any(tensor.is_meta for tensor in own.values()):
        raise BadSource(f"the model that {path} is for is on the meta device; let the factory make it on the CPU")
    if _loads_its_own_way(module) or not set(checkpoint.tensors) <= set(own):
        module.load_state_dict({name: lazy.read() for name, lazy in checkpoint.tensors.items()}, strict=False)
        return checkpoint
    with torch.no_grad():
        for name, lazy in checkpoint.tensors.items():
            value = lazy.read()
            if (
                value.is_floating_point() != own[name].is_floating_point()
                or value.is_complex() != own[name].is_complex()
            ):
                raise BadSource(
                    f"{path}: {name!r} is {value.dtype}, the model's is {own[name].dtype}; "
                    "give the weights of this factory's model"
                )
            own[name].copy_(value)
    return checkpoint


def _loads_its_own_way(module: torch.nn.Module) -> bool:
    """Whether a part of the module does more with a state dict than copying it."""
    plain = torch.nn.Module._load_from_state_dict
    kinds = (type(part) for part in module.modules())
    return any(
        kind._load_from_state_dict is not plain and not kind.__module__.startswith("torch.nn.modules.")
        for kind in kinds
    ) or any(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in module.modules())
