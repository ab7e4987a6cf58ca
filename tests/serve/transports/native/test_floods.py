"""Proves that the native transport ends the connections of clients that cost the server more than themselves, and
leaves all others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
)

from accel.serve.transports.native import front
from accel.serve.transports.native.front import NativeTransport
from tests.serve.transports.native.raw_http2 import RawClient
from tests.support.serving import Start, ask, client, linear, plain, until

TRANSPORTS = ("native",)
ENHANCE_YOUR_CALM = 11
MOST_RESETS = 200


@pytest.fixture
def process(tmp_path: Path, start: Start) -> Any:
    linear(tmp_path / "models" / "linear" / "1")
    return start(tmp_path / "models", http_port=0, max_resets=float(MOST_RESETS))


def resets(made: RawClient, count: int) -> Iterator[Frame]:
    for number in range(count):
        yield made.opening(2 * number + 1)
        yield RstStreamFrame(2 * number + 1, error_code=8 * (number % 2))  # 0, "no error", costs as much


def pings(made: RawClient, count: int) -> Iterator[Frame]:
    yield from [PingFrame(0, b"flooding")] * count


def settings(made: RawClient, count: int) -> Iterator[Frame]:
    yield from [SettingsFrame(0, {4: 65535})] * count


def priorities(made: RawClient, count: int) -> Iterator[Frame]:
    yield from [PriorityFrame(1, stream_weight=7)] * count


def empty_data(made: RawClient, count: int) -> Iterator[Frame]:
    yield made.opening(1)
    yield from [DataFrame(1)] * count


def continuations(made: RawClient, count: int) -> Iterator[Frame]:
    yield HeadersFrame(1, made.headers())
    for _ in range(count):
        yield ContinuationFrame(1)


def headers(made: RawClient, count: int) -> Iterator[Frame]:
    """Sends ``count`` KB of headers, which HPACK packs into few bytes."""
    names = {f"h{number}": "x" * 1000 for number in range(count)}
    block = made.headers(**names)
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    yield HeadersFrame(1, pieces[0], flags=[] if pieces[1:] else ["END_HEADERS"])
    for number, piece in enumerate(pieces[1:], 2):
        yield ContinuationFrame(1, piece, flags=["END_HEADERS"] if number == len(pieces) else [])


Flood = Callable[[RawClient, int], Iterator[Frame]]
# What clients may send, and what is a flood.
FLOODS: list[tuple[Flood, int, int]] = [
    (resets, MOST_RESETS - 10, 2 * MOST_RESETS),
    (pings, 900, 2000),
    (settings, 80, 200),
    (priorities, 900, 2000),
    (empty_data, 900, 2000),
    (continuations, 0, 20),
    (headers, 10, 100),
]


@pytest.mark.parametrize(("flood", "some", "many"), FLOODS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_flood(process: Any, flood: Flood, some: int, many: int) -> None:
    """Fails if a flood costs more than its own connection, if the metrics don't tell of it, if another client notices
    it, or if a client that sends less is taken for a flood."""
    port = process.ports["grpc"]
    with client(port) as other, RawClient(port) as honest, RawClient(port) as hostile:
        ask(other)
        before = threading.active_count()
        if some:
            honest.send(*flood(honest, some))
            assert honest.asks_back()
        hostile.send(*flood(hostile, many))
        assert hostile.end_code() == ENHANCE_YOUR_CALM
        ask(other)
        if some:
            assert honest.asks_back()
        assert threading.active_count() <= before + 2  # a thread that takes over the loop, and a method's
        reason = f'accel_grpc_connections_ended{{reason="{flood.__name__}"}} 1.0'
        assert reason in plain(process, "/metrics")[1].decode()
        until(lambda: process.transports["grpc"]._port.counts()["open"] == (flood in (empty_data, headers)))
    assert process.server.under_way == 0


def test_the_resets_of_an_address(tmp_path: Path, start: Start) -> None:
    """Fails if a client escapes the limit of resets with many connections: here, each resets one call, and eleven are
    too many for an address."""
    linear(tmp_path / "models" / "linear" / "1")
    process = start(tmp_path / "models", max_resets=0.1)
    codes: list[int | None] = []
    with client(process.ports["grpc"]) as other:
        while not codes and counts(process)["accepted"] < 60:
            with RawClient(process.ports["grpc"]) as made:
                made.send(*resets(made, 1))
                if not made.asks_back():
                    codes.append(made.end_code())
        assert codes == [ENHANCE_YOUR_CALM]
        assert counts(process)["accepted"] > 10
        ask(other)


def test_the_connections_of_an_address(tmp_path: Path, start: Start) -> None:
    """Fails if an address gets more connections than it may have, or none again after it has closed some."""
    linear(tmp_path / "models" / "linear" / "1")
    process = start(tmp_path / "models", http_port=0, max_connections=3)
    port = process.ports["grpc"]
    made = [RawClient(port) for _ in range(3)]
    until(lambda: counts(process)["accepted"] == 3)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as fourth:
        assert fourth.recv(1) == b""
    assert counts(process)["refused"] == 1
    assert "accel_grpc_connections_refused 1.0" in plain(process, "/metrics")[1].decode()
    made.pop().socket.close()
    until(lambda: counts(process)["connections"] == 2)
    with client(port) as again:
        ask(again)
    for one in made:
        one.socket.close()


@pytest.mark.parametrize(("files", "most"), [(64, 32), (1 << 20, 4096)])
def test_an_address_leaves_files(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    """Fails if, without an option, an address may take all files that the process may open, or if the metrics don't
    tell the limit."""
    monkeypatch.setattr(front.resource, "getrlimit", lambda _: (files, 1 << 20))
    linear(tmp_path / "models" / "linear" / "1")
    process = start(tmp_path / "models", http_port=0)
    assert f"accel_grpc_connections_limit {most}.0" in plain(process, "/metrics")[1].decode()
    if most > 100:
        return
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(RawClient(process.ports["grpc"])) for _ in range(most + 8)]
        until(lambda: counts(process)["refused"] == 8)
        assert sum(one.asks_back() for one in made) == most


def counts(process: Any) -> dict[str, Any]:
    transport = process.transports["grpc"]
    assert isinstance(transport, NativeTransport)
    return dict(transport._port.counts())
