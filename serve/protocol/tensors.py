"""Converts tensors between numpy and the raw and typed contents of the Open Inference Protocol.

Raw contents are little-endian and row-major. A ``BYTES`` element is encoded as its length in uint32, followed by its
bytes. A tensor of fixed-size elements becomes a view of the received bytes, without a copy and without a Python loop.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .inference import Code, ServeError


@dataclass(frozen=True)
class Datatype:
    """A datatype of the protocol. ``field`` is accel's name of the datatype. ``contents`` is the datatype's field in
    the typed contents, or None if only raw contents can carry the datatype."""

    name: str
    numpy: np.dtype[Any]
    field: str
    contents: str | None

    @property
    def config(self) -> str:
        """Returns the name of the datatype in ``config.pbtxt``."""
        return "TYPE_STRING" if self.name == "BYTES" else f"TYPE_{self.name}"


DATATYPES: dict[str, Datatype] = {
    d.name: d
    for d in (
        Datatype("BOOL", np.dtype(np.bool_), "bool", "bool_contents"),
        Datatype("INT8", np.dtype(np.int8), "int8", "int_contents"),
        Datatype("INT16", np.dtype(np.int16), "int16", "int_contents"),
        Datatype("INT32", np.dtype(np.int32), "int32", "int_contents"),
        Datatype("INT64", np.dtype(np.int64), "int64", "int64_contents"),
        Datatype("UINT8", np.dtype(np.uint8), "uint8", "uint_contents"),
        Datatype("UINT16", np.dtype(np.uint16), "uint16", "uint_contents"),
        Datatype("UINT32", np.dtype(np.uint32), "uint32", "uint_contents"),
        Datatype("UINT64", np.dtype(np.uint64), "uint64", "uint64_contents"),
        Datatype("FP16", np.dtype(np.float16), "float16", None),
        Datatype("BF16", np.dtype(ml_dtypes.bfloat16), "bfloat16", None),
        Datatype("FP32", np.dtype(np.float32), "float32", "fp32_contents"),
        Datatype("FP64", np.dtype(np.float64), "float64", "fp64_contents"),
        Datatype("BYTES", np.dtype(object), "string", "bytes_contents"),
    )
}
BY_FIELD = {d.field: d.name for d in DATATYPES.values()}
BY_CONFIG = {d.config: d.name for d in DATATYPES.values()}

_LENGTH = struct.Struct("<I")
_AT_ONCE = 1 << 14
_LONGEST = 60  # characters of a value in a message


def invalid(message: str) -> ServeError:
    """Returns a ``ServeError`` INVALID_ARGUMENT with the text ``message``."""
    return ServeError(Code.INVALID_ARGUMENT, message)


def get_datatype(name: str, datatype: str) -> Datatype:
    """Returns the datatype of input ``name``. Raises ``ServeError`` INVALID_ARGUMENT if the datatype is unknown."""
    found = DATATYPES.get(datatype)
    if found is None:
        raise invalid(f"unsupported data type '{datatype}' for input '{name}', use one of {', '.join(DATATYPES)}")
    return found


def element_count(name: str, shape: Sequence[int]) -> int:
    """Returns the number of elements of ``shape``. Raises ``ServeError`` INVALID_ARGUMENT if a dim is negative."""
    for size in shape:
        if size < 0:
            raise invalid(f"input '{name}' has a negative dimension in its shape {shape_text(shape)}")
    return math.prod(shape)


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape in Triton's notation, for example ``[1,16]``."""
    return f"[{','.join(map(str, shape))}]"


