"""Tests what the native transport does itself: deadlines, cancellation, compressed messages, what is no gRPC, and a
machine on which it can't be compiled."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, RstStreamFrame

from accel.errors import UnsupportedHere
from accel.serve.protocol import messages as proto
from accel.serve.transports.native import build
from accel.serve.transports.native.sockets import listen
from tests.serve.transports.native.raw_http2 import RawClient
from tests.support.serving import Start, ask, client, until

TRANSPORTS = ("native",)
SERVICE = f"/{proto.SERVICE}/"


HANGS = 2.0  # the first value of a request to ``bad`` that hangs (see Faulty)


def message(model: str = "linear", rows: int = 1, first: float = 0.0) -> bytes:
    made = proto.message("ModelInferRequest")(model_name=model)
    made.inputs.add(name="x", datatype="FP32", shape=[rows, 4])
    values = np.zeros((rows, 4), np.float32)
    values[0, 0] = first
    made.raw_input_contents.append(values.tobytes())
    return bytes(made.SerializeToString())


def framed(body: bytes, packed: bool = False) -> bytes:
    return bytes([packed]) + len(body).to_bytes(4, "big") + body


def pieces(stream: int, body: bytes) -> list[DataFrame]:
    return [DataFrame(stream, body[at : at + 16_000]) for at in range(0, len(body), 16_000)]


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, max_message=1 << 20)


def channel(process: Any, *options: tuple[str, Any]) -> grpc.Channel:
    place = f"127.0.0.1:{process.ports['grpc']}"
    return grpc.insecure_channel(place, [("grpc.use_local_subchannel_pool", 1), *options])


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_deadline(faulty: Any, method: str) -> None:
    """Fails if a call outlives its deadline, or if its request keeps its place in the server."""
    with client(faulty.ports["grpc"]) as other:
        with RawClient(faulty.ports["grpc"]) as raw:  # a client that doesn't watch the deadline itself
            body = framed(message("bad", first=HANGS))
            raw.send(raw.opening(1, path=SERVICE + method, grpc_timeout="300m"), DataFrame(1, body))
            assert raw.answer(1)["grpc-status"] == "4"
        ask(other, "good")
        faulty.released.set()
        until(lambda: faulty.server.under_way == 0)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_compressed_messages(process: Any, pack: Any) -> None:
    """Fails if a compressed message isn't unpacked, or if it may become as large as it likes."""
    name = "gzip" if pack is gzip.compress else "deflate"
    port = process.ports["grpc"]

    def status(body: bytes, encoding: str = name, packed: bool = True) -> tuple[str, str]:
        with RawClient(port) as raw:
            data = framed(body, packed)
            frames = pieces(1, data)
            frames[-1].flags.add("END_STREAM")
            raw.send(raw.opening(1, grpc_encoding=encoding), *frames)
            found = raw.answer(1)
            return found["grpc-status"], found.get("grpc-message", "")

    assert status(pack(message())) == ("0", "")
    assert status(message(), packed=False) == ("0", "")  # the flag of a message decides
    assert status(pack(message(rows=1 << 17)))[0] == "8"  # 2 MiB, and the limit is 1 MiB
    assert status(message())[0] == "13"
    assert status(pack(message())[:-3])[0] == "13"
    assert status(pack(message()) + b"more")[0] == "13"
    code, text = status(pack(message()), encoding="br")
    assert code == "12"
    assert "'br'" in text


def test_a_call_that_is_cancelled(faulty: Any) -> None:
    """Fails if the server runs the request of a client that has gone."""
    with RawClient(faulty.ports["grpc"]) as raw:
        raw.send(raw.opening(1), DataFrame(1, framed(message("bad", first=HANGS)), flags=["END_STREAM"]))
        assert faulty.running.acquire(timeout=30)
        raw.send(raw.opening(3), DataFrame(3, framed(message("bad", first=7.0)), flags=["END_STREAM"]))
        until(lambda: faulty.server.under_way == 2)
    until(lambda: faulty.transports["grpc"]._port.open == 0)
    faulty.released.set()
    until(lambda: faulty.server.under_way == 0)
    assert not any(7.0 in session.marks for session in faulty.sessions)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({":method": "GET"}, {":status": "405"}),
        ({"content-type": "text/html"}, {":status": "415"}),
        ({"path": "/no/Method"}, {":status": "200", "grpc-status": "12"}),
        ({"large": "e" * 20_000}, {":status": "200", "grpc-status": "8"}),
    ],
    ids=["method", "type", "path", "large"],
)
def test_what_is_no_call(process: Any, headers: dict[str, str], status: dict[str, str]) -> None:
    """Fails if a request that is no call of gRPC gets no answer, or ends the connection for the calls after it."""
    with RawClient(process.ports["grpc"]) as raw:
        raw.send(raw.opening(1, "END_STREAM", **headers))
        assert status.items() <= raw.answer(1).items()
        raw.send(raw.opening(3), DataFrame(3, framed(message()), flags=["END_STREAM"]))
        assert raw.answer(3) == {"grpc-status": "0"}


