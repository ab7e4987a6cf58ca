"""Tests the reading of requests that differ from earlier ones only in their tensors."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import AccelError
from accel.serve.protocol import messages as proto
from accel.serve.protocol.inference import ServeError
from accel.serve.transports.grpc import forms
from accel.serve.transports.grpc.forms import Forms
from accel.serve.transports.grpc.message import parse_infer
from accel.serve.transports.grpc.wire import read_call


def _message(sizes: tuple[int, ...] = (8, 0, 5), fill: int = 1, name: str = "m", **fields: Any) -> bytes:
    made = proto.message("ModelInferRequest")(model_name=name, **fields)
    made.parameters["priority"].int64_param = 1
    for at, size in enumerate(sizes):
        made.inputs.add(name=f"x{at}", datatype="UINT8", shape=[1, size])
        made.raw_input_contents.append(bytes([fill + at]) * size)
    made.outputs.add(name="y").parameters["classification"].int64_param = 2
    return bytes(made.SerializeToString())


def _learned(message: bytes) -> Forms:
    known = Forms()
    for _ in range(forms._LEARNED):
        known.read(message)
    return known


def _said(read: Any, message: bytes) -> Any:
    """Returns the call that ``read`` finds in ``message``, or the error's type and text."""
    try:
        call = read(message)
    except (AccelError, DecodeError) as error:
        return type(error), str(error)
    for one in call.inputs:
        one.raw = None if one.raw is None else bytes(one.raw)
        one.values = None if one.values is None else list(one.values)
    return call


def _parsed(message: bytes) -> Any:
    return read_call(parse_infer(message))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from((0, 1, 9, 300, 1 << 16)), max_size=3), st.integers(0, 1 << 18), st.integers(0, 255))
def test_a_known_form_is_read_as_protobuf_reads_it(sizes: list[int], at: int, byte: int) -> None:
    """Fails if a message that differs in one byte from one whose form is known is read differently than by protobuf:
    the byte may be of a tensor, a name, a shape, a length or a tag."""
    message = _message(tuple(sizes))
    known = _learned(message)
    changed = bytearray(message)
    changed[at % len(message)] = byte
    assert _said(known.read, bytes(changed)) == _said(_parsed, bytes(changed))


def test_a_known_form_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a request that differs only in its tensors is parsed again, or a request with another id isn't."""
    known = _learned(_message(id="1"))
    parsed: list[bytes] = []
    monkeypatch.setattr(forms, "parse_infer", lambda message: parsed.append(message) or parse_infer(message))
    other = _message(fill=7, id="1")
    assert _said(known.read, other) == _said(_parsed, other)
    assert not parsed
    other = _message(fill=7, id="2")
    assert _said(known.read, other) == _said(_parsed, other)
    assert parsed == [other]


def test_calls_of_a_form_share_nothing_that_the_server_changes() -> None:
    """Fails if what the server notes on one call is seen by the next call of the same form."""
    known = _learned(_message())
    call = known.read(_message())
    call.token, call.owner, call.holds_place = "secret", "somebody", True
    call.inputs.clear()
    assert _said(known.read, _message()) == _said(_parsed, _message())


@pytest.mark.parametrize("name", ["x" * 5000, "m"])
def test_what_is_remembered_is_bounded(name: str) -> None:
    """Fails if a client can have any number of forms remembered, or long ones."""
    known = Forms()
    for number in range(100):
        for _ in range(forms._LEARNED):
            known.read(_message((number,), name=name))
    assert len(known._by_size) <= (0 if len(name) > 4096 else forms._MOST_FORMS)


def test_contents_that_are_typed_or_missing() -> None:
    """Fails if the reading of a request without raw contents, or with too few of them, depends on earlier requests."""
    known = Forms()
    made = proto.message("ModelInferRequest")(model_name="m")
    made.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    for value in range(2 * forms._LEARNED):
        made.inputs[0].contents.fp32_contents[0] = value
        assert list(known.read(made.SerializeToString()).inputs[0].values or ()) == [value, 2]
    lacking = proto.message("ModelInferRequest").FromString(_message())
    del lacking.raw_input_contents[-1]
    for _ in range(2 * forms._LEARNED):
        with pytest.raises(ServeError, match="got 2"):
            known.read(lacking.SerializeToString())
