"""Proves that mutated connections cost the native transport nothing but themselves. ``hostile.py`` makes them.

``ACCEL_HOSTILE="SEED FIRST COUNT" python -m pytest -k hostile_clients`` makes some connections again."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from hpack import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from accel.serve.process.serving import give_back_memory
from accel.serve.protocol import messages as proto
from accel.serve.security.access import Access
from tests.serve.transports.native.hostile import PREFACE, Connection
from tests.serve.transports.native.raw_http2 import RawClient
from tests.serve.transports.native.secured import OTHERS, TOKEN, Secured, handshake, secured_server
from tests.support.serving import WEIGHTS, Start, ask, client, until

TRANSPORTS = ("native",)
TOGETHER = 20  # connections between two looks at the server
UNAUTHENTICATED = "16"


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, max_message=1 << 20, max_resets=0.0, mode="explicit", models=("*",))


@pytest.fixture
def secured(repository: Path, start: Start, tmp_path: Path) -> Secured:
    """Starts a server with TLS and a token."""
    made = secured_server(tmp_path, lambda **more: start(repository, max_message=1 << 20, max_resets=0.0, **more))

    def plays(port: int, connection: Connection) -> None:
        play(port, connection, made.context, allowed=False)

    make = functools.partial(Connection, any_of=OTHERS)
    made.campaign = {"plays": plays, "make": make, "other": made.client, "headers": made.headers}
    return made


def play(port: int, made: Connection, secured: ssl.SSLContext | None = None, *, allowed: bool = True) -> None:
    """Sends the bytes of a connection in pieces. Asserts that the server answers the calls that it has to answer, or
    refuses them if the client isn't ``allowed`` to ask, and that all that it sends is HTTP/2 and gRPC."""
    rng, data = made.random, made.bytes
    with RawClient(port, begins=False, secured=secured) as raw:
        while data and not raw.ended:
            size = rng.choice([len(data), len(data), 1, 9, 1000])
            raw.send_bytes(data[:size])
            data = data[size:]
        if rng.random() < 0.1:  # leaves without a word
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, rng.randrange(2)))
            return
        kept = made.framed and raw.asks_back()
        assert kept or (raw.ended and not made.plain) or not made.framed, raw.frames
        if kept:
            for stream, x in made.inputs.items():
                if allowed:
                    check_answer(raw, stream, x)
                else:
                    assert raw.answer(stream)["grpc-status"] == UNAUTHENTICATED
                    assert not any(isinstance(f, DataFrame) and f.stream_id == stream for f in raw.frames)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(raw.socket, socket.SHUT_WR)  # a method of its own would end TLS
        raw.receive(Frame, lambda _: raw.ended)
        assert raw.ended
        check_frames(raw.frames)


def check_answer(raw: RawClient, stream: int, x: np.ndarray) -> None:
    assert raw.answer(stream).get("grpc-status") == "0", (stream, raw.answer(stream))
    body = b"".join(f.data for f in raw.frames if isinstance(f, DataFrame) and f.stream_id == stream)
    found = proto.message("ModelInferResponse").FromString(body[5:])
    y = np.frombuffer(found.raw_output_contents[0], np.float32).reshape(found.outputs[0].shape)
    np.testing.assert_allclose(y, x @ WEIGHTS, rtol=1e-5)


def check_frames(frames: Iterable[Frame]) -> None:
    """Asserts that each stream has one end at most, and that each status is one of gRPC's or HTTP's."""
    ended: set[int] = set()
    for frame in frames:
        if isinstance(frame, HeadersFrame):
            status = frame.decoded.get("grpc-status")
            assert status is None or 0 <= int(status) <= 16
            assert status is not None or frame.decoded[":status"] in ("200", "405", "415")
        if isinstance(frame, HeadersFrame | DataFrame | RstStreamFrame):
            assert frame.stream_id not in ended or isinstance(frame, RstStreamFrame), frame
            if "END_STREAM" in frame.flags or isinstance(frame, RstStreamFrame):
                ended.add(frame.stream_id)
        if isinstance(frame, GoAwayFrame):
            assert frame.error_code <= 13


def campaign(
    process: Any,
    seed: int,
    numbers: Iterable[int],
    caplog: Any,
    plays: Callable[[int, Connection], None] = play,
    make: Callable[[str], Connection] = Connection,
    other: Callable[[int], triton.InferenceServerClient] = client,
    **options: Any,
) -> int:
    """Plays connections, and returns their count. Looks at the server now and then: ``other`` clients, which ask with
    ``options``, get their answers, all counts come back to zero, and nothing is logged as an error."""
    port, transport = process.ports["grpc"], process.transports["grpc"]
    number = 0

    def settled() -> bool:
        counts = transport._port.counts()
        return not (counts["connections"] or counts["open"] or counts["counted"] or process.server.under_way)

    caplog.set_level(logging.ERROR, "accel.serve")
    for number in numbers:
        try:
            plays(port, make(f"{seed} {number}"))
            if number % TOGETHER == 0:
                with other(port) as honest:
                    ask(honest, **options)
                until(settled)
            assert not caplog.records
        except (AssertionError, HyperframeError, HPACKError) as error:
            raise AssertionError(f'connection {number} of seed {seed} (ACCEL_HOSTILE="{seed} {number} 1")') from error
    until(settled)
    return number


