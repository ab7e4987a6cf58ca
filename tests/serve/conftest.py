"""Provides fixtures that start servers over small repositories."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.serve.models import loading
from accel.serve.models.repository import Repository
from accel.serve.process.options import ServeOptions
from accel.serve.process.serving import ServingProcess
from accel.serve.transports.grpc.choice import CYGRPC, GRPC, NATIVE
from accel.serve.transports.native.build import why_not
from tests.serve.faulty_session import Faulty
from tests.support.serving import Served, Start, linear, two_inputs

# The modules whose tests always run on all gRPC transports, and those that always run on ``cygrpc`` and ``native``. All
# other tests of a server run on ``cygrpc``, and on the others with the marker ``proof``. Nightly tests and tests for a
# GPU run on all where they run at all. A module may name its TRANSPORTS itself. A test with the marker ``http`` uses
# the HTTP port alone, which is the same beside every gRPC transport, and runs on ``cygrpc`` only. A test with the
# marker ``loop`` is about a loop that takes the calls itself, while grpcio's own server passes each call to a thread.
ON_ALL = ("test_grpc_infer", "test_grpc_control", "test_drain")
ON_NATIVE = (*ON_ALL, "test_together", "test_large_messages")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        apart = any(metafunc.definition.get_closest_marker(name) for name in ("nightly", "gpu"))
        module = metafunc.module.__name__.rpartition(".")[2]
        always = [CYGRPC] + [name for name, on in ((GRPC, ON_ALL), (NATIVE, ON_NATIVE)) if apart or module in on]
        others = (NATIVE,) if metafunc.definition.get_closest_marker("loop") else (GRPC, NATIVE)
        proof = [pytest.param(name, marks=pytest.mark.proof) for name in others if name not in always]
        http = metafunc.definition.get_closest_marker("http")
        only = (CYGRPC,) if http else getattr(metafunc.module, "TRANSPORTS", ())
        metafunc.parametrize("transport", only or [*always, *proof], indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Returns the gRPC transport of the servers that ``start`` and ``serve`` start."""
    if request.param == NATIVE and (reason := why_not()):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Returns ``start(repository, mode=..., ...)``, which starts a server on free ports in this process. Stops the
    server after the test."""
    with ExitStack() as stack:

        def begin(repository: Path, **options: Any) -> ServingProcess:
            ports: dict[str, Any] = {"grpc_port": 0, "http_port": None, "drain": 5.0, "grpc_threads": 16}
            ports["transport"] = transport
            process = ServingProcess(ServeOptions(repository=str(repository), **{**ports, **options}))
            stack.callback(process.stop)
            process.start()
            return process

        yield begin


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Makes a repository with the models ``linear`` and ``pair``, which have no config."""
    root = tmp_path / "models"
    linear(root / "linear" / "1")
    two_inputs(root / "pair" / "1")
    return root


@pytest.fixture
def opened() -> Iterator[Callable[..., Repository]]:
    """Returns ``opened(root, ...)``, which opens a repository in this process. Closes all opened repositories after the
    test."""
    made: list[Repository] = []

    def begin(root: Path, **options: Any) -> Repository:
        made.append(Repository(root, **options))
        made[-1].start()
        return made[-1]

    yield begin
    for one in made:
        one.close(1.0)


@pytest.fixture
def serve(transport: str) -> Iterator[Callable[..., Served]]:
    """Returns ``serve(repository, ...)``, which runs `accel serve`. If ``free`` is true, the command uses free ports.
    Stops the command after the test."""
    made: list[Served] = []

    def begin(*words: str, free: bool = True, path: Path | None = None) -> Served:
        words += ("--transport", transport)
        made.append(Served(*words, *(("--grpc-port", "0", "--http-port", "0") if free else ()), path=path))
        return made[-1]

    yield begin
    for served in made:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            try:
                served.process.wait(30)
            except subprocess.TimeoutExpired:
                served.process.kill()
                served.process.wait()
        for pipe in (served.process.stdout, served.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def faulty(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server with the models ``good`` and ``bad``. The session of ``bad`` can raise an error or hang."""
    released, running = threading.Event(), threading.Semaphore(0)
    real = loading.open_session
    sessions: list[Faulty] = []

    def opened(artifact: Any, *arguments: Any) -> Any:
        session = real(artifact, *arguments)
        if "bad" not in artifact.path.parts:
            return session
        sessions.append(Faulty(session, released, running))
        return sessions[-1]

    monkeypatch.setattr(loading, "open_session", opened)
    for name in ("bad", "good"):
        linear(tmp_path / "models" / name / "1")
    process = start(tmp_path / "models", mode="explicit", models=("*",), max_message=1 << 20, http_port=0)
    process.released, process.running, process.sessions = released, running, sessions
    yield process
    released.set()
