"""Proves that a decoder with packed weights computes what its source computes, with accel's CPU kernels and without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.decoder.packed import NothingPacked, PackWeightsConfig
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.converters.quantize.stage import QuantizeConfig
from accel.kernels.native.cpu import layout
from accel.runtimes.base import open_session
from accel.signature.decoder import MASK
from accel.sources.onnx.file import PACKED_WEIGHTS, open_onnx
from accel.stage import run_stage
from tests.support.small_decoder import save_decoder


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("decoder")
    source = save_decoder(folder / "llama", num_key_value_heads=1)
    exported = accel.export(source, out=folder / "exported")
    return run_stage("fuse_decoder", exported, FuseDecoderConfig(), out=folder / "fused.onnx")


def _quantized(fused: Artifact, folder: Path, bits: int) -> Artifact:
    """Returns the quantized decoder with scales of 11 bits, which packing doesn't change."""
    config = QuantizeConfig(form="ort-cpu", mode=f"int{bits}-weights", smallest=1)
    out = run_stage("quantize", fused, config, out=folder / "quantized.onnx")
    model = onnx.load(out.path)
    scales = {node.input[2] for node in model.graph.node if node.op_type == "MatMulNBits"}
    for tensor in model.graph.initializer:
        if tensor.name in scales:
            fraction, exponent = np.frexp(numpy_helper.to_array(tensor))
            rounded = np.ldexp(np.rint(fraction * 2**11) / 2**11, exponent).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    onnx.save(model, folder / "rounded.onnx")
    return open_onnx(folder / "rounded.onnx")


def _packed(src: Artifact, folder: Path) -> Artifact:
    return run_stage("pack_weights", src, PackWeightsConfig(), out=folder / "packed.onnx")


@pytest.mark.parametrize("bits", [4, 8])
def test_the_body_computes_the_same(
    fused: Artifact, tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if weights, scales or parts are mixed up, an operator isn't fused, or a file needs accel's library to run:
    without it, ONNX Runtime's own MatMulNBits gets the same weights."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "empty"))
    src = _quantized(fused, tmp_path, bits)
    out = _packed(src, tmp_path)
    ops = Counter(node.op_type for node in onnx.load(out.path).graph.node)
    assert {op: count for op, count in ops.items() if op.startswith("PackedProduct")} == {
        "PackedProduct": 5, "PackedProduct_3": 2, "PackedProduct_gated": 2,
    }  # fmt: skip
    assert not {"MatMulNBits", "MatMul", "Split", "Sigmoid"} & set(ops)
    assert (out.properties["precision"], out.properties[PACKED_WEIGHTS]) == (f"int{bits}", True)
    assert out.properties["floats"] == ["float32"], "the scales alone are fp16, so ONNX Runtime judges the model"
    feeds = src.signature.example_inputs(batch=3, sequence=4, past=6)
    feeds[MASK][:] = 1
    with open_session(src) as session, open_session(open_onnx(out.path)) as packed:
        wanted, found = session.run(feeds), packed.run(feeds)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def _product(*more: onnx.NodeProto, extra: tuple[str, ...] = (), out: str = "y", **attributes: int) -> onnx.ModelProto:
    """Returns a model of one MatMulNBits [24, 64] and the nodes ``more`` after it."""
    draw = np.random.default_rng(0)
    weights, scales = layout.quantize(draw.standard_normal((24, 64)).astype(np.float32), bits=4, block=32)
    values = {"w": weights, "s": scales, "z": np.full((24, 1), 0x88, np.uint8), "halves": np.array([12, 12])}
    numbers = {"K": 64, "N": 24, "bits": 4, "block_size": 32, "accuracy_level": 4, **attributes}
    node = helper.make_node("MatMulNBits", ["x", "w", "s", *extra], ["p"], domain="com.microsoft", **numbers)
    graph = helper.make_graph(
        [node, *more],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, ["n", "m"])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _gate(first: str, second: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Split", ["p", "halves"], ["a", "b"], axis=-1),
        helper.make_node("Sigmoid", [first], ["g"]),
        helper.make_node("Mul", ["g", first], ["h"]),
        helper.make_node("Mul", [second, "h"], ["y"]),
    ]


@pytest.mark.parametrize(
    ("more", "operator"),
    [
        ([helper.make_node("Relu", ["p"], ["y"])], "PackedProduct"),
        (_gate("a", "b"), "PackedProduct_gated"),
        (_gate("b", "a"), "PackedProduct_gated"),
        ([*_gate("a", "b")[:3], helper.make_node("Mul", ["h", "a"], ["m"]), helper.make_node("Mul", ["m", "b"], ["y"])],
         "PackedProduct_2"),
        ([*_gate("a", "b")[:1], helper.make_node("Sub", ["a", "b"], ["y"])], "PackedProduct_2"),
        ([*_gate("a", "b")[:1], helper.make_node("Concat", ["p", "b"], ["y"], axis=-1)], "PackedProduct"),
    ],
)  # fmt: skip
def test_what_is_fused(tmp_path: Path, more: list[onnx.NodeProto], operator: str) -> None:
    """Fails if another form than gate * sigmoid(gate) * up is taken for it, the two are swapped, or a product whose
    result is read elsewhere is split."""
    onnx.save(_product(*more), tmp_path / "m.onnx")
    src = open_onnx(tmp_path / "m.onnx")
    out = _packed(src, tmp_path)
    assert [n.op_type for n in onnx.load(out.path).graph.node if n.domain == "accel"] == [operator]
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}
    with open_session(src) as session, open_session(out) as packed:
        np.testing.assert_allclose(packed.run(feeds)["y"], session.run(feeds)["y"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("change", [{"extra": ("z",)}, {"block_size": 16}, {"bits": 2}])
def test_what_the_kernels_lack_stays(tmp_path: Path, change: dict[str, object]) -> None:
    """Fails if zero points are lost, or a form that the kernels lack is packed."""
    made = _product(helper.make_node("Relu", ["p"], ["y"]), **change)  # type: ignore[arg-type]
    onnx.save(made, tmp_path / "m.onnx")
    src = Artifact(path=tmp_path / "m.onnx", kind="onnx", signature=accel.Signature((), ()))
    with pytest.raises(NothingPacked, match="quantize it with mode int4-weights first"):
        _packed(src, tmp_path)
