"""Makes small LoRA adapters with random matrices, in the form of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

Tensors = dict[str, torch.Tensor]


def adapter_of(model: nn.Module, names: tuple[str, ...], rank: int = 3) -> Tensors:
    """Returns random matrices A and B for each layer whose name ends with one of ``names``, as PEFT saves them."""
    made = torch.Generator().manual_seed(1)
    found: Tensors = {}
    for name, layer in model.named_modules():
        if not name.endswith(names):
            continue
        sizes = tuple(layer.weight.shape)
        place = f"base_model.model.{name}"
        if isinstance(layer, nn.Embedding):
            found[f"{place}.lora_embedding_A"] = torch.randn(rank, sizes[0], generator=made) / 4
            found[f"{place}.lora_embedding_B"] = torch.randn(sizes[1], rank, generator=made) / 4
            continue
        outputs, inputs = sizes if isinstance(layer, nn.Linear) else sizes[::-1]
        found[f"{place}.lora_A.weight"] = torch.randn(rank, inputs, generator=made) / 4
        found[f"{place}.lora_B.weight"] = torch.randn(outputs, rank, generator=made) / 4
    assert found
    return found


def save_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **fields: Any) -> Path:
    """Writes an adapter of rank 3 as PEFT does, and returns its folder. ``fields`` are fields of its config."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "base_model_name_or_path": "some/base", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder
