"""``final/``: the trained model as ``accel export`` takes it.

model-00001-of-0000N.safetensors  whole tensors, and model.safetensors.index.json
config.json                       the factory (spec), sha256 of each file, the training config, metrics, the signature
inputs.safetensors                the inputs of 64 samples: where the factory declares no signature, names and ranges
come from them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel.artifact import file_sha256

FORMAT = 1
SHARD_BYTES = 4 * 2**30


def gather(state: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Whole tensors on the CPU of rank 0, None on the others; every rank has to call it. One tensor at a time is
    whole on
    the other ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if first:
            found[name] = whole.detach().cpu().contiguous().clone()
    return found if first else None


def write_final(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    *,
    model: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    example: Mapping[str, torch.Tensor],
    signature: Mapping[str, Any] | None,
) -> None:
    """Write ``folder`` beside and rename it, so that it is there whole or not at all (rank 0)."""
    from safetensors.torch import save_file

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if groups[-1] and size + tensor.nbytes > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, str(part / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    save_file({name: value.contiguous() for name, value in example.items()}, str(part / "inputs.safetensors"))
    body = {
        "accel_train": FORMAT,
        "model": model,
        "signature": signature,
        "metrics": dict(metrics),
        "train": dict(config),
        "files": {f.name: file_sha256(f) for f in sorted(part.iterdir())},
    }
    (part / "config.json").write_text(json.dumps(body, indent=2))
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    part.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
