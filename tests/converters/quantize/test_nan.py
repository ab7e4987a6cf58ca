"""Proves that the error names the cause if a model computes NaN on its calibration data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from tests.support.onnx_builder import FLOAT, artifact, node, save_data


def test_a_tensor_without_a_range_is_named(tmp_path: Path) -> None:
    """Checks that the error says that an inner tensor is NaN, and doesn't repeat NNCF's message."""
    pytest.importorskip("nncf")
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in (0, 1)}
    nodes = [node("MatMul", "x w0", "a"), node("Log", "a", "b"), node("MatMul", "b w1", "y")]
    shape = ["batch", 8]
    src = artifact(tmp_path / "m.onnx", nodes, {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)}, weights)
    data = save_data(tmp_path / "x.npz", x=rng.standard_normal((8, 8)).astype(np.float32))
    with pytest.raises(QuantizeFailed, match="a tensor inside the model is NaN on the calibration data") as caught:
        quantize(src, QuantizeConfig(form="openvino", data=data), tmp_path / "q.onnx")
    assert "input_high" not in str(caught.value)
