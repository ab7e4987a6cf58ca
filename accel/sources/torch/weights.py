"""Loads weights from a checkpoint's file or folder into a module, without executing pickled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from accel.errors import BadSource

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.names import fit

# The values of ``weights_dtype``.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_weights(module: torch.nn.Module, path: Path, dtype: str = "") -> Checkpoint:
    """Loads the weights in ``path`` into ``module``. ``path`` is one file (.safetensors, a sharded index, .pt, .pth,
    .bin, .ckpt) or the folder of a training checkpoint (see ``accel.sources.checkpoints.checkpoint.FORMATS``).

    Returns the loaded checkpoint with its format, files and notes. Reads and copies one tensor at a time. A module that
    loads state dicts in its own way gets all tensors at once. Raises ``BadSource`` if ``path`` is a pickle that
    contains code. Ignores the prefixes that wrappers add to the names of weights. Raises ``BadSource`` with the first
    name that doesn't match the module.

    Rounds float weights to ``dtype`` (a name in ``DTYPES``), as training in this dtype does. "" takes the weights as
    saved, or the float32 master weights if the checkpoint has them. The dtypes of the module don't change.
    """
    checkpoint = fit(open_checkpoint(path), module)
    if dtype:
        tensors = {n: replace(t, read=partial(_rounded, t.read, DTYPES[dtype])) for n, t in checkpoint.tensors.items()}
        notes = (*checkpoint.notes, f"the weights were rounded to {dtype}")
        checkpoint = replace(checkpoint, tensors=tensors, notes=notes)
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    if any(tensor.is_meta for tensor in own.values()):
        raise BadSource(f"the model for {path} is on the meta device; let the factory create the model on the CPU")
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
                    f"the tensor {name!r} has the dtype {value.dtype} in the file {path}, but the dtype "
                    f"{own[name].dtype} in the model; give the weights of this factory's model"
                )
            own[name].copy_(value)
    return checkpoint


def _rounded(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    value = read()
    return value.to(dtype) if value.is_floating_point() else value


def _loads_its_own_way(module: torch.nn.Module) -> bool:
    """Tells whether a submodule changes how a state dict is loaded."""
    plain = torch.nn.Module._load_from_state_dict
    kinds = (type(part) for part in module.modules())
    return any(
        kind._load_from_state_dict is not plain and not kind.__module__.startswith("torch.nn.modules.")
        for kind in kinds
    ) or any(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in module.modules())
