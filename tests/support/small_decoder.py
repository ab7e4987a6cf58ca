"""Makes small decoders with random weights, large enough that every fault in a cache changes the logits, and small LoRA
adapters in the form of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

Tensors = dict[str, torch.Tensor]

# The bytes of all texts are tokens, after three special tokens.
BYTE_VOCABULARY = 259


def small_config(kind: str, **fields: Any) -> Any:
    """Returns a config of transformers for a decoder of two layers, with 4 heads of attention and 2 of keys and values
    where the kind has fewer."""
    from transformers import AutoConfig

    usual = {
        "vocab_size": BYTE_VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
    }  # fmt: skip
    bare = AutoConfig.for_model(kind)
    known = {name: value for name, value in usual.items() if hasattr(bare, name) and not _is_read_only(bare, name)}
    return type(bare)(**{**known, **fields})


def _is_read_only(config: Any, name: str) -> bool:
    kind = getattr(type(config), name, None)
    return isinstance(kind, property) and kind.fset is None


def small_decoder(kind: str = "llama", **fields: Any) -> Any:
    """Returns a causal language model of transformers with random weights. ``fields`` are fields of its config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(kind, **fields)).eval()


def save_decoder(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    """Saves a small decoder as transformers does, and returns the folder."""
    small_decoder(kind, **fields).save_pretrained(folder)
    return folder


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def save_byte_tokenizer(folder: Path, template: str | None = CHAT) -> Path:
    """Writes a tokenizer whose tokens are bytes, with the special tokens <pad> 0, <s> 1 and </s> 2."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


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
