"""Opens models that ``accel train`` trained, from the run folder or from its subfolder ``final``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.artifact import file_sha256
from accel.errors import BadSource, InvalidModel
from accel.progress import report

from ..declare import parse_dims, parse_inputs
from ..python_object import load_object
from ..run_folder import CONFIG
from .factory import call_factory, specs_from_example
from .found import Found
from .weights import load_weights

INDEX = "model.safetensors.index.json"
INPUTS = "inputs.safetensors"


def open_train_folder(folder: Path, weights_dtype: str = "") -> Found:
    """Opens the trained model by calling its factory and loading the weights. The inputs come from the recorded
    signature, or from recorded samples if no signature was recorded. Rounds the weights to ``weights_dtype``.

    Raises ``InvalidModel`` if a file is missing or was changed after the training, and ``BadSource`` if the factory is
    not found.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        files, spec, signature = dict(config["files"]), str(config["model"]), config["signature"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidModel(
            f"the file {folder / CONFIG} was changed, or accel train did not write it; train again"
        ) from error
    for name, sha256 in files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file() or file_sha256(file) != sha256:
            raise InvalidModel(
                f"the file {file} is missing or is not the file that training wrote; copy the folder again or train "
                "again"
            )
    spec = _where(folder, spec, config.get("source"), files)
    code, factory = load_object(spec, "factory")
    made = call_factory(factory, spec)
    module = made[0] if isinstance(made, tuple) else made
    if not isinstance(module, torch.nn.Module):
        raise BadSource(f"the factory {spec} returned {type(module).__name__}; return an nn.Module")
    weights = load_weights(module, folder / INDEX, weights_dtype).files
    if signature is not None:
        inputs, outputs = parse_inputs(signature["inputs"]), tuple(signature["outputs"])
        dims = parse_dims({name: tuple(bounds) for name, bounds in signature["dims"].items()})
    else:
        from safetensors.torch import load_file

        inputs, outputs, dims = specs_from_example(load_file(str(folder / INPUTS))), (), {}
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
    """Returns the spec of the factory in the version that the training used. Returns ``spec`` if the factory's file and
    the recorded files beside it are unchanged. Otherwise, returns the spec of the factory's copy in ``folder``."""
    where, _, name = spec.rpartition(":")
    if not isinstance(source, str) or source not in files:
        return spec
    copies = {file: sha256 for file, sha256 in files.items() if file.endswith(".py")}
    originals = {file: Path(where).with_name(file) for file in copies}
    here = {file: original for file, original in originals.items() if original.is_file()}
    changed = [str(original) for file, original in here.items() if file_sha256(original) != copies[file]]
    if changed:
        report(f"{', '.join(changed)} changed after the training: the copy in {folder} is used")
    return spec if len(here) == len(copies) and not changed else f"{folder / source}:{name}"
