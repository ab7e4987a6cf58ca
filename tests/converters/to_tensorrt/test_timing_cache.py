"""Proves that builds share TensorRT's timing cache, and that a build succeeds with a damaged or unwritable cache
file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache, kept_folder
from accel.converters.to_tensorrt import build as tensorrt_build
from accel.converters.to_tensorrt import engine_from_onnx as module
from accel.converters.to_tensorrt.timing_cache import keep_timing_cache, timing_file, use_timing_cache
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage


class FakeConfig:
    """Imitates a builder's config that has only a timing cache. The bytes of a timing cache begin with the name of its
    GPU, and the config refuses another GPU's cache."""

    def __init__(self, gpu: bytes = b"this gpu") -> None:
        self.gpu = gpu
        self.known: bytes | None = None

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, serialize=lambda: data)

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        if cache.data and not cache.data.startswith(self.gpu):
            return False
        self.known = cache.data or self.gpu
        return True

    def clear_flag(self, flag: object) -> None:
        """Ignores the flag of TF32, which this config doesn't have."""

    def get_timing_cache(self) -> Any:
        return None if self.known is None else self.create_timing_cache(self.known)

    def measure(self) -> None:
        """Adds the timing of one more kernel to the cache."""
        assert self.known is not None
        self.known += b"+"


def test_what_is_measured_once_is_known(tmp_path: Path) -> None:
    """Checks that timings are saved, and that another GPU's timings aren't loaded. Also fails if two TensorRT versions
    or two GPUs share a file."""
    file = timing_file(tmp_path / "kept", "11.0.0", "9.0")
    first = FakeConfig()
    use_timing_cache(first, file)
    assert first.known == first.gpu
    first.measure()
    keep_timing_cache(first, file)
    second = FakeConfig()
    use_timing_cache(second, file)
    assert second.known == b"this gpu+"
    other = FakeConfig(b"other gpu")
    use_timing_cache(other, file)
    assert other.known == b"other gpu"
    assert len({timing_file(tmp_path, v, c) for v in ("11.0.0", "11.1.0") for c in ("9.0", "10.0")}) == 4


@pytest.mark.parametrize("damage", [b"", b"x", b"y" * 100])
def test_a_damaged_file_is_left_out(damage: bytes, tmp_path: Path) -> None:
    """Checks that a damaged cache file isn't passed to TensorRT and doesn't make the build fail."""
    file = timing_file(tmp_path, "11.0.0", "9.0")
    kept = FakeConfig()
    use_timing_cache(kept, file)
    keep_timing_cache(kept, file)
    file.write_bytes(file.read_bytes()[:-1] + damage)
    config = FakeConfig()
    use_timing_cache(config, file)
    assert config.known == config.gpu


def test_no_room_for_it(tmp_path: Path) -> None:
    """Fails if a finished engine is lost because its timing cache can't be written."""
    (tmp_path / "kept").write_text("no folder")
    config = FakeConfig()
    use_timing_cache(config, timing_file(tmp_path / "kept", "11.0.0", "9.0"))
    keep_timing_cache(config, timing_file(tmp_path / "kept", "11.0.0", "9.0"))


def small(path: Path) -> Artifact:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([node], "g", [ends[0]], [ends[1]], [numpy_helper.from_array(np.eye(4, dtype="f4"), "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))
    return open_onnx(path, probe=False)


@pytest.mark.parametrize("toolkit", ["tensorrt", "tensorrt-rtx"])
def test_the_build_is_told_where(toolkit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a build with ``tensorrt`` gets the folder for the timing cache, and that this folder doesn't change
    the stage's cache key. Also checks that a build with ``tensorrt-rtx`` doesn't get the folder, because this toolkit
    crashes when it serializes its timing cache."""
    asked: list[Any] = []

    def build(_: str, **words: Any) -> dict[str, Any]:
        asked.append(words["kept"])
        words["out"].write_bytes(b"engine")
        rows = [{"name": name, "dtype": "float32", "shape": [-1, 4]} for name in "xy"]
        return {
            "toolkit_version": "11.0.0", "compute_capabilities": ["9.0"], "inputs": rows[:1], "outputs": rows[1:],
            "kernels": [], "summary": {}, "warnings": [],
        }  # fmt: skip

    monkeypatch.setattr(module, "run_in_child", build)
    monkeypatch.setattr(module, "toolkit_runtime", lambda _: SimpleNamespace(installed=True))
    src, config = small(tmp_path / "m.onnx"), module.EngineFromOnnxConfig(toolkit=toolkit)
    keys = []
    for name in ("one", "two"):
        cache = StageCache(tmp_path / name)
        made = run_stage("engine_from_onnx", src, config, cache=cache)
        keys.append(made.history[-1]["key"])
    wanted = [tmp_path / name / "kept" for name in ("one", "two")] if toolkit == "tensorrt" else [None, None]
    assert asked == wanted
    assert keys[0] == keys[1]
    assert kept_folder() is None


def test_the_builder_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the timing cache is loaded before the build and written after the build."""
    config = FakeConfig()
    known_at_build: list[bytes | None] = []

    def serialized(*_: Any) -> bytes:
        known_at_build.append(config.known)
        config.measure()
        return b"engine"

    network = SimpleNamespace(num_inputs=0, num_outputs=0)
    trt = SimpleNamespace(__version__="11.0.0", Runtime=lambda _: None, BuilderFlag=SimpleNamespace(TF32="TF32"))
    for name, value in {
        "load_toolkit": lambda _: trt,
        "make_logger": lambda *_: None,
        "_builder": lambda *_: SimpleNamespace(build_serialized_network=serialized),
        "check_onnx": lambda *_: None,
        "known_operators": lambda *_: {},
        "read_proto": lambda _: onnx.ModelProto(),
        "_parse": lambda *_: network,
        "_config": lambda *_: config,
        "engine_problem": lambda *_, **__: None,
        "device_capability": lambda: "9.0",
    }.items():
        monkeypatch.setattr(tensorrt_build, name, value)
    for _ in range(2):
        tensorrt_build.build(
            tmp_path / "m.onnx", tmp_path / "m.engine", "tensorrt", [], [], None, None, kept=tmp_path / "kept"
        )
    assert known_at_build == [b"this gpu", b"this gpu+"]
