"""Proves that the memory of accel optimize doesn't grow with the number of samples."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.api.optimize import optimize

WIDTH, SAMPLES = 1 << 15, 1000  # 128 KiB per sample


def model(path: Path) -> Path:
    """Makes a model that multiplies wide samples by a small matrix. The model first reshapes each sample to rows of 64
    values."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((64, 32)) / 8).astype(np.float32)
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["p"], name="product"),
        helper.make_node("ReduceMean", ["p", "axes"], ["y"], keepdims=0),
    ]
    constants = {"shape": np.array([0, -1, 64], np.int64), "w": weights, "axes": np.array([1], np.int64)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 32])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return path


@pytest.mark.proof
def test_the_data_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the command, a gate, the judge or the measurement holds all of the data in memory at once. Calibration,
    which runs in another process, has a separate test."""
    source = model(tmp_path / "m.onnx")
    x = np.random.default_rng(1).standard_normal((SAMPLES, WIDTH), np.float32)
    size = x.nbytes
    np.savez(tmp_path / "d.npz", x=x)
    del x
    monkeypatch.setattr("accel.optimizer.search.measured", lambda *_: {"noise_floor": 0.0})
    words: dict[str, Any] = {"target": "ort-cpu", "precision": "int8", "vary_session": False, "threads": 1}
    tracemalloc.start()
    try:
        result = optimize(source, out=tmp_path / "out", data=tmp_path / "d.npz", max_drop=0.5, **words)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {row.status for row in result.candidates if row.precision == "int8"} == {"passed"}
    assert peak < size / 4
