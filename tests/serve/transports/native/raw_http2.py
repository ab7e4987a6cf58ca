"""A client of HTTP/2 that sends whatever frames a test wants."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import hpack
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, PingFrame, SettingsFrame

from accel.serve.protocol import messages as proto

INFER = f"/{proto.SERVICE}/ModelInfer"
F = TypeVar("F", bound=Frame)


class RawClient:
    """One connection, which ``begins`` as HTTP/2 does, or with what a test sends. With ``secured``, it uses TLS.
    ``frames`` has all frames that the server has sent, and ``ended`` tells whether the server has closed the
    connection."""

    def __init__(self, port: int, *, begins: bool = True, secured: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if secured is not None:
            self.socket = secured.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._left = b""
        self.frames: list[Frame] = []
        self.ended = False
        if begins:
            self.send_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            self.send(SettingsFrame(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def headers(self, path: str = INFER, **more: str) -> bytes:
        """Returns the compressed headers of a call."""
        rows = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here"}
        rows |= {"content-type": "application/grpc", "te": "trailers", **more}
        return self._encoder.encode([(name.replace("_", "-"), value) for name, value in rows.items()])

    def opening(self, stream: int, *flags: str, **more: str) -> HeadersFrame:
        """Returns the frame that opens a call."""
        return HeadersFrame(stream, self.headers(**more), flags=["END_HEADERS", *flags])

    def send(self, *frames: Frame) -> None:
        """Sends the frames. The server may have ended the connection."""
        self.send_bytes(b"".join(frame.serialize() for frame in frames))

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes, which may be no frames."""
        try:
            self.socket.sendall(data)
        except OSError:
            self.ended = True

    def receive(self, wanted: type[F], such: Callable[[F], Any] = lambda _: True, seconds: float = 30.0) -> F | None:
        """Returns the first frame of a type, or None if it doesn't come."""
        end = time.monotonic() + seconds
        while True:
            for frame in self.frames:
                if isinstance(frame, wanted) and such(frame):
                    return frame
            left = end - time.monotonic()
            if self.ended or left <= 0:
                return None
            self.socket.settimeout(left)
            try:
                found = self.socket.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                found = b""
            self.ended = not found
            self._parse(found)

    def _parse(self, found: bytes) -> None:
        self._left += found
        while len(self._left) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(self._left[:9]))
            if len(self._left) < 9 + length:
                return
            frame.parse_body(memoryview(self._left[9 : 9 + length]))
            self._left = self._left[9 + length :]
            if isinstance(frame, HeadersFrame):
                frame.decoded = dict(self._decoder.decode(frame.data))
            self.frames.append(frame)

    def answer(self, stream: int) -> dict[str, str]:
        """Returns the headers that end the answer to a call."""
        found = self.receive(HeadersFrame, lambda frame: frame.stream_id == stream and "END_STREAM" in frame.flags)
        assert found is not None, self.frames
        return dict(found.decoded)

    def take_settings(self) -> None:
        """Acknowledges the settings of the server, which then lets the client send as much as they say."""
        assert self.receive(SettingsFrame, lambda frame: "ACK" not in frame.flags)
        self.send(SettingsFrame(0, flags=["ACK"]))

    def asks_back(self) -> bool:
        """Tells whether the server answers a ping, so that it has read all earlier frames."""
        data = f"ask {len(self.frames):4}".encode()
        self.send(PingFrame(0, data))
        return self.receive(PingFrame, lambda frame: frame.opaque_data == data) is not None

    def end_code(self) -> int | None:
        """Returns the code of the last GOAWAY frame before the server ended the connection, or None."""
        self.receive(Frame, lambda _: self.ended)
        found = [frame.error_code for frame in self.frames if isinstance(frame, GoAwayFrame)]
        return found[-1] if found else None
