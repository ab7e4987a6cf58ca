"""Proves that OpenVINO correctly computes the reductions in a quantized model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.artifact import Artifact
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig, openvino_from_onnx
from accel.runtimes.base import open_session
from tests.support.onnx_builder import FLOAT, artifact, node

pytest.importorskip("openvino")


def pooled(path: Path, operator: str, axes: list[int], *, quantized: bool = True, also: bool = False) -> Artifact:
    """Makes a model that reduces over tokens, scales each channel, quantizes, and computes a matrix product. After
    SmoothQuant, a reduction, a scaling and a quantization can come before a model's head. If ``also`` is true, the
    reduced tensor is an output of the model, too."""
    rng = np.random.default_rng(0)
    nodes = [node(operator, "x axes", "pooled", keepdims=0), node("Mul", "pooled factors", "smooth")]
    if quantized:
        nodes += [node("QuantizeLinear", "smooth s z", "q"), node("DequantizeLinear", "q s z", "d")]
    nodes.append(node("MatMul", "d w" if quantized else "smooth w", "y"))
    used = {"s": np.float32(0.05), "z": np.int8(0)} if quantized else {}
    return artifact(
        path,
        nodes,
        {"x": (FLOAT, ["batch", "tokens", 32])},
        {"y": (FLOAT, ["batch", 4])} | ({"pooled": (FLOAT, ["batch", 32])} if also else {}),
        {
            "axes": np.array(axes),
            "factors": np.exp(rng.standard_normal(32)).astype(np.float32),
            "w": rng.standard_normal((32, 4)).astype(np.float32),
            **used,
        },
    )


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceMax", "ReduceSum", "ReduceL2"])
@pytest.mark.parametrize(("axes", "also"), [([1], False), ([-2], True)])
def test_what_is_reduced_before_it_is_quantized(tmp_path: Path, operator: str, axes: list[int], also: bool) -> None:
    """Fails if OpenVINO applies the channels' factors along the wrong axis. In OpenVINO 2026.4, the wrong axis causes
    errors of 40% to 75%. Also fails if the names or shapes of the outputs change."""
    src = pooled(tmp_path / "m.onnx", operator, axes, also=also)
    made = openvino_from_onnx(src, OpenVinoFromOnnxConfig(), tmp_path / "m.xml")
    assert made.notes["reductions_rewritten"] == 1
    assert made.signature == src.signature
    x = np.random.default_rng(1).standard_normal((3, 7, 32)).astype(np.float32)
    with open_session(src) as one, open_session(made) as two:
        wanted, found = one.run({"x": x}), two.run({"x": x})
    for name, value in wanted.items():
        # A value halfway between two int8 steps may be rounded either way.
        assert np.linalg.norm(found[name] - value) < 2e-3 * np.linalg.norm(value), name


def test_what_is_not_quantized_stays_as_it_is(tmp_path: Path) -> None:
    """Fails if a float model, which OpenVINO computes correctly, is rewritten."""
    src = pooled(tmp_path / "m.onnx", "ReduceMean", [1], quantized=False)
    made = openvino_from_onnx(src, OpenVinoFromOnnxConfig(), tmp_path / "m.xml")
    assert made.notes["reductions_rewritten"] == 0
