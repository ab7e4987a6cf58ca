"""Proves that ``config.pbtxt`` selects the device of a model's instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from accel.runtimes.base import has_nvidia_gpu
from accel.serve.models import devices, loading
from accel.serve.models.repository import Repository
from tests.support.serving import WEIGHTS, Start, ask, client, linear


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
def test_what_is_refused(tmp_path: Path, group: str, said: str) -> None:
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
