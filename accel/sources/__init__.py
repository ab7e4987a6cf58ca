"""What a user can have, one file a kind of source, all behind ``open_source``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import KINDS, Artifact, manifest_path
from accel.errors import BadSource, UsageError

if TYPE_CHECKING:
    from accel.signature import DimRange, Signature
    from accel.sources.declare import Dims, Inputs

# The main file of an artifact that is a folder (accel optimize writes these), in the order they are looked for.
MAIN_FILES = (
    "model.onnx",
    "model.xml",
    "model.engine",
    "model.tflite",
    "model.ncnn.param",
    "model.pt2",
    "saved_model.pb",
)

# What accel optimize writes beside it: every candidate, what it measured, and which one it took.
REPORT = "optimize.json"


def main_file(folder: Path) -> Path | None:
    """The main file of the artifact in ``folder``: the one accel optimize says it chose, else the first there is."""
    try:
        chosen = json.loads((folder / REPORT).read_text(encoding="utf-8"))["chosen"]["file"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        chosen = None
    names = [chosen] if chosen in MAIN_FILES else []
    return next((folder / name for name in (*names, *MAIN_FILES) if (folder / name).is_file()), None)


def is_source(spec: str | Path) -> bool:
    """Whether ``open_source`` takes it for a model in its framework's own form, not for an artifact or an ONNX file."""
    path = Path(spec)
    if path.is_dir():
        path = main_file(path) or path
    made = path.suffix in (".tflite", ".pb", ".pt2") and manifest_path(path).is_file()
    return path.suffix not in KINDS and not made


def renaming_note(artifact: Artifact) -> str | None:
    """One sentence about an input that got another name than the parameter of ``forward`` that it goes into."""
    renamed: Mapping[str, str] = artifact.source.get("renamed") or {}
    for name, own in renamed.items():
        return f"forward calls its input {own!r}; it is {name!r} in the artifact, as --input says"
    return None


def training_note(artifact: Artifact) -> str | None:
    """One sentence about layers that run in training mode, though the model was opened in evaluation mode."""
    layers = artifact.source.get("in_training")
    if not layers:
        return None
    return f"{layers}; as it is, what a sample gives depends on the others in its batch"


def check_name(path: Path) -> None:
    """``BadSource`` for a name that is no UTF-8: no runtime opens it, and no manifest can hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise BadSource(f"{str(path)!a} is no UTF-8; rename the file or the folder") from None


def open_source(
    spec: str | Path | Artifact,
    *,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    dims: Dims | None = None,
    tensorflow: Mapping[str, Any] | None = None,
    like: Callable[[], Signature] | None = None,
) -> Artifact:
    """Whatever the user named, as an artifact: an artifact file or the folder it is in, an ONNX file from anywhere
    (``inputs`` then says no more than which integers an input takes and which dims have one size), a TensorFlow source
    (``tensorflow``: what ``tensorflow_source.open_tensorflow`` takes beside inputs and dims), or a PyTorch source (see
    ``torch_source.open_torch``, ``like``, too).

    Raises ``BadSource`` (and ``InvalidModel``) where it can't be found, read or understood.
    """
    from accel.sources.declare import parse_dims

    if isinstance(spec, Artifact):
        return spec
    path, text = Path(spec), str(spec)
    if spec == "":
        raise BadSource("no model is named; give a path, file.py:factory or package.module:factory")
    check_name(path)
    ranges: Mapping[str, DimRange] = parse_dims(dims or {})
    if path.is_dir():
        path = main_file(path) or path
    if not is_source(path):
        _check_no_tensorflow(text, tensorflow)
        if weights:
            raise UsageError(f"{path} has its own weights; leave out --weights")
        if KINDS.get(path.suffix) == "onnx":
            from accel.sources.declare import parse_inputs
            from accel.sources.onnx_file import open_onnx

            return open_onnx(path, dims=ranges, inputs=parse_inputs(inputs or ()))
        if inputs:
            raise UsageError(f"{path} has its own inputs; leave out --input")
        if not path.is_file():
            raise BadSource(f"{path} does not exist; check the path")
        return Artifact.open(path)
    from accel.sources.tensorflow_source import form_of, open_tensorflow

    if form_of(text) is not None:
        if weights:
            raise UsageError(f"{text} has its own weights; leave out --weights")
        return open_tensorflow(text, inputs=inputs, dims=ranges, **(tensorflow or {}))
    _check_no_tensorflow(text, tensorflow)
    from accel.sources.torch_source import open_torch

    return open_torch(text, inputs=inputs, weights=weights, dims=ranges, like=like)


def _check_no_tensorflow(text: str, tensorflow: Mapping[str, Any] | None) -> None:
    from accel.sources.tensorflow_source import option_name

    if given := [name for name, value in (tensorflow or {}).items() if value]:
        raise UsageError(f"{text} is no TensorFlow model; leave out {option_name(given[0])}")
