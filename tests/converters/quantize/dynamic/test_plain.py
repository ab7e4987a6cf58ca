"""Proves that accel's dynamic quantization makes the same model as ONNX Runtime's own function, and quantizes stacks of
matrices, which that function makes invalid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime.quantization as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.child import run_in_child
from accel.converters.quantize.stage import QuantizeConfig, Task, quantize
from accel.runtimes.base import open_session
from accel.sources.onnx.file import open_onnx

FLOAT = TensorProto.FLOAT


def products(path: Path) -> None:
    """Writes a model of a MatMul, a Gemm with a transposed weight, and a MatMul of a shared weight. A channel of each
    weight is zero, and the values of the channels differ by orders of magnitude."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((48, 48)).astype(np.float32) for name in ("w", "g")}
    for value in weights.values():
        value *= 10.0 ** rng.integers(-6, 6, 48)
        value[:, 3] = 0
        value[:, 4] = np.abs(value[:, 4])
        value[:, 5] = 1e-45
    weights["g"] = np.ascontiguousarray(weights["g"].T)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Gemm", ["a", "g", "bias"], ["b"], name="second", transB=1),
        helper.make_node("MatMul", ["b", "w"], ["y"], name="third"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 48])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 48])],
        [numpy_helper.from_array(v, n) for n, v in {**weights, "bias": np.ones(48, np.float32)}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("reduce_range", [True, False])
def test_the_model_is_that_of_onnx_runtimes_function(per_channel: bool, reduce_range: bool, tmp_path: Path) -> None:
    """Fails if a weight, a scale, a zero point or a node differs from the model of ONNX Runtime's own function."""
    products(tmp_path / "prepared.onnx")
    ort.quantize_dynamic(
        str(tmp_path / "prepared.onnx"),
        str(tmp_path / "theirs.onnx"),
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=per_channel,
        reduce_range=reduce_range,
        weight_type=ort.QuantType.QInt8,
        nodes_to_exclude=["third"],
        extra_options={"MatMulConstBOnly": True},
    )
    task = Task(
        path=tmp_path / "prepared.onnx",
        out=tmp_path / "ours.onnx",
        signature=open_onnx(tmp_path / "prepared.onnx", probe=False).signature,
        config=QuantizeConfig(mode="dynamic", per_channel=per_channel, reduce_range=reduce_range),
        excluded=("third",),
        transformer=False,
    )
    run_in_child("accel.converters.quantize.dynamic.plain:run_dynamic", task=task)
    ours, theirs = (onnx.load(str(tmp_path / name)).graph for name in ("ours.onnx", "theirs.onnx"))
    assert {node.op_type for node in ours.node} >= {"DynamicQuantizeLinear", "MatMulInteger", "MatMul"}
    nodes = [{node.name: node.SerializeToString() for node in graph.node} for graph in (ours, theirs)]
    assert nodes[0] == nodes[1]
    mine, others = ({t.name: numpy_helper.to_array(t) for t in graph.initializer} for graph in (ours, theirs))
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert value.dtype == others[name].dtype
        np.testing.assert_array_equal(value.reshape(-1), others[name].reshape(-1), err_msg=name)


@pytest.mark.parametrize("stack", [(4,), (2, 3)])
def test_a_stack_of_matrices(stack: tuple[int, ...], tmp_path: Path) -> None:
    """Fails if ONNX Runtime can't run the product with a stack of matrices, such as the weights of experts. Also fails
    if large weights of one matrix make another matrix inexact."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** np.arange(np.prod(stack)).reshape(*stack, 1, 1)
    weights = (rng.standard_normal((*stack, 16, 8)) * sizes).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="experts")],
        "net",
        [helper.make_tensor_value_info("x", FLOAT, [*stack, "rows", 16])],
        [helper.make_tensor_value_info("y", FLOAT, [*stack, "rows", 8])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "net.onnx"))
    source = open_onnx(tmp_path / "net.onnx", probe=False)
    small = quantize(source, QuantizeConfig(mode="dynamic"), tmp_path / "int8.onnx")
    x = rng.standard_normal((*stack, 3, 16)).astype(np.float32)
    with open_session(small) as session:
        found = session.run({"x": x})["y"]
    wanted = x @ weights
    errors = np.linalg.norm(found - wanted, axis=(-2, -1)) / np.linalg.norm(wanted, axis=(-2, -1))
    assert errors.shape == stack
    assert errors.max() < 0.02