def test_hostile_clients(process: Any, caplog: Any) -> None:
    """Fails if a mutated connection ends the server, gets a wrong answer or none for its right calls, leaves a call or
    a request behind, or makes the server log an error."""
    seed, first, count = map(int, os.environ.get("ACCEL_HOSTILE", "1 0 300").split())
    campaign(process, seed, range(first, first + count), caplog)


def test_hostile_clients_without_a_token(secured: Secured, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a client without a token, whatever it sends over TLS, gets anything but UNAUTHENTICATED, or if the
    server lets a single one of its calls pass."""
    seed, first, count = map(int, os.environ.get("ACCEL_HOSTILE", "2 0 100").split())
    check = Access.check
    passed: list[str | None] = []

    def watched(self: Access, token: str | None, **wanted: Any) -> str:
        name = check(self, token, **wanted)
        passed.append(token)
        return name

    monkeypatch.setattr(Access, "check", watched)
    campaign(secured.process, seed, range(first, first + count), caplog, **secured.campaign)
    assert set(passed) == {TOKEN}
    answered = sum(model.statistics().success.count for model in secured.process.server.repository.models())
    assert answered == len(range(first, first + count, TOGETHER))


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.proof)])
def test_handshakes_that_are_cut(secured: Secured, caplog: Any, step: int) -> None:
    """Fails if a TLS handshake that is cut at any byte, or has a wrong byte, costs the server more than its connection.
    A third of the clients close, a third reset, and a third say nothing more."""
    caplog.set_level(logging.ERROR, "accel.serve")
    port, transport = secured.process.ports["grpc"], secured.process.transports["grpc"]
    whole = handshake(port, secured.context)
    assert whole > 300
    with contextlib.ExitStack() as silent:
        for length in range(0, whole, step):
            handshake(port, secured.context, cut=length, leaves=("closes", "resets", silent)[length // step % 3])
            handshake(port, secured.context, wrong=length)
        with secured.client(port) as other:
            ask(other, headers=secured.headers)
    until(lambda: not transport._port.counts()["connections"])
    assert not caplog.records
    assert handshake(port, secured.context) > 300


def test_the_connections_are_what_they_say() -> None:
    """Fails if most connections are refused at once, so that the campaign proves little, or if a seed makes other
    connections the next time."""
    made = [Connection(f"1 {number}") for number in range(200)]
    assert sum(one.plain for one in made) > 20
    assert sum(bool(one.inputs) and not one.plain for one in made) > 20
    assert sum(not one.framed for one in made) > 5
    assert all(one.bytes.startswith(PREFACE) for one in made)
    assert [Connection(f"1 {number}").bytes for number in range(200)] == [one.bytes for one in made]


@pytest.mark.nightly
def test_a_long_campaign(process: Any, caplog: Any) -> None:
    """Fails as the test above, with other connections each time, or if the memory of the server grows.
    ``ACCEL_HOSTILE_SECONDS`` sets its time."""
    last(caplog, lambda seed, numbers: campaign(process, seed, numbers, caplog))


@pytest.mark.nightly
def test_a_long_campaign_without_a_token(secured: Secured, caplog: Any) -> None:
    """Fails as the test above, over TLS and with handshakes that are cut between the connections."""

    def plays(port: int, made: Connection) -> None:
        with contextlib.ExitStack() as silent:
            for leaves in ("closes", "resets", silent):
                handshake(port, secured.context, cut=made.random.randrange(1000), leaves=leaves)
            handshake(port, secured.context, wrong=made.random.randrange(1000))
        secured.campaign["plays"](port, made)

    options = {**secured.campaign, "plays": plays}
    last(caplog, lambda seed, numbers: campaign(secured.process, seed, numbers, caplog, **options))


def last(caplog: Any, plays: Callable[[int, Iterable[int]], int]) -> None:
    """Plays connections of a random seed for a long time. Asserts that the memory of this process doesn't grow."""
    seconds = float(os.environ.get("ACCEL_HOSTILE_SECONDS", "600"))
    seed, began = random.SystemRandom().randrange(1 << 31), time.monotonic()

    def passed(share: float) -> Iterable[int]:
        return itertools.takewhile(lambda _: time.monotonic() - began < share * seconds, itertools.count(first))

    def memory() -> int:
        gc.collect()
        give_back_memory()
        return int(Path("/proc/self/statm").read_text().split()[1])

    first = 0
    first = plays(seed, passed(0.3)) + 1
    before = memory()
    count = plays(seed, passed(1.0)) + 1
    grown = memory() / before
    print(f"\n{count} connections of seed {seed}, memory {grown:.3f} times")
    assert grown < 1.05 or "ACCEL_PORT_LIBRARY" in os.environ  # a sanitizer keeps what is freed
