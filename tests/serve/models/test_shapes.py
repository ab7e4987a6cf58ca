"""Proves that the server takes the shapes of Triton's configs: batches without a name, and ``reshape``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto

from accel.serve.models.shapes import Reshape
from tests.support.onnx_builder import artifact, node
from tests.support.serving import FLOAT, STRING, Start, assert_refused, client, plain, tensor

INT8, INT32 = TensorProto.INT8, TensorProto.INT32


def served(root: Path, name: str, nodes: list[Any], inputs: Any, outputs: Any, config: str) -> None:
    """Writes a model with a config, and without a manifest, as other exporters write models."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    artifact(folder / "model.onnx", nodes, inputs, outputs)
    (folder / "model.onnx.manifest.json").unlink(missing_ok=True)
    (root / name / "config.pbtxt").write_text(config)


def tensors(role: str, kind: str, dims: str, *names: str) -> str:
    rows = ", ".join(f'{{ name: "{name}" data_type: {kind} {dims} }}' for name in names)
    return f"{role} [ {rows} ]\n"


@pytest.mark.parametrize("first", [(None, None), ("unk__1", "unk__2"), ("N", None), ("batch", "other")])
@pytest.mark.parametrize("kind", [INT32, INT8, STRING])
def test_any_dynamic_first_dim_is_the_batch(
    tmp_path: Path, start: Start, first: tuple[str | None, str | None], kind: int
) -> None:
    """Fails if a model is refused whose inputs have no common name for the first dim, or if it gives wrong rows."""
    one, other = first
    op = "StringConcat" if kind == STRING else "Add"
    served(
        tmp_path,
        "simple",
        [node(op, "INPUT0 INPUT1", "OUTPUT0")],
        {"INPUT0": (kind, [one, 4]), "INPUT1": (kind, [other, 4])},
        {"OUTPUT0": (kind, [None, 4])},
        'name: "simple" platform: "onnxruntime_onnx" max_batch_size: 8 dynamic_batching { }\n'
        + tensors("input", {INT32: "TYPE_INT32", INT8: "TYPE_INT8"}.get(kind, "TYPE_STRING"), "dims: [ 4 ]", "INPUT0")
        + tensors("output", {INT32: "TYPE_INT32", INT8: "TYPE_INT8"}.get(kind, "TYPE_STRING"), "dims: [4]", "OUTPUT0"),
    )
    process = start(tmp_path)
    [model] = process.server.repository.models()
    assert model.scheduling.max_batch_size == 8
    name = model.inputs["INPUT0"].datatype
    rows = np.arange(12).reshape(3, 4).astype(np.int32 if kind != INT8 else np.int8)
    value = rows.astype(str).astype(object) if kind == STRING else rows
    with client(process.ports["grpc"]) as asking:
        found = asking.infer("simple", [tensor(key, value, name) for key in ("INPUT0", "INPUT1")]).as_numpy("OUTPUT0")
    wanted = [[f"{v}{v}".encode() for v in row] for row in rows] if kind == STRING else (rows + rows).tolist()
    assert found.tolist() == wanted


def test_a_fixed_first_dim_is_no_batch(tmp_path: Path) -> None:
    """Fails if requests are batched along a dim of a fixed size, or if the reason doesn't name the input."""
    served(
        tmp_path,
        "fixed",
        [node("Add", "a b", "y")],
        {"a": (FLOAT, ["batch", 4]), "b": (FLOAT, [1, 4])},
        {"y": (FLOAT, ["batch", 4])},
        "max_batch_size: 8",
    )
    assert_refused(tmp_path, "input b.* has no dynamic first dim; set max_batch_size to 0")


SEQUENCE = """max_batch_size: 8
sequence_batching { control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ] }
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


def test_controls_of_a_sequence_share_the_batch(tmp_path: Path, start: Start) -> None:
    """Fails if the controls of a sequence, which the server makes, get other rows than the client's input."""
    unnamed = (INT32, [None, 1])
    served(
        tmp_path,
        "counter",
        [node("Mul", "INPUT READY", "kept"), node("Add", "kept START", "OUTPUT")],
        dict.fromkeys(("INPUT", "START", "READY"), unnamed),
        {"OUTPUT": unnamed},
        SEQUENCE,
    )
    process = start(tmp_path)
    one = np.array([[5]], dtype=np.int32)
    with client(process.ports["grpc"]) as asking:
        given = [tensor("INPUT", one, "INT32")]
        first = asking.infer("counter", given, sequence_id=7, sequence_start=True).as_numpy("OUTPUT")
        second = asking.infer("counter", given, sequence_id=7, sequence_end=True).as_numpy("OUTPUT")
    assert (first.tolist(), second.tolist()) == ([[6]], [[5]])


IMAGE = """name: "densenet" platform: "onnxruntime_onnx" max_batch_size : 0
input [ { name: "data" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 2, 2 ] reshape { shape: [ 1, 3, 2, 2 ] } } ]
output [ { name: "fc" data_type: TYPE_FP32 dims: [ 3 ] reshape { shape: [ 1, 3, 1, 1 ] }
           label_filename: "labels.txt" } ]
"""


