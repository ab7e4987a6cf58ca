"""Makes small models in Triton's layout for the tests of the server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from aiohttp import web
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from accel.serve.models.repository import Repository
from accel.serve.process.serving import ServingProcess
from accel.serve.protocol.inference import InferenceRequest, infer
from accel.serve.transports.http import front as http_front
from tests.support import onnx_builder as build

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 10

# This ensemble runs "linear" and then "relu".
ENSEMBLE = """
max_batch_size: 8
input { name: "image" data_type: TYPE_FP32 dims: [4] }
output { name: "score" data_type: TYPE_FP32 dims: [3] }
ensemble_scheduling {
  step { model_name: "linear" model_version: -1
         input_map { key: "x" value: "image" } output_map { key: "y" value: "raw" } }
  step { model_name: "relu" model_version: 1
         input_map { key: "x" value: "raw" } output_map { key: "z" value: "score" } }
}
"""

# Tests add the folder FAULTY to the server's Python path. The file sitecustomize.py in this folder makes models under
# "bad" fail if the input requests a fault.
FAULTY = Path(__file__).parent / "faulty_sessions"


def linear(folder: Path, scale: float = 1.0) -> Path:
    """Writes a model ``y = scale * x @ WEIGHTS`` with a dynamic batch."""
    folder.mkdir(parents=True, exist_ok=True)
    return build.artifact(
        folder / "model.onnx",
        [build.node("MatMul", "x w", "y")],
        {"x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, ["batch", 3])},
        {"w": WEIGHTS * np.float32(scale)},
    ).path


def two_inputs(folder: Path) -> Path:
    """Writes a model that gives ``total = a + b`` (int64) and returns ``text`` unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    return build.artifact(
        folder / "model.onnx",
        [build.node("Add", "a b", "total"), build.node("Identity", "text", "same")],
        {"a": (INT64, ["batch", 2]), "b": (INT64, ["batch", 2]), "text": (STRING, ["batch", 1])},
        {"total": (INT64, ["batch", 2]), "same": (STRING, ["batch", 1])},
    ).path


def identity(folder: Path, dtype: int, shape: list[Any] | None = None) -> Path:
    """Writes a model ``y = x`` for one dtype and one shape, without a batch."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape or ["n"]
    return build.artifact(
        folder / "model.onnx", [build.node("Identity", "x", "y")], {"x": (dtype, shape)}, {"y": (dtype, shape)}
    ).path


Start = Callable[..., ServingProcess]


def plain(process: Any, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Sends a GET request, or a POST request with ``body``, and returns the status and the response body. In a header's
    name, ``_`` is replaced by ``-``."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{process.ports['http']}{path}",
        data=body,
        headers={k.replace("_", "-"): v for k, v in headers.items()},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class Served:
    """A running ``accel serve``, its log and the lines that it ``printed``. The processes of the server look for Python
    modules in ``path`` first."""

    def __init__(self, *words: str, path: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accel", "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *filter(None, sys.path)]),
            },
        )
        self.log: list[dict[str, Any]] = []
        self.printed: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_printed, daemon=True).start()

    def _read_printed(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.printed.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for_print(self, count: int) -> list[str]:
        """Waits until the server has printed ``count`` lines, and returns all lines."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.printed) >= count or self.ended(), 60), self.log
            assert len(self.printed) >= count, self.log
            return list(self.printed)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(json.loads(line) if line.startswith("{") else {"message": line})
                self._news.notify_all()
        with self._news:
            self.log.append({"message": "end of log"})
            self._news.notify_all()

    def wait_for(self, message: str, count: int = 1) -> dict[str, Any]:
        """Waits for the ``count``-th line of the log with this message, and returns it."""

        def lines() -> list[dict[str, Any]]:
            return [line for line in self.log if line["message"] == message]

        with self._news:
            assert self._news.wait_for(lambda: len(lines()) >= count or self.ended(), 60), self.log
            assert len(lines()) >= count, self.log
            return lines()[count - 1]

    def ended(self) -> bool:
        return any(line["message"] == "end of log" for line in self.log)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def client(port: int) -> triton.InferenceServerClient:
    """Makes a client with a separate connection."""
    # By default, all clients in this Python process share one connection, and then only one of the server's processes
    # gets requests.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options)


