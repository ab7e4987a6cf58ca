"""Reads an ONNX file without the large weights inside the file.

The file is one protobuf message, which is a sequence of fields. Each field has a tag (its number and wire type), and
its content. The content of the weights is skipped, so that it is neither parsed nor copied (see
https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx

# The numbers of fields in onnx.proto.
MODEL_GRAPH = 7
GRAPH_INITIALIZER = 5
TENSOR_RAW_DATA = 9

_MOST_FIELDS = 1_000_000

# The wire types. The content of a field with the type ``LENGTH`` has its length in front.
_VARINT, _EIGHT_BYTES, LENGTH, _FOUR_BYTES = 0, 1, 2, 5


class Field(NamedTuple):
    """A field of a message. The field begins at ``start``, and its content goes from ``content`` to ``end``."""

    number: int
    start: int
    content: int
    end: int


def read_light(path: Path, largest: int, *, detached: bool) -> onnx.ModelProto:
    """Reads the model in ``path`` without the weights whose ``raw_data`` has more than ``largest`` bytes. If
    ``detached`` is True, such a weight refers to its bytes in the file, by the absolute path of the file. Otherwise the
    weight has no values.

    Raises ``ValueError`` if the file isn't a protobuf message with one graph, or has very many fields.
    """
    import onnx

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        outer = list(_fields(data, 0, len(data)))
        graphs = [field for field in outer if field.number == MODEL_GRAPH]
        if len(graphs) != 1:
            raise ValueError(f"{path} has {len(graphs)} graphs")
        inner = list(_fields(data, graphs[0].content, graphs[0].end))
        tensors = [field for field in inner if field.number == GRAPH_INITIALIZER]
        model = onnx.ModelProto()
        model.MergeFromString(_joined(data, [field for field in outer if field not in graphs]))
        model.graph.MergeFromString(_joined(data, [field for field in inner if field.number != GRAPH_INITIALIZER]))
        for field in tensors:
            parts = list(_fields(data, field.content, field.end))
            raw = [part for part in parts if part.number == TENSOR_RAW_DATA]
            large = len(raw) == 1 and raw[0].end - raw[0].content > largest
            tensor = model.graph.initializer.add()
            tensor.MergeFromString(_joined(data, [part for part in parts if not large or part not in raw]))
            if large and detached:
                tensor.data_location = onnx.TensorProto.EXTERNAL
                where = {"location": path.absolute(), "offset": raw[0].content, "length": raw[0].end - raw[0].content}
                for key, value in where.items():
                    tensor.external_data.add(key=key, value=str(value))
    return model


def _joined(data: mmap.mmap, fields: list[Field]) -> bytes:
    return b"".join(data[field.start : field.end] for field in fields)


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[Field]:
    """Yields the fields of the message between the indices ``at`` and ``end``."""
    count = 0
    while at < end:
        start = at
        tag, at = _varint(data, at, end)
        kind, content = tag & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == LENGTH:
            length, content = _varint(data, at, end)
            at = content + length
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"the wire type {kind} is unknown")
        if at > end:
            raise ValueError("the file is truncated")
        count += 1
        if count > _MOST_FIELDS:  # protobuf's own parser is faster for such a file
            raise ValueError(f"the file has more than {_MOST_FIELDS} fields")
        yield Field(tag >> 3, start, content, at)


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Returns the number at the index ``at``, and the index after the number."""
    number = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise ValueError("the file is truncated")
