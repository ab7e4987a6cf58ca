"""Proves that unusual ONNX files that ONNX Runtime or OpenVINO runs are exported: without shapes, with functions of
their own, with defaults of inputs, in bfloat16, and without inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel

FLOAT, BFLOAT16 = TensorProto.FLOAT, TensorProto.BFLOAT16
value = helper.make_tensor_value_info


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray],
    **more: Any,
) -> Path:
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", 19), *([helper.make_opsetid("com.acme", 1)] if more else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, **more), str(path))
    return path


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 9


@pytest.fixture
def shapeless(tmp_path: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    ends = [value("x", FLOAT, None)], [value("z", FLOAT, None)]
    return save(tmp_path / "shapeless.onnx", nodes, *ends, {"w": WEIGHT})


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_input_gives_the_shape_of_an_input_without_one(shapeless: Path, cli: Any, to: str) -> None:
    """Fails if `--input` can't declare a shape that the file leaves out, for any format."""
    out = shapeless.with_name("out.onnx" if to == "onnx" else "out")
    ran = cli("export", shapeless, "--input", "x:float32[b,4]", "--to", to, "-o", out, "-q")
    assert ran.code == 0, ran.stderr
    x = np.ones((3, 4), np.float32)
    with accel.load(out) as session:
        assert [spec.shape for spec in (*session.signature.inputs, *session.signature.outputs)] == [("b", 4), ("b", 3)]
        np.testing.assert_allclose(session.run({"x": x})["z"], x @ WEIGHT, rtol=1e-5)
    assert accel.verify(shapeless, out, inputs=["x:float32[b,4]"]).passed


def test_what_is_said_of_missing_and_wrong_shapes(shapeless: Path, cli: Any) -> None:
    """Fails if the message for an input without a shape doesn't lead to `--input`, or if a wrong shape isn't named."""
    out = shapeless.with_name("out.onnx")
    ran = cli("export", shapeless, "--opset", "21", "-o", out, "-q")
    assert ran.code == 2
    assert "the input 'x' has no declared shape" in ran.stderr
    assert "--input x:float32[batch,3]" in ran.stderr
    ran = cli("export", shapeless, "--input", "x:float32[batch,3]", "-o", out, "-q")
    assert ran.code == 2
    assert "the shapes in --input don't fit" in ran.stderr


@pytest.mark.parametrize("to", ["onnx", "torch", "openvino"])
def test_functions_of_the_model_are_inlined(tmp_path: Path, cli: Any, to: str) -> None:
    """Fails if a file with functions of its own, which ONNX Runtime runs, can't be converted."""
    if to == "openvino":
        pytest.importorskip("openvino")
    body = [helper.make_node("Erf", ["a"], ["e"]), helper.make_node("Mul", ["a", "e"], ["b"])]
    own = helper.make_function("com.acme", "Gelu2", ["a"], ["b"], body, [helper.make_opsetid("", 19)])
    ends = [value("x", FLOAT, ["b", 3])], [value("y", FLOAT, ["b", 3])]
    nodes = [helper.make_node("Gelu2", ["x"], ["y"], domain="com.acme")]
    path = save(tmp_path / "m.onnx", nodes, *ends, {}, functions=[own])
    out = tmp_path / ("out.onnx" if to == "onnx" else "out")
    words = ("--opset", "22") if to == "onnx" else ("--to", to)
    ran = cli("export", path, *words, "-o", out, "-q")
    assert ran.code == 0, ran.stderr
    assert accel.verify(path, out).passed
    assert to != "onnx" or not onnx.load(str(out)).functions


def test_a_default_of_an_input_is_said(tmp_path: Path, cli: Any) -> None:
    """Fails if an input with a default vanishes silently, or if the input doesn't stay after the advice."""
    nodes = [helper.make_node("Mul", ["x", "s"], ["y"])]
    ends = [value("x", FLOAT, ["n", 4]), value("s", FLOAT, [1])], [value("y", FLOAT, ["n", 4])]
    path = save(tmp_path / "m.onnx", nodes, *ends, {"s": np.array([3], np.float32)})
    ran = cli("export", path, "--opset", "22", "-o", tmp_path / "out.onnx", "-q")
    assert ran.code == 0, ran.stderr
    assert "note: the input 's' of the file has a default" in ran.stderr
    assert "remove the initializer 's'" in ran.stderr
    save(path, nodes, *ends, {})
    ran = cli("export", path, "--opset", "22", "-o", tmp_path / "out.onnx", "-q")
    assert "default" not in ran.stderr
    assert "s:float32[1]" in ran.stdout


@pytest.fixture(params=["everywhere", "inside"])
def bfloat16(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    weight = {"w": WEIGHT.astype(ml_dtypes.bfloat16)}
    if request.param == "everywhere":
        ends = [value("x", BFLOAT16, ["b", 4])], [value("y", BFLOAT16, ["b", 3])]
        return save(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, weight)
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=BFLOAT16),
        helper.make_node("MatMul", ["a", "w"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=FLOAT),
    ]
    return save(tmp_path / "m.onnx", nodes, [value("x", FLOAT, ["b", 4])], [value("y", FLOAT, ["b", 3])], weight)


def test_a_file_that_onnx_runtime_has_no_kernel_for(bfloat16: Path, cli: Any) -> None:
    """Fails if the message blames the conversion for a kernel that the file itself lacks, or if one of the two formats
    in the message doesn't take the file."""
    ran = cli("export", bfloat16, "--opset", "22", "-o", bfloat16.with_name("out.onnx"), "-q")
    assert ran.code == 1
    assert "converted or not: no kernel for MatMul" in ran.stderr
    assert "--to openvino or --to torch" in ran.stderr
    ran = cli("export", bfloat16, "--to", "torch", "-o", bfloat16.with_name("torch"), "-q")
    assert ran.code == 0, ran.stderr
    pytest.importorskip("openvino")
    ran = cli("export", bfloat16, "--to", "openvino", "-o", bfloat16.with_name("openvino"), "-q")
    assert ran.code == 0, ran.stderr


def test_a_model_without_inputs(tmp_path: Path, cli: Any) -> None:
    """Fails if a model of constants can't become a PyTorch program."""
    constant = numpy_helper.from_array(np.array([1, 2], np.float32), "c")
    nodes = [helper.make_node("Constant", [], ["c"], value=constant)]
    path = save(tmp_path / "m.onnx", nodes, [], [value("c", FLOAT, [2])], {})
    ran = cli("export", path, "--to", "torch", "-o", tmp_path / "out", "-q")
    assert ran.code == 0, ran.stderr
    with accel.load(tmp_path / "out") as session:
        assert session.run({})["c"].tolist() == [1, 2]
