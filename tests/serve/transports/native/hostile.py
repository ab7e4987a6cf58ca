"""Makes connections of hostile clients: sessions of gRPC calls, then mutated as HTTP/2 frames, as headers, and as
messages of protobuf. A seed and a number make the same connection again."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hpack
import numpy as np
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from accel.serve.protocol import messages as proto

SERVICE = f"/{proto.SERVICE}/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_OTHERS = [SERVICE + name for name in sorted(proto.methods()) if name not in ("ModelInfer", "ModelStreamInfer")]
_BESIDE = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
_BESIDE += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no/Method", "no path", "/", ""]
_HEADERS = ["grpc-timeout", "grpc-encoding", "content-type", "te", "authorization", "content-length", "user-agent",
            "x-bin", "grpc-message", "traceparent", "cookie", "connection", ":path", ":method", ":scheme", ":status",
            ":authority", "", "Upper", "with space", "tab\t", "zero\0"]  # fmt: skip
_VALUES = ["", " ", "1n", "1S", "99999999H", "-1S", "1S ", "gzip", "deflate", "identity", "br", "application/grpc",
           "application/grpc+proto", "text/html", "trailers", "Bearer ", "Bearer x", "0", "5", "4294967296", "%", "=",
           "AAA", "a\0b", "a\r\nb", "é", "POST", "GET", "/", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"]  # fmt: skip
_NUMBERS = [0, 1, 2, 5, 127, 128, 255, 1 << 14, (1 << 14) + 1, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


def request(rows: int, first: float) -> tuple[Any, np.ndarray]:
    """Makes a request to ``linear``, and returns it with its input."""
    x = np.full((rows, 4), first, np.float32)
    made = proto.message("ModelInferRequest")(model_name="linear")
    made.inputs.add(name="x", datatype="FP32", shape=[rows, 4])
    made.raw_input_contents.append(x.tobytes())
    return made, x


class Connection:
    """The bytes that one client sends. ``inputs`` are the inputs of the calls that the server has to answer, by stream,
    if it keeps the connection. A ``plain`` connection breaks no rule, so the server has to keep it. If the connection
    is ``framed``, its last frame is complete. Most calls have one of the headers ``any_of``."""

    def __init__(self, seed: str, any_of: Sequence[tuple[str, str]] = ()) -> None:
        self.random = random.Random(seed)
        self._any_of = any_of
        self.inputs: dict[int, np.ndarray] = {}
        self.plain = self.framed = True
        self._encoder = hpack.Encoder()
        self._stream = -1
        begin = [SettingsFrame(0), WindowUpdateFrame(0, window_increment=1 << 24)]  # no answer has to wait
        self._pieces: list[bytes] = [frame.serialize() for frame in begin]
        if self.random.random() < 0.5:
            self._pieces.append(SettingsFrame(0, flags=["ACK"]).serialize())
        self._calls()
        if self.random.random() < 0.7:
            for _ in range(self.random.choice([1, 1, 2, 5])):
                self._mutate()

    @property
    def bytes(self) -> bytes:
        return PREFACE + b"".join(self._pieces)

    # Sessions

    def _calls(self) -> None:
        """Adds calls, whose frames alternate, and frames of the connection between them."""
        rng = self.random
        kinds = [self._good, self._good, self._other, self._stream_of_calls, self._bad_message, self._bad_headers]
        calls = [rng.choice(kinds)() for _ in range(rng.randint(1, 6))]
        while calls:
            call = rng.choice(calls)
            frames = next(call, None)
            if frames is None:
                calls.remove(call)
                continue
            self._pieces += [frame.serialize() for frame in frames]
            if rng.random() < 0.1:
                self._pieces.append(self._between())

    def _open(self, path: str, *more: tuple[str, str], without: str = "") -> list[Frame]:
        """Returns the frames that open the next call."""
        self._stream += 2
        rows = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "here")]
        rows += [("content-type", "application/grpc"), ("te", "trailers")]
        rows = [row for row in rows if row[0] != without] + list(more)
        if self._any_of and self.random.random() < 0.8:
            rows.append(self.random.choice(self._any_of))
        block = self._encoder.encode(rows, huffman=self.random.random() < 0.5)
        count = self.random.choice([1, 1, 1, 2, 4])
        size = max(1, -(-len(block) // count))
        parts = [block[at : at + min(size, 16_000)] for at in range(0, len(block), min(size, 16_000))]
        frames: list[Frame] = [HeadersFrame(self._stream, parts[0])]
        frames += [ContinuationFrame(self._stream, part) for part in parts[1:]]
        frames[-1].flags.add("END_HEADERS")
        return frames

    def _data(self, stream: int, body: bytes) -> Iterator[list[Frame]]:
        """Yields frames that carry ``body`` and end the request."""
        at = 0
        while at < len(body):
            size = self.random.choice([1, 5, 100, 5000, 16_000])
            made = DataFrame(stream, body[at : at + size])
            at += size
            if self.random.random() < 0.1:
                made.pad_length = self.random.choice([0, 1, 100])
                made.flags.add("PADDED")
            if at >= len(body) and self.random.random() < 0.8:
                made.flags.add("END_STREAM")
            yield [made]
        if not body or "END_STREAM" not in made.flags:
            yield [DataFrame(stream, flags=["END_STREAM"])]

    def _framed(self, message: bytes, packed: bool = False) -> bytes:
        return bytes([packed]) + len(message).to_bytes(4, "big") + message

    def _good(self) -> Iterator[list[Frame]]:
        made, x = request(self.random.choice([1, 2, 7]), self.random.randint(-9, 9))
        made.id = "x" * self.random.choice([0, 0, 9, 3000, 40_000])
        packed = self.random.random() < 0.2
        more = [("grpc-encoding", "gzip")] if packed else []
        if self.random.random() < 0.2:
            more.append(("grpc-timeout", "1H"))
        frames, stream = self._open(SERVICE + "ModelInfer", *more), self._stream
        self.inputs[stream] = x
        yield frames
        message = made.SerializeToString()
        yield from self._data(stream, self._framed(gzip.compress(message, mtime=0) if packed else message, packed))

    def _other(self) -> Iterator[list[Frame]]:
        path = self.random.choice(_OTHERS + _BESIDE)
        if path in ("", "no path"):
            self.plain = False
        frames, stream = self._open(path), self._stream
        yield frames
        messages = [b"", b"\x0a\x06linear", self._mutated(b"\x0a\x06linear")]
        yield from self._data(stream, self._framed(self.random.choice(messages)))

    def _stream_of_calls(self) -> Iterator[list[Frame]]:
        frames, stream = self._open(SERVICE + "ModelStreamInfer"), self._stream
        yield frames
        body = b""
        for _ in range(self.random.randint(0, 4)):
            message = request(1, 1.0)[0].SerializeToString()
            body += self._framed(self._mutated(message) if self.random.random() < 0.3 else message)
        yield from self._data(stream, body)

    def _bad_message(self) -> Iterator[list[Frame]]:
        """A message of protobuf that is mutated, is framed wrongly, or isn't compressed as the headers say."""
        rng = self.random
        more = [("grpc-encoding", rng.choice(["gzip", "deflate", "br", "identity"]))] if rng.random() < 0.4 else []
        frames, stream = self._open(SERVICE + "ModelInfer", *more), self._stream
        yield frames
        message = self._mutated(request(rng.choice([1, 9]), 1.0)[0].SerializeToString())
        if rng.random() < 0.3:
            message = gzip.compress(message, mtime=0)[: rng.choice([None, 5, -3])]
        body = bytes([rng.choice([0, 0, 0, 1, 2, 255])])
        body += (rng.choice(_NUMBERS) if rng.random() < 0.3 else len(message)).to_bytes(4, "big") + message
        yield from self._data(stream, body * rng.choice([1, 1, 2]))

    def _bad_headers(self) -> Iterator[list[Frame]]:
        self.plain = False
        rng = self.random
        rows = [(rng.choice(_HEADERS), rng.choice(_VALUES)) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.1:
            rows.append(("large", "e" * rng.choice([1000, 16_000, 17_000, 70_000])))
        without = rng.choice(["", "", ":method", ":path", ":scheme", ":authority", "content-type", "te"])
        path = rng.choice([SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer", _OTHERS[0], *_BESIDE])
        frames, stream = self._open(path, *rows, without=without), self._stream
        yield frames
        yield from self._data(stream, self._framed(request(1, 1.0)[0].SerializeToString()))

    def _between(self) -> bytes:
        """Returns a frame that a client may send at any time."""
        rng = self.random
        made: list[Frame] = [
            PingFrame(0, rng.randbytes(8)),
            SettingsFrame(0, settings={SettingsFrame.MAX_FRAME_SIZE: rng.choice([16_384, 1 << 20])}),
            WindowUpdateFrame(0, window_increment=rng.choice([1, 1000, 1 << 20])),
            PriorityFrame(rng.choice([1, 3, 99]), stream_weight=7),
        ]
        kind = rng.randrange(6)
        if kind < len(made):
            return made[kind].serialize()
        if kind == 4:
            return raw_frame(rng.choice([11, 42, 200]), rng.randrange(256), rng.choice([0, 1]), b"?")
        stream = rng.randrange(1, self._stream + 1, 2)
        self._doubt(all_of=False, streams=(stream,))  # its data may still come
        return RstStreamFrame(stream, error_code=rng.choice([0, 5, 8, 11])).serialize()

    # Mutations

    def _doubt(self, *, all_of: bool, streams: tuple[int, ...] = ()) -> None:
        """Notes that the answers to some calls may be any."""
        self.plain = False
        for stream in list(self.inputs) if all_of else streams:
            self.inputs.pop(stream, None)

    def _mutate(self) -> None:
        rng = self.random
        at = rng.randrange(len(self._pieces))
        piece = bytearray(self._pieces[at])
        if len(piece) < 9:
            return
        stream, kind = int.from_bytes(piece[5:9], "big") & 0x7FFFFFFF, piece[3]
        mutations: list[Callable[[int, bytearray], None]] = [
            self._flip, self._header, self._resize, self._lie, self._repeat, self._drop, self._swap, self._strange,
        ]  # fmt: skip
        chosen = rng.choice(mutations)
        # Only what a DATA frame carries concerns its call alone.
        self._doubt(all_of=kind != 0 or chosen not in (self._flip, self._strange), streams=(stream,))
        chosen(at, piece)

    def _flip(self, at: int, piece: bytearray) -> None:
        for _ in range(self.random.choice([1, 1, 8])):
            if len(piece) > 9:
                place = self.random.randrange(9, len(piece))
                piece[place] ^= 1 << self.random.randrange(8)
        self._pieces[at] = bytes(piece)

    def _header(self, at: int, piece: bytearray) -> None:
        """Changes the type, the flags or the stream of a frame."""
        what = self.random.randrange(3)
        if what == 0:
            piece[3] = self.random.choice([*range(11), 255])
        elif what == 1:
            piece[4] ^= 1 << self.random.randrange(8)
        else:
            piece[5:9] = self.random.choice([*_NUMBERS, self._stream + 2]).to_bytes(4, "big")
        self._pieces[at] = bytes(piece)

    def _resize(self, at: int, piece: bytearray) -> None:
        """Cuts or lengthens the payload of a frame, and its length."""
        payload = piece[9:]
        payload = payload[: self.random.randrange(len(payload) + 1)]
        payload += self.random.randbytes(self.random.choice([0, 0, 1, 5, 20_000]))
        self._pieces[at] = raw_frame(piece[3], piece[4], int.from_bytes(piece[5:9], "big"), bytes(payload))

    def _lie(self, at: int, piece: bytearray) -> None:
        """Changes the length of a frame alone."""
        piece[:3] = self.random.choice([0, 1, len(piece), 16_384, 16_385, (1 << 24) - 1]).to_bytes(3, "big")
        self._pieces[at] = bytes(piece)
        self.framed = False

    def _repeat(self, at: int, piece: bytearray) -> None:
        self._pieces[at:at] = [bytes(piece)] * self.random.choice([1, 1, 2, 50])

    def _drop(self, at: int, piece: bytearray) -> None:
        del self._pieces[at]
        self._pieces = self._pieces or [SettingsFrame(0).serialize()]

    def _swap(self, at: int, piece: bytearray) -> None:
        other = self.random.randrange(len(self._pieces))
        self._pieces[at], self._pieces[other] = self._pieces[other], self._pieces[at]

    def _strange(self, at: int, piece: bytearray) -> None:
        """Adds a frame that no client sends, or bytes that are no frame."""
        rng = self.random
        number = rng.choice(_NUMBERS)
        stream = rng.choice([0, 1, 2, self._stream, self._stream + 2])
        found: list[Callable[[], bytes]] = [
            lambda: SettingsFrame(0, settings={rng.choice([1, 2, 3, 4, 5, 6, 8, 99]): number}).serialize(),
            lambda: raw_frame(8, 0, stream, number.to_bytes(4, "big")),  # WINDOW_UPDATE
            lambda: GoAwayFrame(0, last_stream_id=stream, error_code=rng.randrange(20)).serialize(),
            lambda: raw_frame(5, 4, stream, rng.randbytes(8)),  # PUSH_PROMISE
            lambda: HeadersFrame(self._stream + 2, rng.randbytes(9), flags=["END_HEADERS"]).serialize(),
            lambda: raw_frame(9, 4, stream, rng.randbytes(4)),  # CONTINUATION
            lambda: RstStreamFrame(stream or 1, error_code=8).serialize(),
            lambda: DataFrame(stream or 1, rng.randbytes(rng.choice([0, 1, 500]))).serialize(),
            lambda: raw_frame(*rng.randbytes(2), stream, rng.randbytes(9)),
            lambda: rng.randbytes(rng.choice([1, 9, 300])),
        ]  # fmt: skip
        kind = rng.randrange(len(found))
        self._doubt(all_of=True)
        self.framed &= kind != len(found) - 1
        self._pieces.insert(at, found[kind]())

    def _mutated(self, message: bytes) -> bytes:
        """Returns a message of protobuf with a field that is changed, is repeated, is missing or has another length."""
        rng = self.random
        for _ in range(rng.choice([1, 1, 3])):
            message = self._field(message, depth=rng.randrange(3))
        return message

    def _field(self, message: bytes, depth: int) -> bytes:
        rng = self.random
        spans = list(fields(message))
        if not spans or rng.random() < 0.1:
            at = rng.randrange(len(message) + 1)
            return message[:at] + rng.randbytes(rng.choice([1, 4])) + message[at + rng.choice([0, 2]) :]
        start, tagged, body, end = rng.choice(spans)
        field = message[start:end]
        if depth and message[start] & 7 == 2:
            inner = self._field(message[body:end], depth - 1)
            length = len(inner) if rng.random() < 0.8 else rng.choice(_NUMBERS)
            return message[:start] + message[start:tagged] + varint(length) + inner + message[end:]
        changed = rng.choice(
            [
                b"",
                field * 2,
                field * 200,
                varint(rng.choice([*_NUMBERS, 8, 10, 2 << 3 | 3])) + message[tagged:end],
                message[start:tagged] + varint(rng.choice([*_NUMBERS, (1 << 64) - 1])),
                message[start:tagged] + b"\xff" * 11,
                field[: rng.randrange(len(field) + 1)],
                b"\x0b" * rng.choice([1, 200]),  # groups
            ]
        )
        return message[:start] + changed + message[end:]


def raw_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame of HTTP/2 with any content."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def varint(number: int) -> bytes:
    """Returns a number as protobuf writes it."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields the start of each field, the end of its tag, the start of its value and its end, as long as the message
    can be read."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _number(message, at)
        tagged = at
        if tag & 7 == 0:
            _, end = _number(message, at)
        elif tag & 7 == 2:
            length, at = _number(message, at)
            end = at + length
        else:
            end = at + {1: 8, 5: 4}.get(tag & 7, len(message))
        if end > len(message):
            return
        yield start, tagged, at, end
        at = end


def _number(message: bytes, at: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        found |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return found, at
    return found, len(message) + 1