def test_a_message_that_is_too_large(process: Any) -> None:
    """Fails if the server reads a message that it won't take."""
    with RawClient(process.ports["grpc"]) as raw:
        raw.send(raw.opening(1), DataFrame(1, b"\0" + (1 << 30).to_bytes(4, "big")))
        found = raw.answer(1)
        assert found["grpc-status"] == "8"
        assert found["grpc-message"] == "SERVER: Received message larger than max (1073741824 vs. 1048576)"
        assert raw.receive(RstStreamFrame, lambda frame: frame.error_code == 0)  # the client needn't send the rest


@pytest.mark.parametrize(
    "method", ["health.v1.Health/Check", "reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
def test_a_malformed_message_beside_the_protocol(process: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a message that is none of its method's gets another status than with grpcio's server, or fills the log:
    any client may send it, as these methods need no token."""
    with RawClient(process.ports["grpc"]) as raw:
        raw.send(raw.opening(1, path=f"/grpc.{method}"), DataFrame(1, framed(b"\xff"), flags=["END_STREAM"]))
        assert raw.answer(1)["grpc-status"] == "13"
        assert raw.answer(1)["grpc-message"] == "Exception deserializing request!"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_messages_in_pieces(process: Any) -> None:
    """Fails if the server needs a message in one piece: here, each byte comes in a frame of its own."""
    with RawClient(process.ports["grpc"]) as raw:
        body = framed(message())
        raw.send(raw.opening(1), *(DataFrame(1, body[at : at + 1]) for at in range(len(body))))
        assert raw.answer(1) == {"grpc-status": "0"}


def test_what_is_no_http2(process: Any) -> None:
    """Fails if a client of another protocol keeps its connection."""
    broken = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"?" * 99
    for words in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", os.urandom(1000), broken):
        with socket.create_connection(("127.0.0.1", process.ports["grpc"]), timeout=30) as made:
            made.sendall(words)
            while made.recv(1 << 16):
                pass
    with client(process.ports["grpc"]) as other:
        ask(other)


def test_answers_of_other_threads(process: Any) -> None:
    """Fails if calls of many threads and connections get the answers of others, or none."""
    wrong: list[Any] = []

    def run() -> None:
        with channel(process) as made:
            call = made.unary_unary(SERVICE + "ModelInfer")
            for number in range(40):
                count = number % 8 + 1
                answer = proto.message("ModelInferResponse").FromString(call(message(rows=count), timeout=60))
                if list(answer.outputs[0].shape) != [count, 3]:
                    wrong.append(count)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    until(lambda: process.transports["grpc"]._port.counted == 0)


def test_a_machine_without_the_library(repository: Path, tmp_path: Path) -> None:
    """Fails if `accel serve --transport native` doesn't say what is missing, where it can't be compiled."""
    words = [sys.executable, "-m", "accel", "serve", str(repository), "--grpc-port", "0", "--no-http", "--transport"]
    path = os.pathsep.join(filter(None, sys.path))
    found = subprocess.run(
        [*words, "native"], capture_output=True, text=True, env={"PATH": str(tmp_path), "PYTHONPATH": path, "HOME": "/"}
    )
    assert found.returncode != 0
    assert "there is no C compiler; install a C compiler" in found.stderr
    assert "--transport auto" in found.stderr


def test_a_library_that_is_damaged(tmp_path: Path) -> None:
    """Fails if a damaged file in the cache gives a traceback instead of an advice."""
    (tmp_path / "accel_port.abi3.so").write_bytes(b"nothing")
    with pytest.raises(UnsupportedHere, match="remove"):
        build.load(tmp_path / "accel_port.abi3.so")


def test_the_sockets() -> None:
    """Fails if a taken port is taken again, or if the error doesn't name the option."""
    [first] = listen("127.0.0.1", 0, shared=False)
    with first:
        port = first.getsockname()[1]
        with pytest.raises(UnsupportedHere, match="--grpc-port"):
            listen("127.0.0.1", port, shared=False)
        with pytest.raises(UnsupportedHere, match=r"no\.such\.host\.invalid"):
            listen("no.such.host.invalid", 0, shared=False)
    one = listen("localhost", 0, shared=True)
    two = listen("127.0.0.1", one[0].getsockname()[1], shared=True)
    for made in (*one, *two):
        made.close()


def test_goaway(process: Any) -> None:
    """Fails if clients aren't told that the server ends, before their calls are refused. Also fails if the connections
    that they open afterwards are told so: gRPC's clients would then connect again and again until memory is full."""
    with RawClient(process.ports["grpc"]) as raw:
        raw.send(raw.opening(1), DataFrame(1, framed(message()), flags=["END_STREAM"]))
        assert raw.answer(1)
        assert process.server.drain(5)
        assert raw.receive(GoAwayFrame, lambda frame: frame.error_code == 0)
    with RawClient(process.ports["grpc"]) as raw:
        raw.send(raw.opening(1), DataFrame(1, framed(message()), flags=["END_STREAM"]))
        assert raw.answer(1)["grpc-status"] == "14"
        assert not any(isinstance(frame, GoAwayFrame) for frame in raw.frames)
