"""Builds one engine for all tests that inspect an engine, and provides a stand-in for TensorRT."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.artifact import Artifact
from accel.child import resolve
from accel.converters.to_tensorrt import build as tensorrt_build
from accel.converters.to_tensorrt import engine_from_onnx as module
from accel.kernels.tensorrt import quick_plugins as tensorrt_plugin
from tests.support.engine_models import two_inputs_engine, two_inputs_source
from tests.support.fake_tensorrt import RULES, FakeTensorRT, kernel


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def source(folder: Path) -> Artifact:
    return two_inputs_source(folder)


@pytest.fixture(scope="session")
def engine(source: Artifact, folder: Path) -> Artifact:
    return two_inputs_engine(source, folder)


@pytest.fixture(params=RULES)
def trt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
    """Returns a stand-in for TensorRT on a GPU of compute capability 9.0, without a kernel compiler or a plugin
    library."""
    fake = FakeTensorRT(request.param)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", fake.plugin)
    monkeypatch.setattr(tensorrt_plugin.importlib.util, "find_spec", lambda _name: True)
    monkeypatch.setattr(tensorrt_plugin, "compile_kernel", kernel)
    monkeypatch.setattr(module, "run_in_child", lambda target, **words: resolve(target)(**words))
    monkeypatch.setattr(module, "toolkit_runtime", lambda _: SimpleNamespace(installed=True))
    monkeypatch.setattr(tensorrt_build, "load_toolkit", lambda _: fake)
    monkeypatch.setattr(tensorrt_build, "device_capability", lambda: "9.0")
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCEL_TENSORRT_LIBRARY", raising=False)
    return fake
