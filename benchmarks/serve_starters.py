"""Starts `accel serve`, its peers and the bare gRPC servers of `serve_load.py`, each on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import serve_triton

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Scenario:
    """A model, and the request that the load generator repeats."""

    name: str
    spec: str
    shape: tuple[int, ...]
    concurrencies: tuple[int, ...]
    peers: tuple[str, ...]
    answer_bytes: int


@contextlib.contextmanager
def running(words: list[str], port: int, cwd: Path | None = None, env: dict[str, str] | None = None) -> Iterator[int]:
    """Starts the server, waits until the server listens, and yields the port. Afterwards, ends the process group of the
    server."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        words, cwd=cwd, env={**os.environ, **(env or {})}, stdout=log, stderr=log, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise RuntimeError(f"{words[0]} did not start: {log.read()[-2000:].decode()}")
            time.sleep(0.1)
        time.sleep(2)  # a second process of the server may still be starting
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_accel(
    scenario: Scenario, folder: Path, _peers: Path | None, processes: int = 2, instances: int = 1
) -> contextlib.AbstractContextManager[int]:
    port = free_port()
    config = folder / "repository" / scenario.name / "config.pbtxt"
    text = f'name: "{scenario.name}"\nmax_batch_size: 32\ndynamic_batching {{}}\n'
    config.write_text(text + f"instance_group {{ count: {instances} }}\n" * (instances > 1))
    words = [sys.executable, "-m", "accel", "serve", str(folder / "repository"), "--processes", str(processes)]
    words += ["--transport", "native"]
    return running([*words, "--grpc-port", str(port), "--http-port", str(free_port())], port)


def start_floor(
    scenario: Scenario, folder: Path, _peers: Path | None, runs: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Starts the floor server. If ``runs`` is true, the server runs the model on the thread that handles the request.
    Otherwise, the server answers with zeros."""
    port = free_port()
    model = folder / "repository" / scenario.name / "1" / "model.onnx"
    answered = str(model) if runs else str(scenario.answer_bytes)
    return running([sys.executable, str(HERE / "serve_peers" / "floor.py"), str(port), answered], port)


def start_mlserver(
    scenario: Scenario, folder: Path, peers: Path | None, workers: int = 0
) -> contextlib.AbstractContextManager[int]:
    """Starts MLServer. With ``workers=0``, MLServer runs in one process, which is fastest on two cores. With
    ``workers=2``, MLServer has two workers, like accel's two processes."""
    assert peers
    port = free_port()
    home = folder / f"mlserver-{scenario.name}-{workers}"
    home.mkdir(exist_ok=True)
    model = folder / "repository" / scenario.name / "1" / "model.onnx"
    settings = {"debug": False, "grpc_port": port, "http_port": free_port(), "metrics_port": free_port()}
    settings |= {"parallel_workers": workers, "grpc_max_message_length": 1 << 28}
    (home / "settings.json").write_text(json.dumps(settings))
    body = {"name": scenario.name, "implementation": "mlserver_model.OnnxModel", "parameters": {"uri": str(model)}}
    (home / "model-settings.json").write_text(json.dumps(body))
    env = {"PYTHONPATH": str(HERE / "serve_peers")}
    return running([str(peers / "bin" / "mlserver"), "start", "."], port, cwd=home, env=env)


def start_litserve(scenario: Scenario, folder: Path, peers: Path | None) -> contextlib.AbstractContextManager[int]:
    assert peers
    port = free_port()
    model = folder / "repository" / scenario.name / "1" / "model.onnx"
    words = [str(peers / "bin" / "python"), str(HERE / "serve_peers" / "litserve_app.py"), str(port), str(model)]
    return running(words, port)


def start_triton(
    scenario: Scenario, folder: Path, peers: Path | None, instances: int = 1
) -> contextlib.AbstractContextManager[int]:
    """Starts Triton, whose Python backend runs the model with ONNX Runtime, in so many processes."""
    assert peers
    port = free_port()
    models = folder / f"triton-{scenario.name}-{instances}"
    version = models / scenario.name / "1"
    if not version.exists():
        version.mkdir(parents=True)
        (version / "model.py").write_text(
            serve_triton.model(folder / "repository" / scenario.name / "1" / "model.onnx", peers)
        )
        config = 'backend: "python"\nmax_batch_size: 32\ndynamic_batching {}\n'
        config += f"instance_group {{ count: {instances} kind: KIND_CPU }}\n"
        for kind, name, dims in (("input", "x", scenario.shape[1:]), ("output", "y", (-1,))):
            config += f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: {list(dims)} }}\n'
        (version.parent / "config.pbtxt").write_text(config)
    words, env = serve_triton.program(peers, folder)
    words += ["--model-repository", str(models), "--grpc-port", str(port), "--allow-http", "false"]
    return running([*words, "--allow-metrics", "false"], port, env=env)


STARTERS: dict[str, Callable[[Scenario, Path, Path | None], contextlib.AbstractContextManager[int]]] = {
    "accel": start_accel,
    "accel-one": partial(start_accel, processes=1),
    "accel-instances": partial(start_accel, processes=1, instances=2),
    "floor": start_floor,
    "floor-model": partial(start_floor, runs=True),
    "triton": start_triton,
    "triton-two": partial(start_triton, instances=2),
    "mlserver": start_mlserver,
    "mlserver-workers": partial(start_mlserver, workers=2),
    "litserve": start_litserve,
}