def test_reshape_without_a_batch(tmp_path: Path, start: Start) -> None:
    """Fails if a client has to know the model's shapes, or if classes are counted along the wrong dim."""
    served(
        tmp_path,
        "densenet",
        [node("GlobalMaxPool", "data", "fc")],
        {"data": (FLOAT, [1, 3, 2, 2])},
        {"fc": (FLOAT, [1, 3, 1, 1])},
        IMAGE + "model_warmup { name: 'w' inputs { key: 'data' value { data_type: TYPE_FP32 dims: [3, 2, 2] "
        "random_data: true } } }",
    )
    (tmp_path / "densenet" / "labels.txt").write_text("cat\ndog\nfish\n")
    process = start(tmp_path, http_port=0)
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    with client(process.ports["grpc"]) as asking:
        metadata = asking.get_model_metadata("densenet")
        assert (list(metadata.inputs[0].shape), list(metadata.outputs[0].shape)) == ([3, 2, 2], [3])
        assert asking.infer("densenet", [tensor("data", x, "FP32")]).as_numpy("fc").tolist() == [3, 7, 11]
        classes = [triton.InferRequestedOutput("fc", class_count=2)]
        found = asking.infer("densenet", [tensor("data", x, "FP32")], outputs=classes).as_numpy("fc")
        assert [text.decode().split(":")[1:] for text in found] == [["2", "fish"], ["1", "dog"]]
    body = {"inputs": [{"name": "data", "datatype": "FP32", "shape": [3, 2, 2], "data": x.tolist()}]}
    status, text = plain(process, "/v2/models/densenet/infer", json.dumps(body).encode())
    assert (status, json.loads(text)["outputs"][0]["shape"]) == (200, [3])
    body["inputs"][0]["shape"] = [1, 3, 2, 2]
    status, text = plain(process, "/v2/models/densenet/infer", json.dumps(body).encode())
    assert status == 400
    assert b"Expected [3,2,2], got [1,3,2,2]" in text


@pytest.mark.parametrize(
    ("real", "dims", "reshape", "shape"),
    [
        (["batch"], "dims: [ 1 ]", "reshape { shape: [ ] }", [5, 1]),
        (["batch", 2, 3], "dims: [ 6 ]", "reshape { shape: [ 2, 3 ] }", [5, 6]),
        (["batch", "n", 1], "dims: [ -1 ]", "reshape { shape: [ -1, 1 ] }", [5, 7]),
        (["batch", 1, "n", 4], "dims: [ -1, 2, 2 ]", "reshape { shape: [ 1, -1, 4 ] }", [5, 3, 2, 2]),
    ],
)
def test_reshape_keeps_the_batch(
    tmp_path: Path, start: Start, real: list[Any], dims: str, reshape: str, shape: list[int]
) -> None:
    """Fails if a reshape moves numbers between rows, or if the answer has the model's shape and not the client's."""
    config = tensors("input", "TYPE_FP32", f"{dims} {reshape}", "x") + tensors(
        "output", "TYPE_FP32", f"{dims} {reshape}", "y"
    )
    served(
        tmp_path, "same", [node("Neg", "x", "y")], {"x": (FLOAT, real)}, {"y": (FLOAT, real)},
        f"max_batch_size: 8\n{config}",
    )  # fmt: skip
    process = start(tmp_path)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with client(process.ports["grpc"]) as asking:
        found = asking.infer("same", [tensor("x", x, "FP32")]).as_numpy("y")
    np.testing.assert_array_equal(found, -x)


def test_a_single_number(tmp_path: Path, start: Start) -> None:
    """Fails if a model that takes a single number is refused because the config says ``dims: [ 1 ]``, as Triton's
    configs have to."""
    config = tensors("input", "TYPE_FP32", "dims: [ 1 ]", "x") + tensors("output", "TYPE_FP32", "dims: [ 1 ]", "y")
    served(tmp_path, "one", [node("Neg", "x", "y")], {"x": (FLOAT, [])}, {"y": (FLOAT, [])}, config)
    with client(start(tmp_path).ports["grpc"]) as asking:
        found = asking.infer("one", [tensor("x", np.array([2], np.float32), "FP32")]).as_numpy("y")
    assert found.tolist() == [-2]


def test_shapes_that_differ_in_size(tmp_path: Path) -> None:
    """Fails if a config whose two shapes can't agree is only found at the first request."""
    config = tensors("input", "TYPE_FP32", "dims: [ 5 ] reshape { shape: [ 2, 3 ] }", "x")
    served(
        tmp_path, "m", [node("Neg", "x", "y")], {"x": (FLOAT, ["batch", 2, 3])}, {"y": (FLOAT, ["batch", 2, 3])},
        f"max_batch_size: 4\n{config}",
    )  # fmt: skip
    assert_refused(tmp_path, r"dims \[5\] and reshape \[2,3\] differ in size")


def test_dims_between_dynamic_dims_stay_in_place() -> None:
    """Fails if a reshape that moves numbers across a dynamic dim is taken, or sizes get into the wrong dims."""
    found = Reshape((-1, 2, -1), (2, -1, -1))
    assert found.inward((5, 2, 7)) == (2, 5, 7)
    assert found.outward((2, 5, 7)) == (5, 2, 7)
    with pytest.raises(ValueError, match=r"^$"):
        found.outward((3, 5, 7))
