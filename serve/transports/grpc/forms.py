"""Reads a ModelInferRequest that differs from an earlier one only in its tensors, without parsing it.

The requests of a client mostly have the same model, inputs and shapes. The bytes around the tensors are then the same,
at the same places, so the request means the same as the earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.transport import InferCall, WireInput
from .message import LARGE, fields_of, parse_infer
from .wire import read_call

_MOST_FORMS = 64
_MOST_AROUND = 4096  # bytes
_LEARNED = 16  # one of so many unknown requests is learned, because each may have an id of its own


class _Form(NamedTuple):
    """What is the same in all requests of a form: the bytes ``around`` the tensors, and what the call says. ``places``
    are the places of these bytes, and ``tensors`` those of the tensors, in the order of the inputs."""

    places: tuple[tuple[int, int], ...]
    around: list[bytes]
    tensors: tuple[tuple[int, int], ...]
    call: InferCall

    def fits(self, message: bytes) -> bool:
        return [message[start:end] for start, end in self.places] == self.around

    def read(self, message: bytes) -> InferCall:
        call, source = self.call, message if len(message) < LARGE else memoryview(message)
        inputs = [
            WireInput(given.name, given.datatype, given.shape, source[start:end])
            for given, (start, end) in zip(call.inputs, self.tensors, strict=True)
        ]
        return InferCall(call.model, call.version, call.id, inputs, call.outputs, call.parameters)


class Forms:
    """Remembers the forms of requests. Any thread may call the methods."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Form] = {}
        self._unknown = 0

    def read(self, message: bytes) -> InferCall:
        """Returns the call in ``message``. Raises the errors of ``parse_infer`` and ``read_call``."""
        form = self._by_size.get(len(message))
        if form is not None and form.fits(message):
            return form.read(message)
        call = read_call(parse_infer(message))
        self._unknown += 1
        if self._unknown % _LEARNED == 0 and (form := _form_of(message, call)) is not None:
            if len(self._by_size) >= _MOST_FORMS:
                self._by_size.clear()
            self._by_size[len(message)] = form
        return call


def _form_of(message: bytes, call: InferCall) -> _Form | None:
    """Returns the form of a request, or None if a tensor isn't in ``raw_input_contents``, or if there is much around
    the tensors."""
    fields = fields_of(message, _MOST_AROUND)
    if fields is None or any(given.raw is None for given in call.inputs):
        return None
    tensors = tuple((body, end) for _, body, end, tensor in fields if tensor)
    starts, ends = [0, *(end for _, end in tensors)], [*(body for body, _ in tensors), len(message)]
    places = tuple(zip(starts, ends, strict=True))
    inputs = [WireInput(given.name, given.datatype, given.shape) for given in call.inputs]
    same = InferCall(call.model, call.version, call.id, inputs, call.outputs, call.parameters)
    return _Form(places, [message[start:end] for start, end in places], tensors, same)