def decode_raw(
    name: str, datatype: str, shape: Sequence[int], data: bytes | bytearray | memoryview, model: str
) -> np.ndarray:
    """Decodes ``data`` to an array. The array is a view of ``data`` (a copy, if the numbers in
    ``data`` are not aligned in memory), or an object array of ``bytes`` for the
    datatype ``BYTES``. Raises ``ServeError`` INVALID_ARGUMENT if the size of ``data`` doesn't fit ``shape``."""
    kind = get_datatype(name, datatype)
    count = element_count(name, shape)
    if kind.name == "BYTES":
        return _split(name, data, count, model).reshape(tuple(shape))
    wanted = count * kind.numpy.itemsize
    if len(data) != wanted:
        raise invalid(
            f"input byte size mismatch for input '{name}' for model '{model}'. Expected {wanted}, got {len(data)}"
        )
    found = np.frombuffer(data, dtype=kind.numpy) if count else np.empty(0, dtype=kind.numpy)
    if not found.flags.aligned:  # the data begins in the middle of a message
        found = found.copy()
    return found.reshape(tuple(shape))


def _split(name: str, data: bytes | bytearray | memoryview, count: int, model: str) -> np.ndarray:
    body = bytes(data)
    # Check the number of elements before allocating memory. Each element takes at least four bytes.
    if count * _LENGTH.size > len(body):
        raise invalid(
            f"expected {count} string elements for inference input '{name}' for model '{model}', "
            f"but got only {len(body)} bytes"
        )
    found: np.ndarray = np.empty(count, dtype=object)
    at = 0
    for i in range(count):
        if at + _LENGTH.size > len(body):
            raise invalid(f"expected {count} string elements for inference input '{name}' for model '{model}', got {i}")
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + size > len(body):
            raise invalid(
                f"incomplete string data for inference input '{name}' for model '{model}', expecting string of length "
                f"{size} but only {len(body) - at} bytes available"
            )
        found[i] = body[at : at + size]
        at += size
    if at != len(body):
        raise invalid(
            f"unexpected number of string elements for inference input '{name}' for model '{model}', expecting "
            f"{count}, but {len(body) - at} more bytes follow"
        )
    return found


def decode_typed(
    name: str, datatype: str, shape: Sequence[int], values: Sequence[Any] | np.ndarray, model: str
) -> np.ndarray:
    """Returns the array of ``values``, which are numbers or ``bytes``. Raises ``ServeError`` INVALID_ARGUMENT if the
    number of values doesn't fit ``shape``, or a value doesn't fit the datatype."""
    kind = get_datatype(name, datatype)
    count = element_count(name, shape)
    if len(values) != count:
        raise invalid(
            f"unexpected number of elements in the contents of input '{name}' for model '{model}'. Expected {count}, "
            f"got {len(values)}"
        )
    if kind.name == "BYTES":
        strings: np.ndarray = np.empty(count, dtype=object)
        for i, value in enumerate(values):
            strings[i] = value.encode() if isinstance(value, str) else value
        return strings.reshape(tuple(shape))
    found = np.empty(count, dtype=kind.numpy)
    # Python's numbers take eight times the memory of the array, so they are made a few at a time.
    for start in range(0, count, _AT_ONCE):
        some = values[start : start + _AT_ONCE]
        try:
            with np.errstate(over="raise"):
                found[start : start + _AT_ONCE] = _numbers(kind, some)
        except (ValueError, TypeError, ArithmeticError):
            raise misfit(name, kind, some) from None
    return found.reshape(tuple(shape))


