"""Detects the kind of a live model (a model in memory), and writes the model to the cache. accel then opens the cached
file like any other file.

The file ``FACTS`` beside the cached model holds the name of the model's ``class`` and a ``note`` about its batch dim.
The field ``inputs`` holds the names of the inputs in the order of the call, if the file of the model has no order. The
field ``call`` holds the structure of the arguments and the result of the model (see ``accel.sources.structure``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel.child import resolve
from accel.errors import BadSource, UsageError
from accel.spelling import option

FACTS = "live.json"

# Maps the class of a live model (its module and name) to the function that writes such a model to the cache. Classes
# are compared by name, because importing the classes would import all frameworks.
_CAPTURED_BY = {
    ("torch.export.exported_program", "ExportedProgram"): "accel.sources.torch.live:capture_program",
    ("torch.nn.modules.module", "Module"): "accel.sources.torch.live:capture",
    ("onnx.onnx_ml_pb2", "ModelProto"): "accel.sources.onnx.live:capture",
    ("keras.src.models.model", "Model"): "accel.sources.tensorflow.live:capture",
    ("tensorflow.python.trackable.autotrackable", "AutoTrackable"): "accel.sources.tensorflow.live:capture",
}


def captured(model: Any, example: Any, dynamic: Any) -> Path:
    """Writes the live ``model`` to the cache. Returns the path of the written file.

    Raises ``BadSource`` if accel doesn't know this kind of model. Raises ``UsageError`` if ``example`` or ``dynamic``
    is given for an ONNX model or an exported program, because such a model records its own inputs.
    """
    kinds = {(kind.__module__, kind.__name__) for kind in type(model).__mro__}
    writer = next((writer for kind, writer in _CAPTURED_BY.items() if kind in kinds), None)
    if writer is None and callable(model) and not isinstance(model, type):
        writer = "accel.sources.torch.live:capture"
    if writer is None and isinstance(model, type):
        raise BadSource(f"{model.__name__} is a class, not a model; give an instance of it: {model.__name__}(...)")
    if writer is None:
        raise BadSource(
            f"{type(model).__name__} is not a model that accel reads; give a module of PyTorch, Keras or TensorFlow, "
            "an exported program, an ONNX ModelProto, or the path of a file"
        )
    write: Callable[..., Path] = resolve(writer)
    if writer.endswith(":capture_program") or ".onnx." in writer:
        for name, given in (("example", example), ("dynamic", dynamic)):
            if given is not None:
                raise UsageError(
                    f"a model of type {type(model).__name__} records its own inputs; leave out {option(name)}"
                )
        return write(model)
    return write(model, example, dynamic)


def facts_about(path: Path) -> Mapping[str, Any]:
    """Returns the contents of the file ``FACTS`` for a cached live model, or an empty dict for any other ``path``."""
    try:
        found: Mapping[str, Any] = json.loads((path.parent / FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return found
