"""Tests the extension of the native transport alone, where a test decides which thread does what, and when."""

from __future__ import annotations

import ctypes
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hyperframe.frame import (
    DataFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from accel.serve.transports.native import build
from tests.serve.transports.native.raw_http2 import RawClient
from tests.support.certificates import certificate

OPENED = 1
LARGE = 1 << 17  # bytes of a message; more than half of them together have to wait
ENHANCE_YOUR_CALM = 11


class Polled:
    """A port and, once ``start`` is called, the thread that polls it. ``calls`` gets the calls that are new."""

    def __init__(self, *, partial: int = 1 << 30, sent: int = 0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        if sent:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent)  # connections inherit it
        listener.setblocking(False)
        self.number = listener.getsockname()[1]
        self.port = build.port_library().Port(
            (listener.detach(),),
            message=1 << 30,
            partial=partial,
            headers=16 << 10,
            streams=100,
            resets=0.0,
            per_address=0,
        )
        self.calls: queue.Queue[Any] = queue.Queue()
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def poll(self) -> None:
        """Lets the port do what there is to do."""
        for call in self.port.poll(0.01):
            if call.news() & OPENED:
                self.calls.put(call)

    def _run(self) -> None:
        while not self._ended:
            self.poll()

    def close(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._thread.join()
        self.port.close()


@pytest.fixture
def polled() -> Iterator[Callable[..., Polled]]:
    """Returns ``polled(...)``, which makes a port. Closes it after the test."""
    if reason := build.why_not():
        pytest.skip(reason)
    made: list[Polled] = []

    def begin(**options: Any) -> Polled:
        made.append(Polled(**options))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def reads_much(raw: RawClient) -> None:
    """Lets the server send as much as it likes, as far as the windows of HTTP/2 go."""
    raw.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: (1 << 31) - 1}))
    raw.send(WindowUpdateFrame(0, window_increment=1 << 30))
    raw.take_settings()


def test_a_flood_while_an_answer_waits(polled: Any) -> None:
    """Fails if the end of a connection frees an answer, a frame of which libnghttp2 still sends.

    A connection with unsent bytes is not read. So the thread that polls has to know of the flood before another thread
    sends. Here, the other thread keeps Python's lock from before the flood until it has sent.
    """
    made = polled(sent=1 << 12)
    made.start()
    libc = ctypes.PyDLL(None)  # keeps the lock, other than CDLL
    flood = b"".join(PingFrame(0, b"flooding").serialize() for _ in range(1500))
    answer = bytes(4 << 20)
    for pause in (1, 10, 100, 1000):  # ms until the thread that polls waits for the lock
        with RawClient(made.number) as raw:
            reads_much(raw)
            raw.send(raw.opening(1))
            call = made.calls.get(timeout=30)
            assert raw.asks_back()
            descriptor, before = raw.socket.fileno(), sys.getswitchinterval()
            sys.setswitchinterval(1000)
            libc.send(descriptor, flood, len(flood), 0)
            libc.usleep(pause * 1000)
            taken = call.finish(0, b"", (answer,))
            del call
            sys.setswitchinterval(before)
            assert raw.end_code() == ENHANCE_YOUR_CALM
            if taken and sum(len(frame.data) for frame in raw.frames if isinstance(frame, DataFrame)) < len(answer):
                return
    raise AssertionError("the flood always came before or after the answer")


def test_an_answer_before_the_request_is_let_in(polled: Any) -> None:
    """Fails if another thread can't refuse a call, part of whose request has arrived, but was not let in: the client
    may send more only now, which is sent at once, with the answer. That ends the call."""
    made = polled()
    made.start()
    with RawClient(made.number) as raw:
        raw.take_settings()
        raw.send(raw.opening(1), DataFrame(1, b"\0" + LARGE.to_bytes(4, "big") + bytes(1000)))
        call = made.calls.get(timeout=30)
        assert raw.asks_back()  # the port has the data
        assert call.finish(8, b"no")
        assert raw.answer(1)["grpc-status"] == "8"
        assert raw.receive(RstStreamFrame, lambda frame: frame.error_code == 0)
        assert made.port.open == 0
        assert not call.finish(8, b"no")


class Part(bytearray):
    """A part of an answer that takes long to free."""

    free: Callable[[], None]

    def __del__(self) -> None:
        self.free()


def test_a_connection_that_ends_while_an_answer_is_freed(polled: Any) -> None:
    """Fails if a thread that has sent an answer looks at the connection after it has freed the answer: Python code may
    run meanwhile, and the connection may be gone. Only a sanitizer sees it."""
    made = polled()
    freeing, freed = threading.Event(), threading.Event()

    def free() -> None:
        freeing.set()
        assert freed.wait(30)

    with RawClient(made.number) as raw:
        raw.send(raw.opening(1), raw.opening(3))
        while made.calls.qsize() < 2:
            made.poll()
        first, second = made.calls.get(), made.calls.get()
        part = Part(b"answer")
        part.free = free
        first.finish(0, b"", (part,))  # the next poll sends it, as this thread polls
        del part
        other = threading.Thread(target=second.finish, args=(0, b""))
        other.start()
        assert freeing.wait(30)
    while made.port.counts()["connections"]:
        made.poll()
    freed.set()
    other.join()