def _numbers(kind: Datatype, values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Returns ``values`` as an array. Raises ``ValueError``, ``TypeError`` or ``ArithmeticError`` if a value doesn't
    fit the datatype. Looks at single values only where NumPy's conversion leaves doubts."""
    wide, to = np.asarray(values), kind.numpy.kind
    if wide.ndim != 1:
        raise ValueError("the values have to be a flat list")
    # NumPy makes floats of a list of negative and large unsigned integers, and objects of integers beyond 64 bits.
    if wide.dtype.kind not in _FITTING[to] and len(wide) and not _fits(kind, values):
        raise ValueError(f"values of dtype {wide.dtype}")
    made = np.array(values, dtype=kind.numpy)
    if isinstance(values, np.ndarray) and to in "iu" and not np.array_equal(made, wide):
        raise OverflowError("a number is too large")  # NumPy checks the numbers of a list, but not those of an array
    if to == "b" and wide.dtype.kind != "b" and not np.array_equal(made, wide):
        raise ValueError("neither 0 nor 1")
    return made


# The kinds of NumPy's dtypes whose values fit a datatype of each kind, as far as the range allows.
_FITTING = {"b": "biu", "i": "iu", "u": "iu", "f": "fiu"}


def _fits(kind: Datatype, values: Sequence[Any] | np.ndarray) -> bool:
    return all(_fits_alone(kind, value) for value in values)


def _fits_alone(kind: Datatype, value: Any) -> bool:
    """Tells whether a single value fits the datatype."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool):
        return kind.numpy.kind == "b"
    if kind.numpy.kind == "b":
        return isinstance(value, int) and value in (0, 1)
    if kind.numpy.kind in "iu":
        limits = np.iinfo(kind.numpy)
        return isinstance(value, int) and int(limits.min) <= value <= int(limits.max)
    try:
        with np.errstate(over="ignore"):
            return isinstance(value, int | float) and bool(
                np.isfinite(np.float64(value).astype(kind.numpy)) or not math.isfinite(value)
            )
    except OverflowError:
        return False


def misfit(name: str, kind: Datatype, values: Sequence[Any] | np.ndarray) -> ServeError:
    """Returns a ``ServeError`` INVALID_ARGUMENT that names the first of ``values`` that doesn't fit the datatype."""
    for value in values:
        if not _fits_alone(kind, value):
            value = value.item() if isinstance(value, np.generic) else value
            said = json.dumps(value, default=repr)[:_LONGEST]
            return invalid(f"input '{name}' holds {said}, but {kind.name} takes {takes(kind)}")
    return invalid(f"the values of input '{name}' don't fit {kind.name}; give a flat list of {takes(kind)}")


def takes(kind: Datatype) -> str:
    """Returns the values that a datatype takes, in words."""
    if kind.numpy.kind == "b":
        return "true and false"
    if kind.numpy.kind in "iu":
        limits = np.iinfo(kind.numpy)
        return f"integers from {limits.min} to {limits.max}"
    return f"numbers up to {float(ml_dtypes.finfo(kind.numpy).max):.3g}"


def encode(array: np.ndarray, datatype: str) -> bytes | memoryview:
    """Returns the raw contents of ``array``. The raw contents of a ``BYTES`` array are its encoded elements, one after
    the other. For any other datatype, returns a view of the array's memory. If the array is not contiguous, returns a
    view of a copy."""
    if datatype == "BYTES":
        parts: list[bytes] = []
        for value in array.ravel():
            body = value if isinstance(value, bytes) else str(value).encode()
            parts += (_LENGTH.pack(len(body)), body)
        return b"".join(parts)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.size == 0:
        return b""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def to_strings(name: str, array: np.ndarray, model: str) -> np.ndarray:
    """Converts an array of ``bytes`` and ``str`` to an array of ``str``, as sessions need. Raises ``ServeError``
    INVALID_ARGUMENT if an element is not UTF-8."""
    try:
        made: np.ndarray = np.empty(array.size, dtype=object)
        for i, value in enumerate(array.ravel()):
            made[i] = value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise invalid(f"input '{name}' for model '{model}' holds a string that is not UTF-8") from None
    return made.reshape(array.shape)


def to_bytes(array: np.ndarray) -> np.ndarray:
    """Converts an array with ``str`` or ``bytes`` elements to an object array of ``bytes``."""
    made: np.ndarray = np.empty(array.size, dtype=object)
    for i, value in enumerate(array.ravel()):
        made[i] = value if isinstance(value, bytes) else str(value).encode()
    return made.reshape(array.shape)
