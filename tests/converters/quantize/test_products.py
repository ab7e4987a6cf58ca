"""Proves that quantized matrices are right if a Gemm transposes them, or if several nodes read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.converters.quantize.stage import QuantizeConfig, quantize
from accel.runtimes.base import open_session
from accel.sources.onnx.file import open_onnx

SIDE = 64
LIMITS = {"dynamic": 0.05, "int8-weights": 0.05, "int4-weights": 0.3}


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize(("gemms", "embeds"), [(1, False), (2, False), (1, True)])
def test_a_matrix_that_a_gemm_transposes(mode: str, gemms: int, embeds: bool, tmp_path: Path) -> None:
    """Fails if the matrix of a Gemm with ``transB`` is quantized along the wrong axis, or isn't transposed. Also fails
    if it is wrong for another Gemm that reads it, or for an embedding that shares it."""
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((SIDE, SIDE)) * 0.125).astype(np.float32)
    nodes = [helper.make_node("Gather", ["w", "ids"], ["embedded"])] if embeds else []
    first, last = "embedded" if embeds else "x", "y"
    for number in range(gemms):
        ends = [first if number == 0 else f"h{number}", last if number == gemms - 1 else f"h{number + 1}"]
        nodes.append(helper.make_node("Gemm", [ends[0], "w"], [ends[1]], name=f"product{number}", transB=1))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", SIDE])
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows"]) if embeds else given],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", SIDE])],
        [numpy_helper.from_array(matrix, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "net.onnx"))
    options = {} if mode == "dynamic" else {"smallest": 1}
    source = open_onnx(tmp_path / "net.onnx", probe=False)
    small = quantize(source, QuantizeConfig(mode=mode, **options), tmp_path / "small.onnx")
    x = rng.standard_normal((5, SIDE)).astype(np.float32)
    with open_session(small) as session:
        found = session.run({"ids": np.arange(5)} if embeds else {"x": x})["y"]
    wanted = matrix[:5] if embeds else x
    for _ in range(gemms):
        wanted = wanted @ matrix.T
    assert np.linalg.norm(found - wanted) < LIMITS[mode] * np.linalg.norm(wanted)
