"""Lists what a client may not send, by the section of RFC 9113 (HTTP/2) or RFC 7541 (HPACK), and what has to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.serve.transports.native.hostile import raw_frame
from tests.serve.transports.native.raw_http2 import RawClient

PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION = 1, 3, 5, 6, 7, 9  # the codes of errors
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GO_AWAY, WINDOW, CONTINUATION = range(10)  # the types of frames
_MOST = (1 << 31) - 1
_ROWS = [(":method", "POST"), (":scheme", "http"), (":path", "/no/Method"), (":authority", "here"), ("te", "trailers")]


@dataclass(frozen=True)
class Wrong:
    """What a client sends. ``codes`` are the codes with one of which the connection has to end, or the call if it is on
    a ``stream``. Without codes, the server ignores it."""

    section: str
    what: str
    send: Callable[[RawClient], list[Frame | bytes]]
    codes: tuple[int, ...]
    stream: int = 0


def _opened(*more: Frame | bytes, end: bool = False) -> Callable[[RawClient], list[Frame | bytes]]:
    """Opens a call, which isn't complete unless ``end``."""
    return lambda made: [made.opening(1, *(["END_STREAM"] if end else [])), *more]


def _just(*frames: Frame | bytes) -> Callable[[RawClient], list[Frame | bytes]]:
    return lambda _: list(frames)


def _block(block: bytes) -> Callable[[RawClient], list[Frame | bytes]]:
    return _just(raw_frame(HEADERS, 4 | 1, 1, block))


def _rows(*rows: tuple[str, str], without: str = "") -> Callable[[RawClient], list[Frame | bytes]]:
    """Sends the headers of a call, without one of them, and then ``rows``."""
    kept = [row for row in _ROWS if row[0] != without]
    return lambda _: [HeadersFrame(1, hpack.Encoder().encode([*kept, *rows]), flags=["END_HEADERS", "END_STREAM"])]


def _begun(*more: Frame | bytes) -> Callable[[RawClient], list[Frame | bytes]]:
    """Sends the first part of the headers of a call, and then ``more``."""
    return lambda made: [HeadersFrame(1, made.headers()[:5]), *more]


def _many(made: RawClient) -> list[Frame | bytes]:
    return [made.opening(number) for number in range(1, 2 * 257 + 1, 2)]


def _after_reset(made: RawClient) -> list[Frame | bytes]:
    return [made.opening(1), RstStreamFrame(1, error_code=8), made.opening(1)]


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _setting(name: int, value: int) -> bytes:
    return raw_frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + _number(value))


