"""Servers over small repositories."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serving import Served, Start, linear, two_inputs

from accel.serve.options import ServeOptions
from accel.serve.process import ServingProcess


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(repository, mode=..., ...)`` serves on free ports in this process; ended after the test."""
    with ExitStack() as stack:

        def begin(repository: Path, **options: Any) -> ServingProcess:
            ports: dict[str, Any] = {"grpc_port": 0, "http_port": None, "drain": 5.0, "grpc_threads": 16}
            process = ServingProcess(ServeOptions(repository=str(repository), **{**ports, **options}))
            stack.callback(process.stop)
            process.start()
            return process

        yield begin


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """``linear`` and ``pair``, neither with a config."""
    root = tmp_path / "models"
    linear(root / "linear" / "1")
    two_inputs(root / "pair" / "1")
    return root


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(repository, ...)`` is a running command, on free ports where ``free``, ended after the test."""
    made: list[Served] = []

    def begin(*words: str, free: bool = True, path: Path | None = None) -> Served:
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
        if served.process.stderr is not None:
            served.process.stderr.close()
