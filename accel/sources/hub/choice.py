"""Chooses the files of a repository that accel reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from accel.errors import BadSource, InvalidModel

from ..onnx.file import external_files, read_without_weights
from .model_id import ModelId

# The library sentence-transformers stores each module in a folder such as 1_Pooling.
_FOLDER = r"(?P<folder>(?:\d+_[^/]+/)?)"
_CONFIG = re.compile(_FOLDER + r"[^/]+\.(json|txt|model)")
_SAFETENSORS = re.compile(_FOLDER + r"model(-\d+-of-\d+)?\.safetensors")
_PICKLED = re.compile(_FOLDER + r"pytorch_model(-\d+-of-\d+)?\.bin")
# Names of a smaller or faster copy of model.onnx, such as model_quantized.onnx or model_O2.onnx.
_COPY = re.compile(r"model_(fp16|bf16|u?int8|q?u?int8_\w+|quantized|q\d\w*|bnb4|O[1-4])\.onnx")
# The largest number of file names that a message lists.
_MOST = 8


@dataclass(frozen=True)
class Choice:
    """The files to download. ``main`` is the ONNX file to open, or "" to open the folder."""

    files: tuple[str, ...]
    main: str = ""


def choose(asked: ModelId, names: Sequence[str]) -> Choice:
    """Chooses which of a repository's files ``names`` to download. Returns the PyTorch weights with their configs, or
    else the repository's only ONNX model.

    Raises ``BadSource`` if the repository has nothing that accel reads, or several ONNX models.
    """
    if asked.file:
        if asked.file not in names:
            has = _listed(_onnx(names)) or "no .onnx file"
            raise BadSource(f"the repository {asked.repo} has no file {asked.file}; the repository has {has}")
        return _one_onnx(asked.file, names)
    weights = _weights(names)
    if weights and not {"config.json", "modules.json"}.isdisjoint(names):
        return Choice(tuple(sorted({*filter(_CONFIG.fullmatch, names), *weights})))
    found = _onnx(names)
    if not found:
        raise BadSource(f"{asked.repo} {_unreadable(names)}")
    main = [name for name in found if not _COPY.fullmatch(PurePosixPath(name).name)]
    if len(main) != 1:
        raise BadSource(
            f"the repository {asked.repo} has several ONNX models ({_listed(found)}); name one model, e.g. "
            f"{asked}:{(main or found)[0]}"
        )
    return _one_onnx(main[0], names)


def _weights(names: Sequence[str]) -> list[str]:
    """Returns the names of the weight files. Pickled weights are included only from folders without safetensors
    files."""
    safe = [found for name in names if (found := _SAFETENSORS.fullmatch(name))]
    folders = {found["folder"] for found in safe}
    pickled = [found for name in names if (found := _PICKLED.fullmatch(name)) and found["folder"] not in folders]
    return [found.string for found in (*safe, *pickled)]


def _onnx(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".onnx")]


def _one_onnx(main: str, names: Sequence[str]) -> Choice:
    """Returns the ONNX file ``main``, its manifest and the files beside it that are usually its external data. The
    names of all these files begin with the name of ``main``."""
    return Choice((main, *(name for name in names if name.startswith((f"{main}_", f"{main}.")))), main)


def with_external_data(choice: Choice, folder: Path, names: Sequence[str]) -> Choice:
    """Returns ``choice`` with the files of ``names`` that hold the weights of the ONNX file, which is in ``folder``.
    Returns a choice without an ONNX file unchanged. A damaged ONNX file is reported when it is opened."""
    if not choice.main or not (folder / choice.main).is_file():
        return choice
    try:
        weights = external_files(read_without_weights(folder / choice.main))
    except InvalidModel:
        return choice
    files = (str(PurePosixPath(choice.main).with_name(name)) for name in weights)
    return replace(choice, files=tuple(dict.fromkeys((*choice.files, *(name for name in files if name in names)))))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _unreadable(names: Sequence[str]) -> str:
    """Returns the part of an error message that tells why accel can't read the repository, and how to fix the
    problem."""
    if "model_index.json" in names:
        return (
            "is a pipeline of diffusers, which consists of several models; write a function that returns one of them, "
            "such as the unet, and give it as FILE.py:FUNCTION"
        )
    if "adapter_config.json" in names:
        return (
            "is an adapter of peft, not a whole model; merge it into its base model (merge_and_unload), save that with "
            "save_pretrained and give the folder"
        )
    if any(name.endswith(".gguf") for name in names):
        return "has only GGUF files, which accel doesn't read; give the repository that they were converted from"
    return (
        "has neither config.json with weights (model.safetensors, pytorch_model.bin) nor an ONNX file; write a "
        "function that loads the model and give it as FILE.py:FUNCTION"
    )
