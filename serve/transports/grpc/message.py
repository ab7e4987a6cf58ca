"""Parses a ModelInferRequest without copying its tensors.

protobuf copies each tensor twice: into the parsed message, and into the ``bytes`` that Python gets. The tensors of a
large message therefore stay where they are, and only the rest of the message is parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...protocol import messages as proto

_Request = proto.message("ModelInferRequest")
_RAW = _Request.DESCRIPTOR.fields_by_name["raw_input_contents"].number
LARGE = 1 << 16  # bytes that aren't worth a copy
_MOST_REST = 1 << 20  # a larger rest has typed contents, which protobuf has to read
_BYTES = 2  # the wire type of messages, texts and bytes


class ReceivedRequest:
    """A ModelInferRequest: the ``message``, and the ``raws`` of its inputs in place of ``raw_input_contents``."""

    __slots__ = ("message", "raws")

    def __init__(self, message: Any, raws: Sequence[bytes | memoryview] | None = None) -> None:
        self.message = message
        self.raws: Sequence[bytes | memoryview] = list(message.raw_input_contents) if raws is None else raws


def parse_infer(message: bytes) -> ReceivedRequest:
    """Returns the request in ``message``. Raises ``DecodeError`` if ``message`` is no ModelInferRequest."""
    split = _split(message) if len(message) >= LARGE else None
    if split is None:
        return ReceivedRequest(_Request.FromString(message))
    rest, raws = split
    return ReceivedRequest(_Request.FromString(b"".join(rest)), raws)


def _split(message: bytes) -> tuple[list[memoryview], list[memoryview]] | None:
    """Returns the fields of ``message`` without the tensors, and the tensors. Returns None if protobuf has to read the
    whole message, which also finds out what is wrong with a malformed one."""
    fields = fields_of(message, _MOST_REST)
    if fields is None:
        return None
    view = memoryview(message)
    rest = [view[start:end] for start, _, end, tensor in fields if not tensor]
    return rest, [view[body:end] for _, body, end, tensor in fields if tensor]


def fields_of(message: bytes, most: int) -> list[tuple[int, int, int, bool]] | None:
    """Returns the start of each field of ``message``, the start of the field's contents, the end, and whether the
    field is a tensor in ``raw_input_contents``. Returns None if ``message`` is malformed, has a field of numbers, or
    has more than ``most`` bytes around the tensors."""
    view = memoryview(message)
    found: list[tuple[int, int, int, bool]] = []
    at = size = 0
    while at < len(view):
        start = at
        tag, at = _varint(view, at)
        length, at = _varint(view, at)
        if tag & 7 != _BYTES or at < 0 or at + length > len(view):
            return None
        tensor = tag >> 3 == _RAW
        found.append((start, at, at + length, tensor))
        size += at - start if tensor else at + length - start
        if size > most:
            return None
        at += length
    return found


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Returns the number at ``at`` and the place behind it, or a negative place if there is no number."""
    found = shift = 0
    while 0 <= at < len(view) and shift < 64:
        byte = view[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
    return 0, -1