def test_the_order_of_large_messages(polled: Any) -> None:
    """Fails if a large message that waits until another is complete is passed by those that began later. Clients that
    send one message after another would pass it for ever."""
    made = polled(partial=3 * LARGE)
    made.start()
    head, some = b"\0" + (2 * LARGE).to_bytes(4, "big"), LARGE + (1 << 14)
    with RawClient(made.number) as raw:
        raw.take_settings()
        for stream in (1, 3, 5):
            raw.send(raw.opening(stream), DataFrame(stream, head))
            call = made.calls.get(timeout=30)
            call.accept()
            raw.send(*(DataFrame(stream, bytes(1 << 14)) for _ in range(some >> 14)))
            assert raw.asks_back()
        for stream in (1, 3):
            raw.send(*(DataFrame(stream, bytes(1 << 14)) for _ in range((2 * LARGE - some) >> 14)))
            assert raw.asks_back()
        let_in = [frame.stream_id for frame in raw.frames if isinstance(frame, WindowUpdateFrame) and frame.stream_id]
        assert list(dict.fromkeys(let_in)) == [1, 3, 5]


def test_an_answered_call_is_not_let_in(polled: Any) -> None:
    """Fails if the rest of a large message whose call has its answer counts in the limit, and keeps others waiting."""
    made = polled(partial=3 * LARGE)
    made.start()
    head, frame = b"\0" + (2 * LARGE).to_bytes(4, "big"), 1 << 14
    with RawClient(made.number) as raw:
        raw.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}))  # the answer stays in the server
        raw.take_settings()
        calls = []
        for stream in (1, 3, 5):
            raw.send(raw.opening(stream), DataFrame(stream, head), *(DataFrame(stream, bytes(frame)) for _ in range(9)))
            calls.append(made.calls.get(timeout=30))
            calls[-1].accept()
            assert raw.asks_back()
        assert calls[1].finish(0, b"", (b"answer",))
        raw.send(*(DataFrame(1, bytes(frame)) for _ in range(2 * LARGE // frame - 9)))
        assert raw.receive(WindowUpdateFrame, lambda update: update.stream_id == 5)
        assert made.port.open == 3


READS_ALL = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as made:
    made.sendall(bytes.fromhex(sys.argv[2]))
    while made.recv(1 << 20):
        pass
"""


def test_an_answer_to_a_fast_reader(polled: Any) -> None:
    """Fails if a long answer keeps its thread, and Python's lock, as long as the client reads as fast as the server
    writes: a call of ``flush`` writes 17 times 256 KB at most, and another thread has its turn."""
    made, length = polled(), 1 << 28
    with RawClient(made.number) as raw:  # only encodes the frames; the reader is a process with a lock of its own
        frames = [
            SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: (1 << 31) - 1}),
            WindowUpdateFrame(0, window_increment=1 << 30),
            raw.opening(1),
            raw.opening(3),
        ]
        words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frame.serialize() for frame in frames)
    with subprocess.Popen([sys.executable, "-c", READS_ALL, str(made.number), words.hex()]) as reader:
        while made.calls.qsize() < 2:
            made.poll()
        first, second = made.calls.get(), made.calls.get()
        first.finish(0, b"", (bytes(length),))
        while first.queued:  # the buffers of the sockets grow meanwhile
            made.poll()
        other = threading.Thread(target=second.finish, args=(0, b"", (bytes(length),)))
        other.start()
        other.join()
        sent = length + 5 - second.queued
        assert 0 < sent <= 17 * ((1 << 18) + (1 << 15))
        while second.queued:
            made.poll()
        made.port.close()
        assert reader.wait(30) == 0


def test_many_calls_that_are_reset(polled: Any) -> None:
    """Fails if libnghttp2's own limit of resets ends a connection although the option sets no limit."""
    made = polled()
    made.start()
    with RawClient(made.number) as raw:
        for number in range(1, 4001, 2):
            raw.send(raw.opening(number), RstStreamFrame(number, error_code=8))
        assert raw.asks_back()


def test_trailers_of_a_request(polled: Any) -> None:
    """Fails if headers after a request change the headers that Python may be reading."""
    made = polled()
    made.start()
    with RawClient(made.number) as raw:
        raw.send(raw.opening(1, first="1"), DataFrame(1, b"\0\0\0\0\1x"))
        call = made.calls.get(timeout=30)
        before, deadline = call.headers, call.deadline
        block = raw._encoder.encode([("second", "2"), ("grpc-timeout", "1S")])
        raw.send(HeadersFrame(1, block, flags=["END_HEADERS", "END_STREAM"]))
        assert raw.asks_back()
        assert (call.headers, call.deadline) == (before, deadline)
        assert (b"first", b"1") in before
        call.finish(0, b"")
        assert raw.answer(1)["grpc-status"] == "0"


def test_a_handshake_that_waits_for_the_client(polled: Any, tmp_path: Path) -> None:
    """Fails if a TLS handshake stops for ever, and the thread that polls spins, once the client has to read before the
    server can send its other certificates."""
    made = polled(sent=1 << 12)
    certificate(tmp_path, "server")
    chain = tmp_path / "server.pem"
    chain.write_bytes(chain.read_bytes() * 150)
    made.port.certify(str(chain), str(tmp_path / "server.key"), None)
    made.start()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        plain.settimeout(30)
        plain.connect(("127.0.0.1", made.number))
        with context.wrap_socket(plain) as secured:
            assert secured.selected_alpn_protocol() == "h2"


def test_a_port_without_calls_sleeps(polled: Any) -> None:
    """Fails if a thread that waits for calls keeps its core busy, or returns before the time is over."""
    port = polled().port
    spent, begun = time.thread_time(), time.monotonic()
    port.poll(0.4)
    assert time.thread_time() - spent < 0.1
    assert time.monotonic() - begun >= 0.39
