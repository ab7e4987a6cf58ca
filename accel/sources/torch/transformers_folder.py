"""Folders written by transformers' ``save_pretrained``: config.json and safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accel.errors import BadSource, InvalidModel, MissingExtra, one_line

from .found import Found
from .transformers_inputs import example, forms


def open_folder(folder: Path) -> Found:
    """Opens the model of ``folder`` by the architecture that its config names. Never executes or unpickles files of the
    folder.

    Raises ``BadSource`` if a file is missing, ``InvalidModel`` if transformers can't load the folder, ``MissingExtra``
    if transformers is not installed.
    """
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
        raise InvalidModel(
            f"transformers can't load {folder} as {kind.__name__} ({reason}); save the model again"
        ) from error
    index = folder / "model.safetensors.index.json"
    files = (*weights, *([index] if index.is_file() else []), config_file)
    found = forms(module, folder)
    return Found(module=module, path=config_file, files=files, forms=found, example=example(module))
