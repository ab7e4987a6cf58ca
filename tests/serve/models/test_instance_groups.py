"""Proves that the instance groups of a config set the devices, shared resources and CPU cores of a model's runs."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from accel.errors import UsageError
from accel.machine import has_nvidia_gpu
from accel.serve.models import devices, loading
from accel.serve.models.pinning import parse_policy
from accel.serve.models.repository import Repository
from accel.serve.process.options import ServeOptions
from tests.support.serving import WEIGHTS, Start, ask, client, linear

RESOURCE = 'instance_group [{ count: %d rate_limiter { resources [{ name: "R" count: %d }] priority: 1 } }]'


class Overlapping:
    """A session that counts the concurrent runs of all its instances."""

    inside, most, lock = 0, 0, threading.Lock()

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, feeds: Any) -> Any:
        with Overlapping.lock:
            Overlapping.inside += 1
            Overlapping.most = max(Overlapping.most, Overlapping.inside)
        time.sleep(0.002)
        with Overlapping.lock:
            Overlapping.inside -= 1
        return self._session.run(feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize(("limits", "most"), [((), 1), (("R:2",), 2)])
def test_models_that_share_a_resource(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, ...], most: int
) -> None:
    """Fails if more models run at the same time than the resource limits in their configs allow, or if a request is
    lost."""
    real = loading.open_session
    monkeypatch.setattr(loading, "open_session", lambda *given: Overlapping(real(*given)))
    monkeypatch.setattr(Overlapping, "most", 0)
    for name in ("one", "two"):
        linear(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "config.pbtxt").write_text(RESOURCE % (2, 1))
    process = start(tmp_path / "models", rate_limits=limits)

    def ask_often(number: int) -> None:
        with client(process.ports["grpc"]) as made:
            for _ in range(25):
                ask(made, ("one", "two")[number % 2], client_timeout=60)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask_often, range(6)))
    assert 0 < Overlapping.most <= most
    for _, _, found in process.server.statistics():
        assert found.success.count == found.received == 75


@pytest.mark.parametrize(("count", "options", "threads"), [(1, {}, 0), (2, {}, 4), (2, {"cores": 4}, 2), (16, {}, 1),
    (2, {"threads": 3}, 3)])  # fmt: skip
def test_sessions_share_the_cores(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, count: int, options: dict[str, int], threads: int
) -> None:
    """Fails if several sessions each start a thread for every core, because the sessions would slow each other down.
    Also checks that a single session gets the number of threads in its manifest, and that the server's option
    ``threads`` takes effect."""
    seen = []
    real = loading.open_session
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(loading, "open_session", lambda *given: (seen.append(given[2]), real(*given))[1])
    linear(tmp_path / "models" / "one" / "1")
    (tmp_path / "models" / "one" / "config.pbtxt").write_text(f"instance_group {{ count: {count} }}")
    start(tmp_path / "models", **options)
    assert seen == [{"threads": threads} if threads else {}] * count


def test_what_is_refused(tmp_path: Path, start: Start) -> None:
    """Fails if the server accepts a model that needs missing resources or cores, or refuses a good model in the same
    repository."""
    configs = {
        "good": "",
        "needs": RESOURCE % (1, 3),
        "unknown": 'instance_group [{ host_policy: "own" }]',
        "mixed": RESOURCE % (1, 1) + RESOURCE % (1, 2),
        "far": 'instance_group [{ host_policy: "far" }]',
    }
    for name, config in configs.items():
        linear(tmp_path / "models" / name / "1")
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
    process = start(tmp_path / "models", rate_limits=("R:2",), host_policies=("far,cpu-cores=4000",))
    reasons = {row.name: row.reason for row in process.server.index()}
    assert "--rate-limit-resource R:3" in reasons["needs"]
    assert "--host-policy own,cpu-cores=" in reasons["unknown"]
    assert "same rate_limiter" in reasons["mixed"]
    assert "4000" in reasons["far"]
    with client(process.ports["grpc"]) as made:
        assert ask(made, "good").shape == (1, 3)


def pinned_threads(pid: int, core: int) -> int:
    """Counts the threads of the process that are pinned to ``core``."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread may have ended
            found += f"Cpus_allowed_list:\t{core}" in (task / "status").read_text().splitlines()
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: every thread is on it")
def test_instances_on_their_own_cores(tmp_path: Path, serve: Any) -> None:
    """Fails if a runtime's threads may run outside the cores of the host policy, or if a thread stays pinned after
    calling the session."""
    core = max(os.sched_getaffinity(0))
    models = tmp_path / "models"
    linear(models / "own" / "1")
    linear(models / "free" / "1")
    text = 'instance_group [{ count: 2 host_policy: "own" }] parameters { key: "threads" value { string_value: "3" } }'
    (models / "own" / "config.pbtxt").write_text(text)
    # The model "free" gets a single thread, because ONNX Runtime would pin additional threads by default.
    served = serve(str(models), "--threads", "1", "--host-policy", f"own,cpu-cores={core}")
    ports = served.wait_for("serving")["ports"]
    with client(ports["grpc"]) as made:
        for _ in range(20):
            ask(made, "own")
            ask(made, "free")
    # ONNX Runtime starts two threads for each session besides the calling thread.
    assert pinned_threads(served.process.pid, core) == 4
    assert served.end() == 0


