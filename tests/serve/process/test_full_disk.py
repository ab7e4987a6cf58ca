"""Proves that the server works while its log can't be written because of a full disk or a file size limit."""

from __future__ import annotations

import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.support.serving import ask, client, linear


@pytest.fixture
def models(tmp_path: Path) -> Path:
    linear(tmp_path / "models" / "linear" / "1")
    return tmp_path / "models"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_ready(made: Any) -> None:
    """Waits for at most a minute until a server that can't log its ports is ready."""
    deadline = time.monotonic() + 60
    while True:
        try:
            if made.is_server_ready(client_timeout=10):
                return
        except InferenceServerException:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_disk_that_is_full_from_the_start(models: Path, serve: Any, processes: str) -> None:
    """Fails if an unwritable log keeps the server from starting, answering or ending."""
    port = free_port()
    served = serve(
        str(models), "--log-file", "/dev/full", "--grpc-port", str(port), "--no-http", "--processes", processes,
        "--mode", "explicit", "--load-model", "*", free=False,
    )  # fmt: skip
    with client(port) as made:
        until_ready(made)
        for _ in range(5):
            reload(models, made)
            assert ask(made, client_timeout=60).shape == (1, 3)
    assert served.end() == 0


@pytest.mark.proof
def test_a_disk_that_fills_up(models: Path, serve: Any, tmp_path: Path) -> None:
    """Checks that no requests are lost while the log can't grow, and that the log continues after space is available
    again."""
    port, log = free_port(), tmp_path / "serve.log"
    served = serve(
        str(models), "--log-file", str(log), "--grpc-port", str(port), "--no-http",
        "--mode", "explicit", "--load-model", "*", free=False,
    )  # fmt: skip
    with client(port) as made:
        until_ready(made)
        soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
        size = log.stat().st_size  # the server may have written a log line before the limit was set
        for _ in range(50):
            reload(models, made)
            ask(made, client_timeout=60)
        assert log.stat().st_size == size
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        for _ in range(3):
            reload(models, made)
    assert served.end() == 0
    lines = log.read_text(encoding="utf-8").splitlines()
    last = [json.loads(line)["message"] for line in lines[-5:]]
    assert last == ["model loaded"] * 3 + ["stopping", "stopped"]


def reload(models: Path, made: Any) -> None:
    """Reloads ``linear`` by touching its file. The server logs the load."""
    (models / "linear" / "1" / "model.onnx").touch()
    made.load_model("linear")
