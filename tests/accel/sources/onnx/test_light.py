"""Proves that accel reads and writes the protobuf message of an ONNX file as protobuf does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from accel.converters.graph.write import write_onnx
from accel.errors import InvalidModel
from accel.sources.onnx import file as onnx_file
from accel.sources.onnx import light
from accel.sources.onnx import weights as onnx_weights
from accel.sources.onnx.file import describe, read_proto, read_without_weights
from accel.sources.onnx.light import read_light
from accel.sources.onnx.weights import read_detached, weight_array

LARGE = np.arange(40_000, dtype=np.float32).reshape(200, 200)


def model(**more: Any) -> onnx.ModelProto:
    """Returns a model with a large weight, and with small tensors of every way to store values."""
    tensors = [
        numpy_helper.from_array(LARGE, "large"),
        helper.make_tensor("floats", TensorProto.FLOAT, [2], [1.5, -2.5]),
        helper.make_tensor("halves", TensorProto.FLOAT16, [2], [1.5, -2.5]),
        helper.make_tensor("texts", TensorProto.STRING, [2], ["a", ""]),
        helper.make_tensor("none", TensorProto.FLOAT, [0], []),
        numpy_helper.from_array(np.array([1, -1]), "shape"),
        numpy_helper.from_array(-LARGE, "second"),
    ]
    tensors[0].doc_string = "a weight"
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["a"], name="one"),
        helper.make_node("MatMul", ["a", "second"], ["b"], name="two"),
        helper.make_node("Reshape", ["b", "shape"], ["y"], name="three"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 200])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "n"])],
        tensors,
        doc_string="a graph",
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="someone", **more
    )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the model, and makes accel treat it as a large file."""
    monkeypatch.setattr(onnx_file, "_LARGE_FILE_BYTES", 1000)
    monkeypatch.setattr(onnx_weights, "DETACHED_BYTES", 1000)
    onnx.save(model(), str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


def test_only_the_large_weights_are_left_out(path: Path) -> None:
    """Fails if a field of the model is lost, or if a large weight is read although nobody asked for its values."""
    found, whole = read_without_weights(path), read_proto(path)
    assert found.ByteSize() < 2000
    for tensor in found.graph.initializer:
        if tensor.name in ("large", "second"):
            assert not tensor.raw_data
            tensor.raw_data = numpy_helper.to_array(
                next(t for t in whole.graph.initializer if t.name == tensor.name)
            ).tobytes()
    assert found == whole
    assert describe(path) == onnx_file.describe_model(whole)


def test_detached_weights_inside_the_file_have_their_values(path: Path) -> None:
    """Fails if a weight that stays in the model file is read from the wrong place."""
    found = {tensor.name: tensor for tensor in read_detached(path).graph.initializer}
    np.testing.assert_array_equal(weight_array(found["large"]), LARGE)
    np.testing.assert_array_equal(weight_array(found["second"]), -LARGE)
    assert found["large"].doc_string == "a weight"
    assert numpy_helper.to_array(found["texts"]).tolist() == ["a", ""]


@pytest.mark.parametrize("read", [read_proto, read_detached])
def test_a_written_model_is_the_model(read: Any, path: Path, tmp_path: Path) -> None:
    """Fails if writing a model changes any field, or if the written file isn't what protobuf reads."""
    found = read(path)
    assert write_onnx(found, tmp_path / "again.onnx") == ()
    assert onnx.load(str(tmp_path / "again.onnx")) == model()
    onnx.checker.check_model(str(tmp_path / "again.onnx"), full_check=True)


@given(cut=st.integers(1, 300_000))
def test_a_truncated_file_is_refused(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fails if a truncated file is read as a model, or if accel raises another error than for a small file."""
    file = tmp_path_factory.mktemp("cut") / "model.onnx"
    file.write_bytes(model().SerializeToString()[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "_LARGE_FILE_BYTES", 0)
        with pytest.raises(InvalidModel):
            read_without_weights(file)


def test_strange_messages_are_left_to_protobuf(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if accel reads a message that it doesn't understand, or reads a file of very many fields itself."""
    body = path.read_bytes()
    (tmp_path / "two.onnx").write_bytes(body + body)
    (tmp_path / "noise.onnx").write_bytes(b"\x07" + body)
    for name in ("two.onnx", "noise.onnx"):
        with pytest.raises(ValueError, match=r"2 graphs|wire type 7"):
            read_light(tmp_path / name, 1000, detached=True)
    monkeypatch.setattr(light, "_MOST_FIELDS", 3)
    with pytest.raises(ValueError, match="more than 3 fields"):
        read_light(path, 1000, detached=True)
    assert read_without_weights(path) == read_proto(path)
