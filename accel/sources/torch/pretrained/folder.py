"""Tells which library wrote a folder, and opens the folder with that library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel
from accel.spelling import option

from ...nearby import no_model
from ..found import Found

MODULES = "modules.json"
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
_CONFIG = "config.json"


def open_folder(folder: Path, name: str = "") -> Found:
    """Opens the model in ``folder``. ``name`` is the model's name in messages, by default the folder's path.

    Raises ``BadSource`` if a file is missing or the model needs its own code. Raises ``InvalidModel`` if the library
    can't load the model. Raises ``MissingExtra`` if the library is not installed.
    """
    if not name and not any((folder / known).is_file() for known in (MODULES, ADAPTER_CONFIG, _CONFIG)):
        raise BadSource(f"the folder {folder} {no_model(folder)}")
    name = name or str(folder)
    if (folder / MODULES).is_file():
        from .sentence_folder import open_sentence_encoder

        return open_sentence_encoder(folder, name)
    if (folder / ADAPTER_CONFIG).is_file():
        raise _has_adapter(folder)
    if not (folder / _CONFIG).is_file():
        raise BadSource(
            f"the model {name} has no config.json; give a folder written by save_pretrained or by accel train"
        )
    config = read_json(folder / _CONFIG, dict)
    if "architecture" in config and "model_type" not in config:
        from .timm_folder import open_timm

        return open_timm(folder, name)
    from .transformers_folder import open_transformers

    return open_transformers(folder, name, config)


def _has_adapter(folder: Path) -> BadSource:
    """Returns the error for a folder with an adapter of PEFT. Only ``adapters`` says that it belongs to a model."""
    if (folder / _CONFIG).is_file():
        return BadSource(
            f"{folder} holds a model and an adapter; move {ADAPTER_CONFIG} and adapter_model.* to a folder of their "
            f"own, and give that with {option('adapters')} to merge them"
        )
    try:
        base = read_json(folder / ADAPTER_CONFIG, dict).get("base_model_name_or_path")
    except InvalidModel:
        base = None
    named = f", {base}," if isinstance(base, str) and 0 < len(base) < 200 else ""
    return BadSource(
        f"{folder} is an adapter, not a model; give its base model{named} and {option('adapters', str(folder))}"
    )


def read_json(path: Path, kind: type) -> Any:
    """Reads a config. Raises ``InvalidModel`` if the JSON content is not of the type ``kind``, which is dict or
    list."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(f"the file {path} holds no valid JSON config; save the model again") from error
    if not isinstance(body, kind):
        raise InvalidModel(f"the file {path} holds no valid JSON config; save the model again")
    return body


def weight_files(folder: Path, name: str) -> Sequence[Path]:
    """Returns the weight files and their index. The files are safetensors, or pickled weights if the folder has no
    safetensors.

    Raises ``BadSource`` if the folder has no weights.
    """
    for main, others in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        index = folder / f"{main}.index.json"
        found = [folder / main] if (folder / main).is_file() else sorted(folder.glob(others))
        if found:
            return [*found, *([index] if index.is_file() else [])]
    raise BadSource(f"the model {name} has no .safetensors file; save it with save_pretrained (safetensors)")
