"""Proves that mutated connections cost the native transport nothing but themselves. ``hostile.py`` makes them.

``ACCEL_HOSTILE="SEED FIRST COUNT" python -m pytest -k hostile_clients`` makes some connections again."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hpack import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from accel.serve.process.serving import give_back_memory
from accel.serve.protocol import messages as proto
from tests.serve.transports.native.hostile import PREFACE, Connection
from tests.serve.transports.native.raw_http2 import RawClient
from tests.support.serving import WEIGHTS, Start, ask, client, until

TRANSPORTS = ("native",)
TOGETHER = 20  # connections between two looks at the server


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, max_message=1 << 20, max_resets=0.0, mode="explicit", models=("*",))


def play(port: int, made: Connection) -> None:
    """Sends the bytes of a connection in pieces. Asserts that the server answers the calls that it has to answer, and
    that all that it sends is HTTP/2 and gRPC."""
    rng, data = made.random, made.bytes
    with RawClient(port, begins=False) as raw:
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
                check_answer(raw, stream, x)
        with contextlib.suppress(OSError):
            raw.socket.shutdown(socket.SHUT_WR)
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


def campaign(process: Any, seed: int, numbers: Iterable[int], caplog: Any) -> int:
    """Plays connections, and returns their count. Looks at the server now and then: other clients get their answers,
    all counts come back to zero, and nothing is logged as an error."""
    port, transport = process.ports["grpc"], process.transports["grpc"]
    number = 0

    def settled() -> bool:
        counts = transport._port.counts()
        return not (counts["connections"] or counts["open"] or counts["counted"] or process.server.under_way)

    caplog.set_level(logging.ERROR, "accel.serve")
    for number in numbers:
        try:
            play(port, Connection(f"{seed} {number}"))
            if number % TOGETHER == 0:
                with client(port) as other:
                    ask(other)
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
    seconds = float(os.environ.get("ACCEL_HOSTILE_SECONDS", "600"))
    seed, began = random.SystemRandom().randrange(1 << 31), time.monotonic()

    def passed(share: float) -> Iterable[int]:
        return itertools.takewhile(lambda _: time.monotonic() - began < share * seconds, itertools.count(first))

    def memory() -> int:
        gc.collect()
        give_back_memory()
        return int(Path("/proc/self/statm").read_text().split()[1])

    first = 0
    first = campaign(process, seed, passed(0.3), caplog) + 1
    before = memory()
    count = campaign(process, seed, passed(1.0), caplog) + 1
    grown = memory() / before
    print(f"\n{count} connections of seed {seed}, memory {grown:.3f} times")
    assert grown < 1.05 or "ACCEL_PORT_LIBRARY" in os.environ  # a sanitizer keeps what is freed
