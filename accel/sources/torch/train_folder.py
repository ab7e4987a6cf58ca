"""What ``accel train`` leaves: a run folder with ``final/`` in it, or that folder itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.artifact import file_sha256
from accel.errors import BadSource, InvalidModel
from accel.progress import report
from accel.sources.declare import parse_dims, parse_inputs
from accel.sources.python_object import load_object
from accel.sources.torch_source import Found, call_factory, specs_from_example
from accel.sources.weights import load_weights

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
INPUTS = "inputs.safetensors"


def final_folder(folder: Path) -> Path | None:
    """The folder of the trained model in ``folder`` or ``folder`` itself; None where accel train didn't write it."""
    for candidate in (folder, folder / "final"):
        try:
            body = json.loads((candidate / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(body, dict) and "accel_train" in body:
            return candidate
    return None


def open_train_folder(folder: Path) -> Found:
    """The trained model: its factory is called and the weights put into it; inputs from its signature or its samples.

    Raises ``InvalidModel`` where a file isn't the one that training wrote, ``BadSource`` where the factory isn't found.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        files, spec, signature = dict(config["files"]), str(config["model"]), config["signature"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModel(f"{folder / CONFIG} was not written by accel train or was changed; train again") from error
    for name, sha256 in files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file() or file_sha256(file) != sha256:
            raise InvalidModel(
                f"{file} is missing or not the file that training wrote; copy the folder again or train again"
            )
    spec = _where(folder, spec, config.get("source"), files)
    code, factory = load_object(spec, "factory")
    made = call_factory(factory, spec)
    module = made[0] if isinstance(made, tuple) else made
    if not isinstance(module, torch.nn.Module):
        raise BadSource(f"{spec} returned {type(module).__name__}; a factory returns an nn.Module")
    weights = load_weights(module, folder / INDEX).files
    if signature is not None:
        inputs, outputs = parse_inputs(signature["inputs"]), tuple(signature["outputs"])
        dims = parse_dims({name: tuple(bounds) for name, bounds in signature["dims"].items()})
    else:
        from safetensors.torch import load_file

        inputs, outputs, dims = specs_from_example(module, load_file(str(folder / INPUTS))), (), {}
    source = Path(getattr(code, "__file__", "") or "")
    return Found(
        module=module,
        path=folder / CONFIG,
        files=(*weights, folder / CONFIG, *([source] if source.is_file() else [])),
        inputs=inputs,
        outputs=outputs,
        dims=dims or None,
    )


def _where(folder: Path, spec: str, source: object, files: Mapping[str, str]) -> str:
    """The factory ``spec`` as it was trained: where it was then, or its copy in ``folder`` where that file, or one that
    it imported from beside it, is gone or has changed since."""
    where, _, name = spec.rpartition(":")
    if not isinstance(source, str) or source not in files:
        return spec
    copies = {file: sha256 for file, sha256 in files.items() if file.endswith(".py")}
    originals = {file: Path(where).with_name(file) for file in copies}
    here = {file: original for file, original in originals.items() if original.is_file()}
    changed = [str(original) for file, original in here.items() if file_sha256(original) != copies[file]]
    if changed:
        report(f"{', '.join(changed)} changed after the training: what {folder} has a copy of is used")
    return spec if len(here) == len(copies) and not changed else f"{folder / source}:{name}"
