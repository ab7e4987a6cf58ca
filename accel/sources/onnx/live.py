"""Writes an ONNX model from memory to the cache."""

from __future__ import annotations

from pathlib import Path

import onnx

from accel.artifact import text_sha256
from accel.cache import StageCache
from accel.errors import InvalidModel, one_line

# If a model has at least this number of bytes, its weights go to a file beside the model, because protobuf can't
# serialize messages above 2 GiB.
_LARGE = 1 << 30


def capture(model: onnx.ModelProto) -> Path:
    """Writes ``model`` to the cache. Returns the path of the file. ``model`` isn't changed.

    Raises ``InvalidModel`` if the weights of ``model`` are in an external file, or if ``model`` can't be written.
    """
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise InvalidModel(
                f"the weights of {model.graph.name or 'the model'} are in an external file; give the path of the .onnx "
                "file, or load the model with onnx.load, which also reads the weights"
            )
    cache = StageCache()
    body = model.SerializeToString(deterministic=True) if model.ByteSize() < _LARGE else None
    key = text_sha256(f"onnx {body!r}") if body is not None else text_sha256(str(model.graph))
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in model.graph.name) or "model"
    path = cache.entry(key) / f"{name[:80]}.onnx"
    if not path.is_file():
        with cache.scratch() as folder:
            try:
                if body is not None:
                    (folder / path.name).write_bytes(body)
                else:
                    copied = onnx.ModelProto()
                    copied.CopyFrom(model)
                    onnx.save(copied, folder / path.name, save_as_external_data=True, location=f"{path.name}.data")
            except ValueError as error:
                raise InvalidModel(
                    f"the model can't be written ({one_line(error, 120)}); give the path of its file"
                ) from error
            cache.keep(key, folder)
    return path
