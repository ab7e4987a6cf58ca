"""Proves that accel corrects wrong shape annotations in a file by measuring the outputs. Also proves that accel refuses
outputs whose real shape is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.contract import check_contract
from accel.converters.graph.annotations import mend
from accel.errors import SignatureDrift
from accel.signature import DimRange, Signature, TensorSpec
from accel.tables.stage_table import get_stage

# The output ``y`` is half as wide as the input, and the second dim of ``flat`` is fixed.
KNOWN = Signature(
    (TensorSpec("x", "float32", ("batch", 1, "width")),),
    (TensorSpec("y", "float32", ("batch", 1, "y_2")), TensorSpec("flat", "float32", ("batch", 4))),
    {"batch": DimRange(1, 1, 4), "width": DimRange(8, 158, 200)},
)


def written(path: Path, y: list[int | str], flat: list[int | str], *, fixed: bool = False) -> Path:
    """Writes a model whose file declares the given shapes for the outputs ``y`` and ``flat``. If ``fixed`` is true, the
    computed ``y`` has a fixed width."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["pooled"], kernel_shape=[2], strides=[2]),
        helper.make_node("Relu", ["pooled"], ["relu"]),
        helper.make_node("Slice", ["relu", "zero", "width", "two"], ["y"])
        if fixed
        else helper.make_node("Identity", ["relu"], ["y"]),
        helper.make_node("ReduceMean", ["relu", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "row"], ["flat"]),
    ]
    constants = {"axes": [2], "zero": [0], "width": [4], "two": [2]}
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()]
    weights.append(numpy_helper.from_array(np.ones((1, 4), np.float32), "row"))
    float_tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [float_tensor("x", TensorProto.FLOAT, ["batch", 1, "width"])],
        [float_tensor("y", TensorProto.FLOAT, y), float_tensor("flat", TensorProto.FLOAT, flat)],
        weights,
        value_info=[float_tensor("pooled", TensorProto.FLOAT, ["batch", 1, 79])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def checked(path: Path) -> Artifact:
    src = Artifact(path=path, kind="onnx", signature=KNOWN)
    return check_contract(get_stage("simplify"), src, Artifact(path=path, kind="onnx", signature=KNOWN))


@pytest.mark.parametrize(
    ("y", "flat"),
    [
        (["batch", 1, 79], ["batch", 4]),
        ([1, 1, "y_2"], ["batch", 4]),
        (["batch", 1, "y_2"], ["batch", "floor((8*width)/(width))"]),
    ],
    ids=["a fixed size for a dynamic dim", "a fixed batch", "a formula for a fixed dim"],
)
def test_a_wrong_statement(tmp_path: Path, y: list[int | str], flat: list[int | str]) -> None:
    """Fails if accel refuses a correct file because of its wrong shape annotations, or keeps these annotations in the
    file."""
    path = written(tmp_path / "m.onnx", y, flat)
    assert [spec.shape for spec in checked(path).signature.outputs] == [("batch", 1, "y_2"), ("batch", 4)]
    assert not onnx.load(path).graph.value_info
    with accel.load(path) as session:
        assert session.run({"x": np.ones((3, 1, 90), np.float32)})["y"].shape == (3, 1, 45)


def test_a_shape_that_is_wrong(tmp_path: Path) -> None:
    """Checks that a file whose output really has a fixed size is refused and isn't rewritten."""
    path = written(tmp_path / "m.onnx", ["batch", 1, 4], ["batch", 4], fixed=True)
    before = path.read_bytes()
    with pytest.raises(SignatureDrift, match="turned the dim 'y_2' of the output 'y' into 4"):
        checked(path)
    assert path.read_bytes() == before


def test_a_file_that_can_not_be_run(tmp_path: Path) -> None:
    """Fails if accel trusts a declared shape of a model that can't run."""
    path = written(tmp_path / "m.onnx", ["batch", 1, 79], ["batch", 4])
    model = onnx.load(path)
    model.graph.node[1].op_type = "NoSuchOperator"
    onnx.save(model, path)
    assert not mend(path, KNOWN)
    with pytest.raises(SignatureDrift):
        checked(path)
