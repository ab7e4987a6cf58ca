"""Tests the loop that answers ModelInfer calls through gRPC's core: batches of calls that arrive together, models that
become slow, and the choice of the transport."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from accel.errors import UnsupportedHere
from accel.serve.models import loading
from accel.serve.transports import turns
from accel.serve.transports.grpc import choice
from accel.serve.transports.grpc.choice import AUTO, CYGRPC, GRPC, chosen, why_not
from accel.serve.transports.native.front import NativeTransport
from tests.support.serving import WEIGHTS, Start, ask, client, linear, until

LOOPS = ("accel-grpc-", "accel-native-")  # the names of the threads that read all calls


class Watched:
    """Wraps a session. Records the rows and the thread of each run, and calls ``during`` inside each run."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.rows: list[int] = []
        self.threads: list[str] = []
        self.during: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, feeds: Any) -> Any:
        self.rows.append(len(feeds["x"]))
        self.threads.append(threading.current_thread().name)
        if self.during is not None:
            self.during()
        return self._session.run(feeds)


@pytest.fixture
def watched(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server with the models ``linear`` and ``other``. Yields the server and the sessions by model."""
    sessions: dict[str, Watched] = {}
    real = loading.open_session

    def opened(artifact: Any, *arguments: Any) -> Any:
        made = sessions[artifact.path.parts[-3]] = Watched(real(artifact, *arguments))
        return made

    monkeypatch.setattr(loading, "open_session", opened)
    for name in ("linear", "other"):
        linear(tmp_path / "models" / name / "1")
    process = start(tmp_path / "models")
    return process, sessions


@pytest.mark.loop
def test_calls_that_arrive_together_share_a_run(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if calls that have arrived while the loop was busy run one by one, if the loop's thread doesn't run a brief
    model itself, or if a caller gets the rows of another caller."""
    process, sessions = watched
    session = sessions["linear"]
    monkeypatch.setattr(turns, "_STUCK", 60.0)  # no other thread takes over while this test holds the loop
    with client(process.ports["grpc"]) as made:
        make_brief(made, session)
        for patience in range(1, 20):
            session.rows.clear()
            answers = burst(made, session, 12, 0.02 * patience)
            for mark, found, error in answers:
                assert error is None
                np.testing.assert_allclose(found.as_numpy("y")[0], mark * WEIGHTS.sum(0), rtol=1e-5)
            assert sum(session.rows) == 13
            if max(session.rows) >= 8:  # most of the calls had arrived before the loop went on
                break
    assert max(session.rows) >= 8


def make_brief(made: Any, session: Watched) -> None:
    """Sends requests until the loop's thread runs them itself, because it knows that runs are brief."""

    def runs_itself() -> bool:
        ask(made)
        return session.threads[-1].startswith(LOOPS)

    until(runs_itself)


def burst(made: Any, session: Watched, count: int, patience: float) -> list[Any]:
    """Sends a call that holds the loop, then ``count`` calls, and lets the loop go on after ``patience`` seconds."""
    go, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go.wait(60)

    answers: list[Any] = []

    def send(mark: int) -> None:
        x = triton.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.full((1, 4), mark, np.float32))
        made.async_infer("linear", [x], lambda result, error: answers.append((mark, result, error)))

    session.during = hold
    send(0)
    assert entered.wait(60)
    session.during = None
    for mark in range(1, count + 1):
        send(mark)
    time.sleep(patience)
    go.set()
    until(lambda: len(answers) == count + 1)
    return answers


@pytest.mark.loop
def test_a_brief_model_that_hangs(watched: Any) -> None:
    """Fails if a model whose runs were brief holds up the calls of other models once a run takes long."""
    process, sessions = watched
    go, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert go.wait(60)

    with client(process.ports["grpc"]) as made, client(process.ports["grpc"]) as other:
        make_brief(made, sessions["linear"])
        sessions["linear"].during = hang
        answers: list[Any] = []
        x = triton.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        made.async_infer("linear", [x], lambda result, error: answers.append((result, error)))
        assert entered.wait(30)
        for _ in range(20):
            ask(other, "other", client_timeout=20)
        made.async_infer("linear", [x], lambda result, error: answers.append((result, error)), client_timeout=0.3)
        until(lambda: len(answers) == 1)
        assert answers[0][1].status() == "StatusCode.DEADLINE_EXCEEDED"
        sessions["linear"].during = None
        go.set()
        until(lambda: len(answers) == 2)
        assert answers[1][1] is None
        ask(made)
        until(lambda: process.server.under_way == 0)


def test_a_slow_model_runs_in_its_own_thread(watched: Any) -> None:
    """Fails if the thread that reads all calls runs a model whose runs are known to take long."""
    process, sessions = watched
    sessions["other"].during = lambda: time.sleep(0.003)
    with client(process.ports["grpc"]) as made:
        for _ in range(20):
            ask(made, "other")
    assert not any(name.startswith(LOOPS) for name in sessions["other"].threads[2:])


@pytest.mark.usefixtures("own_cache")
def test_the_installed_grpcio_is_known() -> None:
    """Fails if accel falls back to grpcio's server with the version of grpcio that the tests run with."""
    assert why_not() == ""
    assert (chosen(AUTO), chosen(CYGRPC), chosen(GRPC)) == (CYGRPC, CYGRPC, GRPC)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("version", "said"), [("1.60.1", "1.60.1"), ("2.0.0", "2.0.0"), ("dev", "dev"), (None, "lacks grpc._server._stop")]
)
def test_a_grpcio_that_is_not_known(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if accel uses private names of a version of grpcio that it wasn't tested with, or that lacks a name."""
    if version is None:
        monkeypatch.delattr("grpc._server._stop_serving")
    else:
        monkeypatch.setattr(grpc, "__version__", version)
    assert said in why_not()
    with caplog.at_level("INFO", "accel.serve"):
        assert chosen(AUTO) == GRPC
    [record] = [r for r in caplog.records if r.name == choice.log.name]
    assert said in record.reason  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedHere, match="--transport auto"):
        chosen(CYGRPC)


@pytest.mark.loop
def test_calls_that_are_cancelled_at_once(watched: Any) -> None:
    """Fails if calls that clients reset as soon as they have sent them (rapid reset) take threads, stay open, or end
    the service for others."""
    process, _ = watched
    request = triton.service_pb2.ModelInferRequest(model_name="linear")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    body, method = request.SerializeToString(), "/inference.GRPCInferenceService/ModelInfer"
    with client(process.ports["grpc"]) as made:
        ask(made)
        names = {thread.name for thread in threading.enumerate()}
        for number in range(5):
            options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
            with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}", options=options) as channel:
                grpc.channel_ready_future(channel).result(30)
                send = channel.unary_unary(method)
                calls = [send.future(body) for _ in range(200)]
                for call in calls:
                    call.cancel()
        ask(made)
        until(lambda: process.server.under_way == 0 and open_calls(process) == 0)
    assert not {thread.name for thread in threading.enumerate()} - names - {f"{name}1" for name in LOOPS}


def open_calls(process: Any) -> int:
    made = process.transports["grpc"]
    return int(made._port.open if isinstance(made, NativeTransport) else made._grpc._state.active_rpc_count)