WRONG = (
    Wrong("4.2", "a DATA frame above the largest size", _opened(raw_frame(DATA, 0, 1, bytes(16_385))), (SIZE,)),
    Wrong("4.2", "a HEADERS frame above the largest size", _just(raw_frame(HEADERS, 5, 1, bytes(16_385))), (SIZE,)),
    Wrong("4.3", "a header block that can't be read", _block(b"\xff\xff\xff\xff\xff\xff\xff\xff"), (COMPRESSION,)),
    Wrong("4.3", "PRIORITY inside a header block", _begun(PriorityFrame(1, stream_weight=3)), (PROTOCOL,)),
    Wrong("4.3", "headers of another call inside a header block",
          lambda made: [HeadersFrame(1, made.headers()[:5]), made.opening(3)], (PROTOCOL,)),
    Wrong("5.1", "DATA before the call", _just(DataFrame(1, b"x")), (PROTOCOL,)),
    Wrong("5.1", "RST_STREAM before the call", _just(RstStreamFrame(1, error_code=8)), (PROTOCOL,)),
    Wrong("5.1", "WINDOW_UPDATE before the call", _just(WindowUpdateFrame(1, window_increment=9)), (PROTOCOL,)),
    Wrong("5.1", "CONTINUATION before the call", _just(raw_frame(CONTINUATION, 4, 1, b"")), (PROTOCOL,)),
    Wrong("5.1", "DATA after the end of the request", _opened(DataFrame(1, b"x"), end=True), (CLOSED,)),
    Wrong("5.1", "headers after the end of the request",
          lambda made: [made.opening(1, "END_STREAM"), made.opening(1, "END_STREAM")], (CLOSED, PROTOCOL)),
    Wrong("5.1", "headers after the call was reset", _after_reset, (CLOSED, PROTOCOL)),
    Wrong("5.1.1", "a call with an even number", lambda made: [made.opening(2, "END_STREAM")], (PROTOCOL,)),
    # libnghttp2 ignores these headers, as it can't tell them from trailers of a call that it has reset.
    Wrong("5.1.1", "a call with a smaller number than the last", lambda made: [made.opening(5), made.opening(3)], ()),
    Wrong("5.1.2", "more calls than the server allows", _many, (REFUSED,), stream=2 * 256 + 1),
    Wrong("5.5", "a frame of an unknown type inside a header block", _begun(raw_frame(22, 0, 1, b"x")), (PROTOCOL,)),
    Wrong("6.1", "DATA of no call", _just(raw_frame(DATA, 0, 0, b"x")), (PROTOCOL,)),
    Wrong("6.1", "DATA with more padding than bytes", _opened(raw_frame(DATA, 8, 1, b"\x09xx")), (PROTOCOL,)),
    Wrong("6.2", "headers of no call", _just(raw_frame(HEADERS, 5, 0, b"\x83")), (PROTOCOL,)),
    Wrong("6.2", "headers with more padding than bytes", _just(raw_frame(HEADERS, 13, 1, b"\x09\x83")), (PROTOCOL,)),
    Wrong("6.2", "DATA inside a header block", _begun(DataFrame(1, b"x")), (PROTOCOL,)),
    Wrong("6.3", "PRIORITY of no call", _just(raw_frame(PRIORITY, 0, 0, bytes(5))), (PROTOCOL,)),
    Wrong("6.3", "PRIORITY of four bytes", _opened(raw_frame(PRIORITY, 0, 1, bytes(4))), (SIZE,)),
    Wrong("6.4", "RST_STREAM of no call", _just(raw_frame(RESET, 0, 0, _number(8))), (PROTOCOL,)),
    Wrong("6.4", "RST_STREAM of three bytes", _opened(raw_frame(RESET, 0, 1, bytes(3))), (SIZE,)),
    Wrong("6.5", "acknowledged settings with a payload", _just(raw_frame(SETTINGS, 1, 0, bytes(6))), (SIZE,)),
    Wrong("6.5", "settings of a call", _opened(raw_frame(SETTINGS, 0, 1, bytes(6))), (PROTOCOL,)),
    Wrong("6.5", "settings of five bytes", _just(raw_frame(SETTINGS, 0, 0, bytes(5))), (SIZE,)),
    Wrong("6.5.2", "ENABLE_PUSH 2", _just(_setting(SettingsFrame.ENABLE_PUSH, 2)), (PROTOCOL,)),
    Wrong("6.5.2", "a window above 2^31-1", _just(_setting(SettingsFrame.INITIAL_WINDOW_SIZE, _MOST + 1)), (FLOW,)),
    Wrong("6.5.2", "frames below 16,384", _just(_setting(SettingsFrame.MAX_FRAME_SIZE, 16_383)), (PROTOCOL,)),
    Wrong("6.5.2", "frames above 2^24-1", _just(_setting(SettingsFrame.MAX_FRAME_SIZE, 1 << 24)), (PROTOCOL,)),
    Wrong("6.6", "PUSH_PROMISE", _opened(raw_frame(PUSH, 4, 1, _number(2) + b"\x83")), (PROTOCOL,)),
    Wrong("6.7", "PING of a call", _opened(raw_frame(PING, 0, 1, bytes(8))), (PROTOCOL,)),
    Wrong("6.7", "PING of seven bytes", _just(raw_frame(PING, 0, 0, bytes(7))), (SIZE,)),
    Wrong("6.8", "GOAWAY of a call", _opened(raw_frame(GO_AWAY, 0, 1, bytes(8))), (PROTOCOL,)),
    Wrong("6.9", "a connection's window grows by 0", _just(raw_frame(WINDOW, 0, 0, _number(0))), (PROTOCOL,)),
    # libnghttp2 ends the connection for an error of the call, as RFC 9113 allows (5.4.2).
    Wrong("6.9", "a call's window grows by 0", _opened(raw_frame(WINDOW, 0, 1, _number(0))), (PROTOCOL,)),
    Wrong("6.9", "WINDOW_UPDATE of three bytes", _just(raw_frame(WINDOW, 0, 0, bytes(3))), (SIZE,)),
    Wrong("6.9.1", "a connection's window above 2^31-1", _just(raw_frame(WINDOW, 0, 0, _number(_MOST))), (FLOW,)),
    Wrong("6.9.1", "a call's window above 2^31-1", _opened(raw_frame(WINDOW, 0, 1, _number(_MOST))), (FLOW,), stream=1),
    # libnghttp2 ends the calls whose windows are too large, and not the connection.
    Wrong("6.9.2", "a setting that takes a call's window above 2^31-1",
          _opened(WindowUpdateFrame(1, window_increment=1000), _setting(4, _MOST)), (FLOW,), stream=1),
    Wrong("6.10", "CONTINUATION after the end of the headers", _opened(ContinuationFrame(1, b"")), (PROTOCOL,)),
    Wrong("6.10", "CONTINUATION of no call", _begun(raw_frame(CONTINUATION, 4, 0, b"")), (PROTOCOL,)),
    Wrong("6.10", "CONTINUATION of another call", _begun(raw_frame(CONTINUATION, 4, 3, b"")), (PROTOCOL,)),
    Wrong("8.1", "second headers that don't end the request", lambda made: [made.opening(1), made.opening(1)],
          (PROTOCOL,), stream=1),
    Wrong("8.1.1", "more DATA than content-length",
          lambda made: [made.opening(1, content_length="1"), DataFrame(1, b"xx", flags=["END_STREAM"])],
          (PROTOCOL,), stream=1),
    Wrong("8.1.1", "less DATA than content-length",
          lambda made: [made.opening(1, content_length="5"), DataFrame(1, b"xx", flags=["END_STREAM"])],
          (PROTOCOL,), stream=1),
    Wrong("8.2.1", "a name with a capital letter", _rows(("Name", "x")), (PROTOCOL,), stream=1),
    Wrong("8.2.1", "a name with a space", _rows(("a name", "x")), (PROTOCOL,), stream=1),
    Wrong("8.2.1", "a value with a line end", _rows(("name", "a\r\nb")), (PROTOCOL,), stream=1),
    Wrong("8.2.2", "a header of the connection", _rows(("connection", "keep-alive")), (PROTOCOL,), stream=1),
    Wrong("8.2.2", "te without trailers", _rows(("te", "gzip"), without="te"), (PROTOCOL,), stream=1),
    Wrong("8.3", "an unknown pseudo-header", _rows((":test", "x"), without="te"), (PROTOCOL,), stream=1),
    Wrong("8.3", "a pseudo-header of answers", _rows((":status", "200"), without="te"), (PROTOCOL,), stream=1),
    Wrong("8.3", "a pseudo-header after others", _rows((":authority", "x"), without=":authority"), (PROTOCOL,),
          stream=1),
    Wrong("8.3", "a pseudo-header in the trailers",
          lambda made: [made.opening(1), HeadersFrame(1, made._encoder.encode([(":path", "/")]),
                                                      flags=["END_HEADERS", "END_STREAM"])], (PROTOCOL,), stream=1),
    Wrong("8.3.1", "no :method", _rows(without=":method"), (PROTOCOL,), stream=1),
    Wrong("8.3.1", "no :scheme", _rows(without=":scheme"), (PROTOCOL,), stream=1),
    Wrong("8.3.1", "no :path", _rows(without=":path"), (PROTOCOL,), stream=1),
    Wrong("8.3.1", "an empty :path", lambda made: [made.opening(1, "END_STREAM", path="")], (PROTOCOL,), stream=1),
    Wrong("8.3.1", "two :paths", lambda made: [HeadersFrame(1, made._encoder.encode([*_ROWS[:3], _ROWS[2], *_ROWS[3:]]),
                                                            flags=["END_HEADERS", "END_STREAM"])],
          (PROTOCOL,), stream=1),
    Wrong("HPACK 2.3.3", "an index beyond the tables", _block(b"\xff\x80\x01"), (COMPRESSION,)),
    Wrong("HPACK 6.1", "the index 0", _block(b"\x80"), (COMPRESSION,)),
    Wrong("HPACK 4.2", "a table size behind a header", _block(b"\x83\x20"), (COMPRESSION,)),
    Wrong("HPACK 6.3", "a table size above the setting", _block(b"\x3f\xe2\x1f\x83"), (COMPRESSION,)),
    Wrong("HPACK 5.1", "a number without an end", _block(b"\xff" + b"\x80" * 10 + b"\x01"), (COMPRESSION,)),
    Wrong("HPACK 5.2", "a Huffman code that is padded with 0", _block(b"\x40\x81\x18\x01x"), (COMPRESSION,)),
    Wrong("HPACK 5.2", "a Huffman code with a byte of padding", _block(b"\x40\x82\x1f\xff\x01x"), (COMPRESSION,)),
    Wrong("HPACK 5.2", "a Huffman code with EOS", _block(b"\x40\x84\xff\xff\xff\xff\x01x"), (COMPRESSION,)),
    Wrong("HPACK 5.2", "a text that is longer than the block", _block(b"\x40\x0ax"), (COMPRESSION,)),
)  # fmt: skip