def tensor(name: str, value: np.ndarray, kind: str) -> triton.InferInput:
    """Makes an input tensor of a gRPC request."""
    made = triton.InferInput(name, list(value.shape), kind)
    made.set_data_from_numpy(value)
    return made


def ask(made: Any, model: str = "linear", mark: float = 1.0, **options: Any) -> np.ndarray:
    """Sends one row full of ``mark``, and returns the output."""
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), mark, np.float32))
    found: np.ndarray = made.infer(model, [given], **options).as_numpy("y")
    return found


class Asking(ABC):
    """Clients that ask without a pause, each on its own connection, and count their answers."""

    def __init__(self, port: int, count: int = 4) -> None:
        self._answers = [0] * count
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(port, at)) for at in range(count)]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def ask(self, made: Any) -> bool | None:
        """Sends a request, and tells whether its answer counts. None ends the client."""

    def _run(self, port: int, at: int) -> None:
        with client(port) as made:
            while not self._stop.is_set():
                counts = self.ask(made)
                if counts is None:
                    return
                self._answers[at] += counts

    def more(self, count: int) -> None:
        """Waits until each client has ``count`` further answers."""
        wanted, deadline = [had + count for had in self._answers], time.monotonic() + 60
        while any(has < least for has, least in zip(self._answers, wanted, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


class Load(Asking):
    """Clients that send requests to ``linear``, count the right answers and record the errors. A client stops at an
    error that says that the server stops."""

    def __init__(self, port: int, count: int = 4) -> None:
        self.errors: list[tuple[str, str]] = []
        super().__init__(port, count)

    @property
    def lost(self) -> list[str]:
        """Returns the errors of requests that were sent. The errors of requests that were never sent don't count. When
        a process of the server ends, gRPC waits a second before it connects to another process. A client without a
        pause would fail thousands of times in this second."""
        return [why for _, why in self.errors if not why.startswith("failed to connect")]

    def ask(self, made: Any) -> bool | None:
        try:
            return np.allclose(ask(made), WEIGHTS.sum(0))
        except InferenceServerException as error:
            with self._lock:
                self.errors.append((error.status(), error.message()))
            return None if "stop" in str(error) else False


def until(true: Callable[[], bool]) -> None:
    """Waits for at most a minute until the condition is true."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pids(served: Any) -> list[int]:
    """Returns the ids of the server's processes, in the order of their start."""
    return [line["process"] for line in served.log if line["message"] == "serving"]


def assert_refused(root: Path, said: str) -> None:
    """Asserts that the repository refuses to load its only model, and that ``said`` is the reason."""
    repository = Repository(root)
    try:
        repository.start()
        [row] = repository.index()
        assert row.state == "UNAVAILABLE"
        assert re.search(said, row.reason), row.reason
    finally:
        repository.close(1.0)


def reasons(repository: Repository) -> dict[str, str]:
    """Returns the reason for each model that the repository refuses to serve."""
    return {row.name: row.reason for row in repository.index() if row.state == "UNAVAILABLE"}


def scale(repository: Repository, name: str = "linear", version: str = "") -> float:
    """Returns the factor by which the served model currently multiplies its input."""
    model = repository.get(name, version)
    x = np.ones((1, 4), dtype=np.float32)
    request = InferenceRequest(model=name, inputs={"x": x})
    return round(float(infer(model.executor, request).outputs["y"][0, 0] / (x @ WEIGHTS)[0, 0]), 3)


def routes() -> set[tuple[str, str]]:
    """Returns the method and path of every HTTP route, from the server's own table."""
    application = web.Application()
    rest = http_front._Rest(None, 1, 0)  # type: ignore[arg-type]
    rest.add_to(application)
    rest.close()
    found = {(r.method, r.resource.canonical) for r in application.router.routes() if r.resource is not None}
    return {route for route in found if route[0] != "HEAD"}  # aiohttp adds a HEAD route for each GET route
