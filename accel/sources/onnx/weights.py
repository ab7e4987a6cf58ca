"""Handles detached weights, which stay on disk so that a stage can process a model that is larger than memory.

``read_detached`` leaves large tensors on disk if the model has more than ``DETACHED_BYTES`` of external data. A
detached tensor refers to its file by an absolute path. With ``held_in_memory``, a detached tensor refers to an array
instead. In a model that ``write_onnx`` writes, a tensor refers to its data file by a relative path. ``weight_array``
memory-maps the file of a detached tensor. ``write_onnx`` copies detached tensors piece by piece.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from .file import SMALL_BYTES, external_files, read_proto, read_without_weights
from .light import read_light
from .output_shapes import with_output_shapes

if TYPE_CHECKING:
    import numpy as np
    import onnx

DETACHED_BYTES = 128 << 20

_PIECE = 1 << 22  # numbers in a chunk

# This metadata key of a detached tensor records the dtype of the values in the tensor's file. A tensor has this key
# only if reading converts the values to another dtype.
_STORED_AS = "stored_as"

# The arrays of ``held_in_memory``, by the location in the tensors that refer to them.
_held: dict[str, np.ndarray] = {}


@contextlib.contextmanager
def held_in_memory(arrays: Sequence[np.ndarray]) -> Iterator[list[str]]:
    """Yields a location for each array. Within the ``with`` block, a detached tensor with this location has the values
    of the array."""
    folder = Path(Path.cwd().anchor, f"in-memory-{uuid.uuid4().hex}")
    locations = [str(folder / str(index)) for index in range(len(arrays))]
    _held.update(zip(locations, arrays, strict=True))
    try:
        yield locations
    finally:
        for location in locations:
            del _held[location]


def read_detached(path: Path) -> onnx.ModelProto:
    """Reads the model in ``path`` with its weights. Large weights stay on disk if the model file or its external data
    has more than ``DETACHED_BYTES``.

    Raises ``InvalidModel`` in the same cases as ``read_proto``.
    """
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    files = [path.with_name(name) for name in external_files(read_without_weights(path))]
    if not files and path.stat().st_size > DETACHED_BYTES:
        with contextlib.suppress(ValueError, DecodeError):  # read_proto says what is wrong with the file
            return with_output_shapes(read_light(path, SMALL_BYTES, detached=True))
    model = read_proto(path)
    if sum(file.stat().st_size for file in files if file.is_file()) <= DETACHED_BYTES:
        return read_proto(path, weights=True)
    for tensor in model.graph.initializer:
        if not uses_external_data(tensor):
            continue
        if _wide(tensor) and _bytes(tensor) > SMALL_BYTES:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = str(path.with_name(entry.value).absolute())
        else:
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model


def _wide(tensor: onnx.TensorProto) -> bool:
    """Tells whether numpy can memory-map the tensor. Numpy has no dtypes of less than one byte."""
    from onnx import TensorProto

    return tensor.data_type not in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1)


def _bytes(tensor: onnx.TensorProto) -> int:
    from onnx import helper

    count: int = math.prod(tensor.dims)
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def is_detached(tensor: onnx.TensorProto) -> bool:
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    return Path(location).is_absolute()


def detached_bytes(model: onnx.ModelProto) -> int:
    """Returns the number of bytes of the detached weights of ``model``."""
    return sum(_bytes(tensor) for tensor in model.graph.initializer if is_detached(tensor))


def weight_array(tensor: onnx.TensorProto, *, widened: bool = False) -> np.ndarray:
    """Returns the values of a tensor, detached or not. If a detached tensor has the same dtype as in its file, the
    result is a memory map of the file. With ``widened``, 16-bit floats are returned as float32, which represents them
    exactly."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    wide = widened and tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    if not is_detached(tensor):
        value = np.asarray(numpy_helper.to_array(tensor))
        return value.astype(np.float32) if wide else value
    mapped = _mapped(tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if mapped.dtype == kind and not wide:
        return mapped
    made = np.empty(mapped.shape, np.float32 if wide else kind)
    for start, piece in _pieces(mapped):
        made.reshape(-1)[start : start + piece.size] = rounded(piece, kind)
    return made


def rounded_later(tensor: onnx.TensorProto, data_type: int, name: str) -> onnx.TensorProto:
    """Copies a detached float32 tensor under the name ``name``. The values aren't rounded to 16-bit floats until the
    copy is read."""
    import onnx

    made = onnx.TensorProto()
    made.CopyFrom(tensor)
    made.name = name
    made.data_type = data_type
    made.external_data.add(key=_STORED_AS, value=str(tensor.data_type))
    return made


def attach(tensor: onnx.TensorProto) -> None:
    """Reads the values of a detached tensor from its file and stores them in the tensor."""
    raw = b"".join(raw_pieces(tensor))
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = raw


def raw_bytes(tensor: onnx.TensorProto) -> int:
    """Returns the number of bytes of a tensor, detached or not, in the format of ``raw_data``."""
    return _bytes(tensor) if is_detached(tensor) else len(tensor.raw_data)


def raw_pieces(tensor: onnx.TensorProto) -> Iterator[bytes]:
    """Yields the bytes of a tensor, detached or not, in the format of ``raw_data``. The bytes of a detached tensor come
    in chunks."""
    from onnx import helper

    if not is_detached(tensor):
        yield tensor.raw_data
        return
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    for _, piece in _pieces(_mapped(tensor)):
        yield rounded(piece, kind).tobytes()


def _pieces(mapped: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields small chunks of a tensor, and the index of each chunk's first value."""
    flat = mapped.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield start, flat[start : start + _PIECE]


def _mapped(tensor: onnx.TensorProto) -> np.ndarray:
    import numpy as np
    from onnx import helper

    entries = {entry.key: entry.value for entry in tensor.external_data}
    kind = helper.tensor_dtype_to_np_dtype(int(entries.get(_STORED_AS, tensor.data_type)))
    if (held := _held.get(entries["location"])) is not None:
        return held.reshape(tuple(tensor.dims))
    offset = int(entries.get("offset") or 0)
    return np.memmap(entries["location"], kind, "r", offset, tuple(tensor.dims))


def rounded(value: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Returns ``value`` rounded to a 16-bit float format. Finite numbers stay finite, so that a mask of -1e9 becomes
    the lowest finite number."""
    import ml_dtypes
    import numpy as np

    if value.dtype == kind:
        return value
    top = float(ml_dtypes.finfo(kind).max)
    bounded = np.where(np.isfinite(value), np.clip(value, -top, top), value)
    return bounded.astype(kind)
