"""A folder written by transformers' ``save_pretrained``: config.json and safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel, MissingExtra, one_line
from accel.signature import DimRange, TensorSpec
from accel.sources.torch_source import Found


def open_folder(folder: Path) -> Found:
    """The model of ``folder``, by the architecture its config names. Nothing in the folder is executed or unpickled."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise BadSource(f"{folder} has no config.json; give a folder written by save_pretrained or by accel train")
    try:
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or [""])[0]
    except (ValueError, AttributeError) as error:
        raise InvalidModel(f"{config_file} is no JSON object; save the model again") from error
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise BadSource(f"{folder} has no .safetensors file; save the model with save_pretrained (safetensors)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "examples") from error
    kind = getattr(transformers, architecture, None) or transformers.AutoModel
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        module = kind.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    except Exception as error:
        reason = one_line(error, 200)
        raise InvalidModel(f"transformers can't load {folder} as {kind.__name__}: {reason}") from error
    inputs, dims = _inputs(module)
    index = folder / "model.safetensors.index.json"
    files = (*weights, *([index] if index.is_file() else []), config_file)
    return Found(module=module, path=config_file, files=files, inputs=inputs, dims=dims)


def _inputs(module: Any) -> tuple[tuple[TensorSpec, ...], dict[str, DimRange]]:
    """What the model takes, from its config; nothing where that doesn't tell (the user then passes --input)."""
    config = module.config
    if module.main_input_name == "input_ids" and getattr(config, "vocab_size", None):
        shape = ("batch", "sequence")
        last = int(config.vocab_size) - 1
        specs = [TensorSpec("input_ids", "int64", shape, (0, last)), TensorSpec("attention_mask", "int64", shape)]
        if getattr(config, "type_vocab_size", 0) > 1:
            specs.append(TensorSpec("token_type_ids", "int64", shape, (0, int(config.type_vocab_size) - 1)))
        longest = int(getattr(config, "max_position_embeddings", 512))
        if getattr(config, "pad_token_id", None) and config.model_type in (
            "roberta",
            "xlm-roberta",
            "camembert",
            "mpnet",
        ):
            longest -= int(config.pad_token_id) + 1  # these count positions from the padding index on
        longest = min(longest, 512)
        return tuple(specs), {
            "batch": DimRange(1, 1, 8),
            "sequence": DimRange(min(8, longest), min(128, longest), longest),
        }
    size = getattr(config, "image_size", None)
    if module.main_input_name == "pixel_values" and size:
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        channels = int(getattr(config, "num_channels", 3))
        return (TensorSpec("pixel_values", "float32", ("batch", channels, height, width)),), {
            "batch": DimRange(1, 1, 8)
        }
    return (), {}
