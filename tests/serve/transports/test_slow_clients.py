"""Proves that clients which never finish a request, never read answers or stay silent don't block other clients."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from accel.serve.protocol import messages as proto
from accel.serve.transports.grpc.arrivals import Arrivals
from tests.support.serving import FLOAT, ask, client, identity, linear, until

INFER = f"/{proto.SERVICE}/ModelInfer"
STREAM = f"/{proto.SERVICE}/ModelStreamInfer"


# All clients of these tests have one address.
NO_LIMIT = ("--max-connections-per-address", "0")


@pytest.fixture
def served(tmp_path: Path, serve: Any) -> Any:
    """Serves ``linear`` and ``same`` on sixteen threads. The output of ``same`` is as large as its input."""
    linear(tmp_path / "models" / "linear" / "1")
    identity(tmp_path / "models" / "same" / "1", FLOAT)
    (tmp_path / "models" / "same" / "config.pbtxt").write_text("max_batch_size: 0")
    found = serve(str(tmp_path / "models"), "--grpc-threads", "16", "--drain", "1", *NO_LIMIT)
    found.ports = found.wait_for("serving")["ports"]
    return found


def own_channel(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])


@pytest.mark.proof
def test_clients_that_never_finish_their_message(served: Any) -> None:
    """Fails if half-sent requests over gRPC and HTTP block other clients permanently. The test sends more half-sent
    requests than the server has threads."""
    released = threading.Event()

    def nothing() -> Iterator[bytes]:
        released.wait(100)
        yield from ()

    head = b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{"
    with ExitStack() as stack:
        stack.callback(released.set)
        slow = []
        for _ in range(32):
            channel = stack.enter_context(own_channel(served.ports["grpc"]))
            slow.append(channel.stream_unary(INFER).future(nothing()))
            left = stack.enter_context(socket.create_connection(("127.0.0.1", served.ports["http"])))
            left.sendall(head)
        with client(served.ports["grpc"]) as made:
            for _ in range(3):
                ask(made, client_timeout=60)
        until(lambda: grpc.StatusCode.CANCELLED in [one.code() for one in slow if one.done()])
    assert served.end() == 0


def test_only_the_oldest_are_cut_off_and_only_where_they_crowd() -> None:
    """Checks that the server cancels only old calls that block other calls, and calls that exceed the time limit."""

    class Call:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    now = [0.0]
    arrivals = Arrivals(8, patience=5.0, longest=300.0, clock=lambda: now[0])
    calls = [Call() for _ in range(6)]
    arrived = threading.Semaphore(0)
    end = threading.Event()

    def never() -> Iterator[bytes]:
        arrived.release()
        end.wait(60)
        yield b"late"

    threads = []
    for call in calls:
        threads.append(threading.Thread(target=arrivals.receive, args=(never(), call)))
        threads[-1].start()
        assert arrived.acquire(timeout=30)
        now[0] += 1.0
    # Calls may occupy only four of the eight threads, so two of the six calls are too many. ``sweep`` cancels only one
    # call, because only one call is older than five seconds.
    assert arrivals.sweep() == 1
    now[0] += 10.0
    assert arrivals.sweep() == 2
    assert [call.cancelled for call in calls] == [True, True, False, False, False, False]
    now[0] += 300.0
    arrivals.sweep()
    assert all(call.cancelled for call in calls)
    end.set()
    for thread in threads:
        thread.join(30)
    assert arrivals.sweep() == 0


def test_clients_that_do_not_read(served: Any) -> None:
    """Fails if unread answers block other clients, or if the server sends answers without a limit to a client that
    doesn't read."""
    request = proto.message("ModelInferRequest")(model_name="same")
    request.inputs.add(name="x", datatype="FP32", shape=[1 << 18])
    request.raw_input_contents.append(bytes(1 << 20))
    body = request.SerializeToString()
    sent = [0]

    def requests() -> Iterator[bytes]:
        for _ in range(800):
            sent[0] += 1
            yield body

    head = (
        b"POST /v2/models/same/infer HTTP/1.1\r\nHost: here\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n%s"
    )
    text = (
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [262144], "parameters": {"binary_data_size": 1048576}}'
        b'], "parameters": {"binary_data_output": true}}'
    )
    with ExitStack() as stack:
        channel = stack.enter_context(own_channel(served.ports["grpc"]))
        unread = channel.stream_stream(STREAM)(requests())
        stack.callback(unread.cancel)
        for _ in range(20):
            left = stack.enter_context(socket.socket())
            left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            left.connect(("127.0.0.1", served.ports["http"]))
            left.sendall(head % (len(text), len(text) + (1 << 20), text) + bytes(1 << 20))
        with client(served.ports["grpc"]) as made:
            for _ in range(10):
                ask(made, client_timeout=60)
            steady(sent)
            ask(made, client_timeout=60)
        assert sent[0] < 700  # the limit is 128 unanswered requests plus the connection's buffers
        assert len(next(unread)) > 1 << 20
        assert served.end() == 0


def steady(sent: list[int]) -> None:
    """Waits for at most a minute until nothing has been sent for a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = list(sent)
        time.sleep(1.0)
        if before == sent:
            return
    pytest.fail(f"still sending: {sent}")


@pytest.mark.proof
@pytest.mark.slow
def test_ten_thousand_connections_left_open(served: Any, record_property: Any) -> None:
    """Fails if silent connections block other clients, slow other clients almost to a halt, or stay open after their
    clients have ended. If the system allows too few open files, the test opens fewer connections, and its output
    reports the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 500)
    record_property("connections", count)
    print(f"{count} connections, of 10000; the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = open_files(served)
    try:
        with ExitStack() as stack:
            for number in range(count):
                port = served.ports["http" if number % 10 == 0 else "grpc"]
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with client(served.ports["grpc"]) as made:
                for _ in range(20):
                    np.testing.assert_allclose(ask(made, client_timeout=60).shape, (1, 3))
            until(lambda: open_files(served) >= before + count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: open_files(served) <= before + 50)
    with client(served.ports["grpc"]) as made:
        ask(made, client_timeout=60)
    assert served.end() == 0


def open_files(served: Any) -> int:
    return len(list(Path(f"/proc/{served.process.pid}/fd").iterdir()))
