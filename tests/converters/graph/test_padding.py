"""Proves that padding with 0 in front of a MaxPool stays, although ONNX Runtime would merge it into the MaxPool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.converters.graph.padding import keep_zero_padding


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.ZeroPad2d(1), torch.nn.MaxPool2d(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(-x.abs())
        return found


def test_export(tmp_path: Path) -> None:
    """Fails if the maximum of negative numbers and the padding is a negative number."""
    x = torch.randn(2, 3, 8, 8)
    made = accel.export(Padded(), example=(x,), out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        np.testing.assert_array_equal(session(x), Padded()(x))


@pytest.mark.parametrize("between", ["", "Cast", "Transpose"])
@pytest.mark.parametrize("number", ["none", "initializer", "Constant"])
def test_every_form_of_zero(between: str, number: str) -> None:
    """Fails if ONNX Runtime merges the padding of a file, whatever the form of the number 0. tf2onnx leaves out the
    number, and puts a Transpose between padding and pooling."""
    constants = [numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    nodes = [helper.make_node("Constant", [], ["zero"], value=zero)] if number == "Constant" else []
    constants += [zero] if number == "initializer" else []
    nodes += [helper.make_node("Pad", ["x", "pads", *(["zero"] if number != "none" else [])], ["padded"])]
    kind = TensorProto.FLOAT
    if between == "Cast":
        kind = TensorProto.DOUBLE
        nodes += [helper.make_node("Cast", ["padded"], ["pooled"], to=kind)]
    elif between == "Transpose":
        nodes += [helper.make_node("Transpose", ["padded"], ["pooled"], perm=[0, 1, 3, 2])]
    nodes += [
        helper.make_node("MaxPool", ["pooled" if between else "padded"], ["y"], kernel_shape=[3, 3], pads=[0] * 4)
    ]
    ends = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 4, 4]),
        helper.make_tensor_value_info("y", kind, [1, 1, 4, 4]),
    )
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    keep_zero_padding(model)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((1, 1, 4, 4), -1, np.float32)})
    wanted = np.zeros((4, 4))
    wanted[1:3, 1:3] = -1
    np.testing.assert_array_equal(found[0, 0], wanted)


def test_other_padding_stays() -> None:
    """Fails if a number other than 0 is replaced, or the padding of a convolution. ONNX Runtime merges the padding of a
    convolution correctly."""
    constants = [
        numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads"),
        numpy_helper.from_array(np.float32(2), "two"),
        numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w"),
    ]
    nodes = [
        helper.make_node("Pad", ["x", "pads", "two"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3]),
        helper.make_node("Pad", ["b", "pads"], ["c"]),
        helper.make_node("Conv", ["c", "w"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    before = model.SerializeToString()
    keep_zero_padding(model)
    assert model.SerializeToString() == before
