"""Proves that a server which ends loses no request, and first tells load balancers that it ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest

from accel.serve.protocol import messages as proto
from tests.support.serving import Served, until

REQUEST = proto.message("ModelInferRequest")(model_name="linear")
REQUEST.inputs.add(name="x", datatype="FP32", shape=[1, 4])
REQUEST.raw_input_contents.append(bytes(16))
MESSAGE = REQUEST.SerializeToString()
INFER, STREAM = (f"/{proto.SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer"))


def channel(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])


class Callers:
    """Threads that keep four calls under way each, and count the statuses."""

    def __init__(self, port: int, count: int) -> None:
        self.seen: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(port,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int) -> None:
        with channel(port) as made:
            call = made.unary_unary(INFER)
            calls = [call.future(MESSAGE) for _ in range(4)]
            while not self._stop.is_set():
                try:
                    calls.pop(0).result()
                    self.seen["OK"] += 1
                except grpc.RpcError as error:
                    self.seen[error.code().name] += 1
                    if "connect" in str(error.details()):  # the server has ended
                        return
                calls.append(call.future(MESSAGE))

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_no_call_is_cancelled(repository: Path, serve: Callable[..., Served], processes: str) -> None:
    """Fails if a call gets another status than UNAVAILABLE, after which clients send it again, while a server ends."""
    served = serve(str(repository), "--processes", processes, "--drain-delay", "0.2")
    port = served.wait_for("all processes serve" if processes == "2" else "serving")["ports"]["grpc"]
    callers = Callers(port, 8)
    until(lambda: callers.seen["OK"] > 500)
    assert served.end() == 0
    callers.end()
    assert set(callers.seen) <= {"OK", "UNAVAILABLE"}, callers.seen


def status(made: HTTPConnection, path: str, body: bytes | None = None) -> tuple[int, str | None]:
    made.request("POST" if body else "GET", path, body)
    answer = made.getresponse()
    answer.read()
    return answer.status, answer.getheader("Connection")


def test_the_delay_before_the_end(repository: Path, serve: Callable[..., Served]) -> None:
    """Fails if the server refuses requests, or says that it is ready, while load balancers take it out of service."""
    served = serve(str(repository), "--drain-delay", "2")
    ports = served.wait_for("serving")["ports"]
    made = HTTPConnection("127.0.0.1", ports["http"], timeout=10)
    assert status(made, "/v2/health/ready") == (200, None)
    signalled = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    served.wait_for("stopping")
    until(lambda: status(made, "/v2/health/ready")[0] == 503)
    row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    assert status(made, "/v2/models/linear/infer", json.dumps({"inputs": [row]}).encode()) == (200, "close")
    assert status(made, "/v2/models/linear/ready")[0] == 400
    with channel(ports["grpc"]) as other:
        assert other.unary_unary(INFER)(MESSAGE)
        assert served.process.wait(30) == 0
    assert time.monotonic() - signalled >= 2
    made.close()


def test_an_open_stream_ends_with_unavailable(repository: Path, start: Any) -> None:
    """Fails if a stream that its client keeps open delays the end of the server, or is cancelled."""
    process = start(repository)
    release = threading.Event()

    def requests() -> Any:
        yield MESSAGE
        release.wait(30)

    with channel(process.ports["grpc"]) as made:
        answers = made.stream_stream(STREAM)(requests())
        assert next(answers)
        assert process.server.drain(5)
        with pytest.raises(grpc.RpcError) as raised:
            next(answers)
        release.set()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    started = time.monotonic()
    process.transports["grpc"].finish(30)
    assert time.monotonic() - started < 5  # no call is left that it waits for
