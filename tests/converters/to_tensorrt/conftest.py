"""The stand-in for TensorRT as what an engine is built with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_tensorrt import RULES, FakeTensorRT, kernel

from accel.child import resolve
from accel.converters import engine_from_onnx as module
from accel.converters import tensorrt_build
from accel.kernels import tensorrt_plugin


@pytest.fixture(params=RULES)
def trt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
    """TensorRT on a GPU of 9.0; kernels are not compiled, and no library is here."""
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
