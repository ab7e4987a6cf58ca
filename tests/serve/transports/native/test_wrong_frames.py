"""Proves that the native transport answers what breaks HTTP/2 as the RFCs say. ``wrong_frames.py`` lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hyperframe.frame import DataFrame, Frame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from tests.serve.transports.native.hostile import raw_frame
from tests.serve.transports.native.raw_http2 import RawClient
from tests.serve.transports.native.test_calls import framed, message
from tests.serve.transports.native.wrong_frames import WRONG, Wrong
from tests.support.serving import Start, ask, client

TRANSPORTS = ("native",)
END = ["END_STREAM"]


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, grpc_threads=16)


def send(raw: RawClient, *pieces: Frame | bytes) -> None:
    raw.send_bytes(b"".join(one if isinstance(one, bytes) else one.serialize() for one in pieces))


def break_rule(port: int, case: Wrong) -> None:
    with RawClient(port) as raw:
        send(raw, *case.send(raw))
        if not case.codes:
            assert raw.asks_back()
            return
        if not case.stream:
            assert raw.end_code() in case.codes
            return
        reset = raw.receive(RstStreamFrame, lambda frame: frame.stream_id == case.stream, seconds=10)
        assert reset is not None, raw.frames
        assert reset.error_code in case.codes
        assert raw.asks_back()


def test_what_no_client_may_send(process: Any) -> None:
    """Fails if a frame that breaks a rule ends nothing, ends more than the RFC says, or ends it with another code, or
    if another client notices it."""
    port, failed = process.ports["grpc"], []
    with client(port) as other:
        for case in WRONG:
            try:
                break_rule(port, case)
                ask(other)
            except AssertionError as error:
                failed.append(f"{case.section}, {case.what}: {str(error)[:200]}")
    assert not failed, "\n".join(failed)


def test_a_connection_that_begins_otherwise(process: Any) -> None:
    """Fails if the server answers a client that doesn't speak HTTP/2 (RFC 9113, 3.4)."""
    for begin in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + SettingsFrame(0).serialize()):
        with RawClient(process.ports["grpc"], begins=False) as raw:
            raw.send_bytes(begin)
            assert raw.end_code() is None
            assert raw.ended


def infer(raw: RawClient, stream: int = 1) -> list[Frame]:
    return [raw.opening(stream), DataFrame(stream, framed(message()), flags=END)]


def test_what_a_client_may_send(process: Any) -> None:
    """Fails if the server refuses frames, flags or settings that it doesn't know (RFC 9113, 4.1, 5.5 and 6.5.2), or
    doesn't answer a ping with its bytes (6.7)."""
    with RawClient(process.ports["grpc"]) as raw:
        opening, data = (bytearray(frame.serialize()) for frame in infer(raw))
        opening[4] |= 0x40  # flags that nothing defines
        data[4] |= 0x10
        data[5] |= 0x80  # the reserved bit
        send(raw, raw_frame(22, 0, 0, b"?"), raw_frame(22, 255, 1, b"?"), raw_frame(4, 0, 0, b"\x00\xff" + bytes(4)))
        send(raw, bytes(opening), bytes(data))
        assert raw.answer(1)["grpc-status"] == "0"
        assert raw.receive(SettingsFrame, lambda frame: "ACK" in frame.flags)
        send(raw, raw_frame(6, 1, 0, b"unasked!"), PingFrame(0, b"the ping"))
        pong = raw.receive(PingFrame)
        assert pong is not None
        assert (pong.opaque_data, "ACK" in pong.flags) == (b"the ping", True)


def test_the_window_of_a_client(process: Any) -> None:
    """Fails if the server sends more bytes of an answer than the client allows, or not the rest once it does (RFC 9113,
    6.9.1), also where a setting takes the window below 0 (6.9.2)."""

    def length(raw: RawClient) -> int:
        assert raw.asks_back()
        return sum(len(frame.data) for frame in raw.frames if isinstance(frame, DataFrame))

    with RawClient(process.ports["grpc"]) as raw:
        send(raw, SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 3}), *infer(raw))
        assert raw.receive(DataFrame)
        assert length(raw) == 3
        send(raw, SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1}))  # now -2
        send(raw, WindowUpdateFrame(1, window_increment=2))
        assert length(raw) == 3
        send(raw, WindowUpdateFrame(1, window_increment=1))
        assert raw.receive(DataFrame, lambda frame: len(frame.data) == 1)
        assert length(raw) == 4
        send(raw, WindowUpdateFrame(1, window_increment=1000))
        assert raw.answer(1)["grpc-status"] == "0"
