"""Proves that ONNX models convert to OpenVINO IR, and that the signature can be read from the IR itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.child import run_in_child
from accel.converters.graph.read_ir import describe
from accel.converters.to_openvino import openvino_from_onnx as stage_module
from accel.converters.to_openvino.openvino_from_onnx import (
    IrNotBuilt,
    OpenVinoFromOnnxConfig,
    openvino_from_onnx,
)
from accel.errors import InvalidModel
from accel.proof.gates import OutputGate
from accel.signature import DimRange
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage

ov = pytest.importorskip("openvino")

FLOAT = TensorProto.FLOAT


def value(name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
) -> Path:
    weights = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def net(path: Path, dtype: int = FLOAT) -> Path:
    """Makes a convolution over images of any size. A second output returns the input unchanged under another name."""
    rng = np.random.default_rng(0)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("ReduceMean", ["r", "axes"], ["m"], name="mean", keepdims=0),
        helper.make_node("MatMul", ["m", "head"], ["logits"], name="head"),
        helper.make_node("Identity", ["image"], ["same:0, really"], name="same"),
    ]
    constants = {
        "w": rng.standard_normal((8, 3, 3, 3)).astype(kind),
        "axes": np.array([2, 3]),
        "head": rng.standard_normal((8, 5)).astype(kind),
    }
    image = ["batch", 3, "height", "width"]
    ends = [value("image", image, dtype)], [value("logits", ["batch", 5], dtype), value("same:0, really", image, dtype)]
    return save(path, nodes, *ends, constants)


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return open_onnx(net(tmp_path / "net.onnx"), probe=False, dims={"height": DimRange(4, 8, 16)})


@pytest.fixture
def ir(source: Artifact, tmp_path: Path) -> Artifact:
    (tmp_path / "ir").mkdir()
    return openvino_from_onnx(source, OpenVinoFromOnnxConfig(), tmp_path / "ir" / "net.xml")


def test_the_stage_keeps_the_contract_and_the_outputs(source: Artifact, tmp_path: Path) -> None:
    """Fails if a name, a dynamic dim or a range is lost, or if 16-bit weights change the outputs."""
    made = run_stage(
        "openvino_from_onnx",
        source,
        OpenVinoFromOnnxConfig(),
        gates=[OutputGate(limit=1e-5)],
        cache=StageCache(tmp_path / "cache"),
        out=tmp_path / "published.xml",
    )
    assert made.signature == source.signature
    assert made.companions == ("published.bin",)
    assert made.properties["precision"] == "fp32"
    assert made.manifest is not None
    assert all(gate["passed"] for gate in made.manifest.stages[-1]["gates"])


def test_names_are_read_from_the_file_itself(ir: Artifact, tmp_path: Path) -> None:
    """Checks that the names of the dynamic dims can be read from the .xml and .bin files, without the manifest."""
    moved = tmp_path / "elsewhere.xml"
    moved.write_bytes(ir.path.read_bytes())
    moved.with_suffix(".bin").write_bytes(ir.path.with_suffix(".bin").read_bytes())
    signature, properties = describe(moved)
    assert [(s.name, s.shape) for s in signature.inputs] == [("image", ("batch", 3, "height", "width"))]
    assert [(s.name, s.shape) for s in signature.outputs] == [
        ("logits", ("batch", 5)),
        ("same:0, really", ("batch", 3, "height", "width")),
    ]
    assert properties == {"precision": "fp32"}


def test_an_ir_from_elsewhere_gets_names(source: Artifact, tmp_path: Path) -> None:
    """Checks that an IR without accel's signature entry can be read, and that different dims of two tensors get
    different names."""
    path = tmp_path / "foreign.xml"
    ov.save_model(ov.Core().read_model(str(source.path)), str(path), compress_to_fp16=False)
    signature, _ = describe(path)
    assert signature.inputs[0].shape == ("image_0", 3, "image_2", "image_3")
    assert signature.outputs[0].shape == ("logits_0", 5)


def test_the_record_does_not_overrule_the_model(source: Artifact, tmp_path: Path) -> None:
    """Fails if ``describe`` trusts accel's signature entry although the entry contradicts the model. The entry in this
    test has a dynamic batch and an output named "gone". The model has a fixed batch and no output named "gone"."""
    model = ov.Core().read_model(str(source.path))
    model.reshape({"image": [2, 3, -1, -1]})
    record = (
        '{"inputs": [{"name": "image", "dims": ["batch", 3, "h", "w"]}], "outputs": [{"name": "gone", "dims": [9]}]}'
    )
    model.set_rt_info(record, ["accel", "signature"])
    path = tmp_path / "planted.xml"
    ov.save_model(model, str(path), compress_to_fp16=False)
    signature, _ = describe(path)
    assert signature.inputs[0].shape == (2, 3, "h", "w")
    assert [s.name for s in signature.outputs] == ["logits", "same:0, really"]


@pytest.mark.parametrize(
    "record", ["not json", "[]", '{"inputs": 3, "outputs": []}', '{"inputs": [{}], "outputs": []}']
)
def test_a_damaged_record(record: str, source: Artifact, tmp_path: Path) -> None:
    """Fails if accel trusts a damaged signature entry in an IR."""
    model = ov.Core().read_model(str(source.path))
    model.set_rt_info(record, ["accel", "signature"])
    path = tmp_path / "planted.xml"
    ov.save_model(model, str(path), compress_to_fp16=False)
    with pytest.raises(InvalidModel, match="accel entry is damaged"):
        describe(path)


def test_conversion_is_byte_identical(source: Artifact, ir: Artifact, tmp_path: Path) -> None:
    """Fails if converting the same model twice gives different bytes. With different bytes, the hashes in the manifest
    would change at each conversion."""
    again = openvino_from_onnx(source, OpenVinoFromOnnxConfig(), tmp_path / "net.xml")
    assert [file.read_bytes() for file in again.files] == [file.read_bytes() for file in ir.files]
    assert sorted(p.name for p in ir.path.parent.iterdir()) == ["net.bin", "net.xml"]


@pytest.mark.parametrize(
    ("dtype", "precision"), [(TensorProto.FLOAT16, "fp16"), (TensorProto.BFLOAT16, "bf16")], ids=["fp16", "bf16"]
)
def test_sixteen_bits_stay(dtype: int, precision: str, tmp_path: Path) -> None:
    """Fails if the inputs, outputs or weights of a 16-bit model change their dtype."""
    src = open_onnx(net(tmp_path / "half.onnx", dtype), probe=False)
    made = openvino_from_onnx(src, OpenVinoFromOnnxConfig(), tmp_path / "half.xml")
    assert {s.dtype for s in (*made.signature.inputs, *made.signature.outputs)} == {src.signature.inputs[0].dtype}
    assert made.properties["precision"] == precision


@pytest.mark.parametrize("what", ["weights", "activations"])
def test_quantized_is_seen(what: str, tmp_path: Path) -> None:
    """Checks that accel reports the precision of a QDQ model as int8, although some of the model's tensors are
    float."""
    qdq = ["scale", "zero"]
    if what == "weights":
        nodes = [
            helper.make_node("DequantizeLinear", ["w", *qdq], ["wd"]),
            helper.make_node("MatMul", ["x", "wd"], ["y"]),
        ]
    else:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", *qdq], ["q"]),
            helper.make_node("DequantizeLinear", ["q", *qdq], ["d"]),
            helper.make_node("MatMul", ["d", "float"], ["y"]),
        ]
    constants = {
        "scale": np.array(0.1, np.float32),
        "zero": np.array(0, np.int8),
        "w": np.arange(64, dtype=np.int8).reshape(8, 8),
        "float": np.ones((8, 8), np.float32),
    }
    path = save(tmp_path / "int8.onnx", nodes, [value("x", ["batch", 8])], [value("y", ["batch", 8])], constants)
    made = openvino_from_onnx(open_onnx(path, probe=False), OpenVinoFromOnnxConfig(), tmp_path / "int8.xml")
    assert made.properties["precision"] == "int8"


def test_an_unknown_operator(source: Artifact, tmp_path: Path) -> None:
    """Checks that the error for an unknown operator names the operator and the fix, and that no files remain."""
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    out = tmp_path / "out"
    out.mkdir()
    src = replace(source, path=save(tmp_path / "odd.onnx", [node], [value("x", [4])], [value("y", [4])]))
    with pytest.raises(IrNotBuilt, match=r"NoSuchOperator.*; export it with another opset") as caught:
        openvino_from_onnx(src, OpenVinoFromOnnxConfig(), out / "m.xml")
    assert "\n" not in str(caught.value)
    assert list(out.iterdir()) == []


def test_a_loop_that_openvino_refuses(source: Artifact, tmp_path: Path) -> None:
    """Checks the error for a loop that OpenVINO refuses. The error must not end in the middle of a word, and must say
    that another opset doesn't help. Also checks that the error names the operator and a target that can run the
    loop."""
    step = helper.make_node("Add", ["carried", "carried"], ["next"])
    go, still = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "still"))
    body = helper.make_graph(
        [step, helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), go, value("carried", [4]), value("more", [4])],
        [still, value("next", [4])],
    )
    nodes = [helper.make_node("Loop", ["times", "", "x"], ["y"], name="while", body=body)]
    path = save(tmp_path / "l.onnx", nodes, [value("x", [4])], [value("y", [4])], {"times": np.array(2, np.int64)})
    with pytest.raises(
        IrNotBuilt,
        match=r"can't convert the operator Loop of l\.onnx \(While .*: y>.*mandatory inputs \(3\)\).*ort-cpu\)$",
    ) as caught:
        openvino_from_onnx(replace(source, path=path), OpenVinoFromOnnxConfig(), tmp_path / "m.xml")
    assert "another opset doesn't help" in str(caught.value)
    assert not (tmp_path / "m.xml").exists()


def test_a_crash_of_the_converter_is_a_failed_build(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a crash of the converter kills the calling process or leaves files behind."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(stage_module, "run_in_child", lambda _target, **_arguments: run_in_child("os:abort"))
    with pytest.raises(IrNotBuilt, match=r"died .*SIGABRT.*; simplify"):
        openvino_from_onnx(source, OpenVinoFromOnnxConfig(), out / "m.xml")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"this is a text file, not a model\n" * 9], ids=["empty", "text"])
def test_files_that_are_no_onnx(content: bytes, source: Artifact, tmp_path: Path) -> None:
    """Checks that accel passes only ONNX models to the converter."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match="export it again"):
        openvino_from_onnx(replace(source, path=path), OpenVinoFromOnnxConfig(), tmp_path / "m.xml")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no xml": lambda xml: xml.unlink(),
    "no bin": lambda xml: xml.with_suffix(".bin").unlink(),
    "empty xml": lambda xml: xml.write_bytes(b""),
    "text": lambda xml: xml.write_text("this is a text file, not a model"),
    "half the xml": lambda xml: xml.write_bytes(xml.read_bytes()[: xml.stat().st_size // 2]),
    "half the bin": lambda xml: xml.with_suffix(".bin").write_bytes(
        b"\0" * (xml.with_suffix(".bin").stat().st_size // 2)
    ),
    "an unknown type": lambda xml: xml.write_text(xml.read_text().replace('element_type="f32"', 'element_type="q99"')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ir(damage: str, ir: Artifact) -> None:
    """Fails if accel describes a damaged IR as intact, or shows OpenVINO's own error."""
    DAMAGES[damage](ir.path)
    with pytest.raises(InvalidModel, match=r"convert it again|put both in one folder") as caught:
        describe(ir.path)
    assert "\n" not in str(caught.value)
    assert "src/" not in str(caught.value)  # the error leaves out OpenVINO's source lines, which don't help the user
