"""Proves that no request is lost when a model version is replaced, and that streams keep the order of responses."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.serve.core.server import InferenceServer
from accel.serve.core.transport import InferCall, InferReply, WireInput
from accel.serve.models.files import ModelFolder
from accel.serve.models.loading import Loading, load_version
from accel.serve.models.model import Retired
from accel.serve.models.repository import Repository
from accel.serve.protocol import messages as proto
from accel.serve.protocol.inference import InferenceRequest, ModelStatistics
from accel.serve.transports.grpc.message import ReceivedRequest
from accel.serve.transports.grpc.stream import InferStream
from tests.support.serving import WEIGHTS, linear


def test_a_request_between_lookup_and_submit(tmp_path: Path) -> None:
    """Checks that a request runs on the new version if the old version is replaced between the lookup and the
    submission."""
    linear(tmp_path / "linear" / "1")
    repository = Repository(tmp_path, mode="explicit", startup=["*"])
    repository.start()
    server = InferenceServer(repository)
    real, asked = repository.get, []

    def get(name: str, version: str = "") -> Any:
        found = real(name, version)
        asked.append(found)
        if len(asked) == 1:
            linear(tmp_path / "linear" / "1", scale=2.0)
            repository.load("linear")
            found.retire(5.0)  # in a real server, another thread makes this call
        return found

    repository.get = get  # type: ignore[method-assign]
    x = np.ones((1, 4), dtype=np.float32)
    replies: list[Any] = []
    server.infer(InferCall("linear", inputs=[WireInput("x", "FP32", (1, 4), raw=x.tobytes())]), replies.append)
    np.testing.assert_allclose(replies[0].outputs[0].array, 2 * x @ WEIGHTS, rtol=1e-5)
    assert len(asked) == 2
    server.close()


class Slow:
    """Imitates an executor that runs the request inside ``submit``. The method ``submit`` returns only after
    ``released`` is set."""

    def __init__(self) -> None:
        self.entered, self.released, self.closed = threading.Event(), threading.Event(), threading.Event()

    def submit(self, request: Any, answer: Any) -> None:
        self.entered.set()
        assert self.released.wait(30)
        assert not self.closed.is_set()

    def statistics(self) -> ModelStatistics:
        return ModelStatistics()

    def close(self, timeout: float) -> None:
        self.closed.set()


def test_retiring_waits_for_a_request_that_is_being_taken(tmp_path: Path) -> None:
    """Fails if the executor is closed during the submission of a request, or accepts a request after closing."""
    linear(tmp_path / "linear" / "1")
    slow = Slow()
    model = load_version(ModelFolder(tmp_path / "linear"), "1", Loading(make=lambda *_, **__: slow))
    request = InferenceRequest(model="linear", inputs={})
    taking = threading.Thread(target=model.submit, args=(request, print))
    taking.start()
    assert slow.entered.wait(30)
    retiring = threading.Thread(target=model.retire, args=(30.0,))
    retiring.start()
    assert not slow.closed.wait(0.2)
    slow.released.set()
    assert slow.closed.wait(30)
    taking.join(30)
    retiring.join(30)
    with pytest.raises(Retired):
        model.submit(request, print)


class Context:
    """A stand-in for gRPC's context, with the methods that a stream uses."""

    def add_callback(self, callback: Any) -> bool:
        return True

    def time_remaining(self) -> None:
        return None


class Held:
    """A server that answers each request only when the test asks for the answer."""

    def __init__(self, decoupled: bool) -> None:
        self.tracing, self.taking = None, True
        self.decoupled = decoupled
        self.replies: dict[str, Any] = {}
        self.taken = threading.Semaphore(0)

    def is_decoupled(self, name: str, version: str) -> bool:
        return self.decoupled

    def on_change(self, watcher: Any) -> Any:
        return lambda: None

    def infer(self, call: InferCall, reply: Any) -> None:
        self.replies[call.id] = reply
        self.taken.release()


@pytest.mark.parametrize(("decoupled", "order"), [(False, ["0", "1", "2"]), (True, ["2", "0", "1"])])
def test_the_order_of_a_stream(decoupled: bool, order: list[str]) -> None:
    """Fails if a stream with one answer per request gets its answers out of order. Also fails if answers wait for each
    other in a stream with several answers per request."""
    server = Held(decoupled)
    message = proto.message("ModelInferRequest")
    requests = iter([ReceivedRequest(message(id=str(i))) for i in range(3)])
    stream = InferStream(server, requests, Context(), None)  # type: ignore[arg-type]
    found: list[str] = []
    some = threading.Event()

    def read() -> None:
        for response in stream.responses():
            found.append(response.infer_response.id)
            some.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for _ in range(3):
        assert server.taken.acquire(timeout=30)
    for request_id in ("2", "0", "1"):
        some.clear()
        server.replies[request_id](InferReply("m", "1", request_id, []))
        if decoupled:
            assert some.wait(30)
        elif request_id == "2":
            assert not some.wait(0.2)
    reading.join(30)
    assert found == order