@pytest.mark.parametrize("text", ["own", "own,cpu-cores=", "own,cpu-cores=3-1", "own,numa-node=0", ",cpu-cores=1"])
def test_policies_that_say_nothing(tmp_path: Path, text: str) -> None:
    """Fails if a misspelled host policy is silently ignored."""
    with pytest.raises(UsageError, match="--host-policy takes NAME,cpu-cores=0-3,6"):
        ServeOptions(repository=str(tmp_path), host_policies=(text,)).open_repository()


def test_ranges_of_cores() -> None:
    """Fails if parsing a range of cores loses the first or last core."""
    assert parse_policy("own,cpu-cores=0-2,5") == ("own", (0, 1, 2, 5))


def configure(root: Path, group: str) -> None:
    linear(root / "linear" / "1")
    (root / "linear" / "config.pbtxt").write_text(f"instance_group [{{ {group} }}]")


def reason(root: Path) -> str:
    repository = Repository(root)
    try:
        repository.start()
        return repository.index()[0].reason
    finally:
        repository.close(1.0)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("kind: KIND_GPU gpus: [1]", "start a server with CUDA_VISIBLE_DEVICES=1"),
        ("kind: KIND_CPU gpus: [0]", "instances of KIND_CPU can't have the field gpus"),
        ('kind: KIND_GPU profile: ["0"]', "remove profile"),
        ("kind: KIND_CPU passive: true", "passive instances"),
        ("kind: KIND_CPU }, { kind: KIND_GPU", "of different kinds"),
        ("kind: KIND_CPU count: 2", ""),
        ("kind: KIND_AUTO", ""),
        ("kind: KIND_MODEL", ""),
    ],
)
def test_refused_devices(tmp_path: Path, group: str, said: str) -> None:
    """Fails if an unsupported setting is silently accepted, or if a supported setting is refused."""
    configure(tmp_path, group)
    found = reason(tmp_path)
    assert said in found
    assert bool(said) == bool(found)


@pytest.mark.parametrize("group", ["kind: KIND_GPU", "kind: KIND_GPU gpus: [0]", "gpus: [0]"])
def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Fails if a model whose config requests a GPU is served on the CPU."""
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: False)
    configure(tmp_path, group)
    assert "has KIND_GPU and this machine has no NVIDIA GPU; write KIND_CPU" in reason(tmp_path)


def test_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that KIND_GPU selects the CUDA runtime, and that a config without an instance group doesn't select the
    CUDA runtime."""
    asked: list[Any] = []
    real = loading.open_session

    def open_on_the_cpu(artifact: Any, runtime: Any, options: Any) -> Any:
        asked.append(runtime)
        return real(artifact, None, options)

    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(loading, "open_session", open_on_the_cpu)
    configure(tmp_path, "kind: KIND_GPU")
    assert reason(tmp_path) == ""
    configure(tmp_path, "kind: KIND_CPU")
    assert reason(tmp_path) == ""
    assert asked == ["onnxruntime-cuda", None]


@pytest.mark.gpu
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs the extra [cuda]"
)
def test_on_the_gpu(tmp_path: Path, start: Start) -> None:
    """Checks that KIND_GPU loads the model on the GPU, and doesn't change the model's answers."""
    assert has_nvidia_gpu()
    configure(tmp_path, "kind: KIND_GPU")
    process = start(tmp_path)
    with client(process.ports["grpc"]) as made:
        np.testing.assert_allclose(ask(made), WEIGHTS.sum(0)[None], rtol=1e-2)
