"""Proves that weight-only quantization to 8 or 4 bits makes large weights smaller and runs in both CPU runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from accel.converters.to_openvino.openvino_from_onnx import OpenVinoFromOnnxConfig
from accel.errors import UnknownName, UnsupportedHere
from accel.optimizer.recipes import steps as module
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.proof.gates import OutputGate
from accel.runtimes.base import open_session
from accel.sources.onnx.file import read_proto
from accel.stage import run_stage
from accel.tables.target import Target
from tests.support.onnx_builder import FLOAT, artifact, node

MODES = ("int8-weights", "int4-weights")
LIMITS = {"int8-weights": 0.02, "int4-weights": 0.2}  # int4 has a higher limit, because it has only 15 levels


def linear_net(path: Path, opset: int) -> Artifact:
    """Makes a net of two large layers and one small layer."""
    rng = np.random.default_rng(0)
    constants = {
        "w1": rng.standard_normal((256, 512)) / 16,
        "b1": rng.standard_normal(512),
        "w2": rng.standard_normal((512, 256)) / 22,
        "w3": rng.standard_normal((8, 256)) / 16,
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["b"], name="second"),
        helper.make_node("Gemm", ["b", "w3"], ["y"], name="small", transB=1),
    ]
    return artifact(
        path,
        nodes,
        {"x": (FLOAT, ["batch", 256])},
        {"y": (FLOAT, ["batch", 8])},
        {name: value.astype(np.float32) for name, value in constants.items()},
        opset=opset,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opset", [17, 21])
def test_ort_form(opset: int, mode: str, tmp_path: Path) -> None:
    """Fails if a large product keeps float32 weights, or if the small product's weights are quantized. Also fails if
    the outputs are inaccurate."""
    src = linear_net(tmp_path / "m.onnx", opset)
    gates = [OutputGate(limit=LIMITS[mode])]
    made = run_stage("quantize", src, QuantizeConfig(mode=mode), gates=gates, cache=StageCache(tmp_path / "cache"))
    assert made.signature == src.signature
    assert made.properties["precision"] == mode[:4]
    assert made.properties["opset"] == opset
    graph = read_proto(made.path, weights=True).graph
    assert sum(node.op_type == "MatMulNBits" for node in graph.node) == 2
    left = {
        tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    }
    assert left >= {"w3"}
    assert not left & {"w1", "w2"}
    assert made.path.stat().st_size < {"int8": 0.31, "int4": 0.19}[mode[:4]] * src.path.stat().st_size


@pytest.mark.proof
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opset", [17, 21])
def test_openvino_form(opset: int, mode: str, tmp_path: Path) -> None:
    """Checks that NNCF's model can be converted to IR, and that the IR stores the weights with as few bits as the
    model. Also fails if the small layer is quantized."""
    pytest.importorskip("nncf")
    src = linear_net(tmp_path / "m.onnx", opset)
    cache = StageCache(tmp_path / "cache")
    gates = [OutputGate(limit=LIMITS[mode])]
    made = run_stage("quantize", src, QuantizeConfig(form="openvino", mode=mode), gates=gates, cache=cache)
    assert made.properties["precision"] == mode[:4]
    ir = run_stage("openvino_from_onnx", made, OpenVinoFromOnnxConfig(), gates=gates, cache=cache)
    assert ir.properties["precision"] == mode[:4]
    assert sum(file.stat().st_size for file in ir.files) < 0.4 * src.path.stat().st_size
    small = next(t for t in read_proto(made.path, weights=True).graph.initializer if t.name == "w3")
    assert small.data_type == TensorProto.FLOAT


def test_weights_below_the_limit_are_named(tmp_path: Path) -> None:
    """Fails if the error for a model of small weights doesn't say how to quantize them."""
    x, y = {"x": (FLOAT, ["batch", 32])}, {"y": (FLOAT, ["batch", 16])}
    src = artifact(tmp_path / "s.onnx", [node("MatMul", "x w", "y")], x, y, {"w": np.ones((32, 16), np.float32)})
    with pytest.raises(QuantizeFailed, match=r"the largest of this model has 512; pass quantize=\['smallest=1'\]"):
        quantize(src, QuantizeConfig(mode="int8-weights"), tmp_path / "q.onnx")
    made = quantize(src, QuantizeConfig(mode="int8-weights", smallest=1), tmp_path / "q.onnx")
    assert made.notes["quantized_weights"]


def test_the_precisions_of_a_target_are_all_named(tmp_path: Path) -> None:
    """Fails if the error for a precision that the target lacks leaves out precisions that the target has."""
    io = {"x": (FLOAT, ["batch", 2])}
    src = artifact(tmp_path / "s.onnx", [node("Relu", "x", "y")], io, {"y": (FLOAT, ["batch", 2])})
    asked = RecipeRequest(targets=(Target.get("ort-cpu"),), precisions=("fp16",), data=None, samples=0, threads=1)
    with pytest.raises(UnsupportedHere, match=r"ort-cpu has no fp16; it has fp32, int8, int4, mixed$"):
        recipes(src, asked)


def test_what_is_kept_stays(tmp_path: Path) -> None:
    """Fails if ``keep`` or ``smallest`` is ignored, or if a model without quantized weights counts as quantized. Also
    checks that an unsupported request is refused."""
    src = linear_net(tmp_path / "m.onnx", 17)
    for form in ("ort-cpu", "openvino"):
        made = quantize(src, QuantizeConfig(form=form, mode="int4-weights", keep=("first",)), tmp_path / "k.onnx")
        assert made.notes["quantized_weights"] == 1
        with pytest.raises(QuantizeFailed, match="the largest of this model has 131072; pass"):
            quantize(src, QuantizeConfig(form=form, mode="int8-weights", smallest=1 << 20), tmp_path / "n.onnx")
    with pytest.raises(UnknownName, match="mode"):
        quantize(src, QuantizeConfig(form="tensorrt", mode="dynamic"), tmp_path / "n.onnx")
    with pytest.raises(UnsupportedHere, match="int4-weights needs opset >= 21"):
        quantize(src, QuantizeConfig(form="tensorrt", mode="int4-weights"), tmp_path / "n.onnx")
    with pytest.raises(UnsupportedHere, match="quantized already"):
        quantize(
            quantize(src, QuantizeConfig(mode="int4-weights"), tmp_path / "a.onnx"), QuantizeConfig(), tmp_path / "b"
        )


def test_candidates_only_of_models_that_are_mostly_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel tries weight-only candidates for a large model, but not for a small model. Also checks that
    --precision int4 forces weight-only candidates."""
    src = linear_net(tmp_path / "m.onnx", 17)

    def names(*precisions: str) -> list[str]:
        targets = (Target.get("ort-cpu"), Target.get("openvino"))
        request = RecipeRequest(targets=targets, precisions=precisions or None, data=None, samples=0, threads=1)
        return [recipe.name for recipe in recipes(src, request)[0]]

    assert not [name for name in names() if "int4" in name or "weights" in name]
    assert names("int4") == ["ort-cpu int4", "openvino int4"]
    monkeypatch.setattr(module, "_LARGE_WEIGHTS", 1000)
    assert {"ort-cpu int8 weights", "ort-cpu int4", "openvino int4"} <= set(names())


@pytest.mark.proof
def test_int4_from_the_command_line(tmp_path: Path, cli: object) -> None:
    """Checks that `accel optimize` accepts --precision int4 and measures the int4 model's drop in accuracy."""
    src = linear_net(tmp_path / "m.onnx", 17)
    done = cli(  # type: ignore[operator]
        "optimize", src.path, "-o", tmp_path / "out", "--target", "ort-cpu", "--precision", "int4",
        "--max-drop", "0.02", "--rounds", "5", "--threads", "1", "--json",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    import json

    row = next(r for r in json.loads(done.stdout)["candidates"] if r["name"] == "ort-cpu int4")
    assert 1e-4 < row["judgement"]["drop"] < 0.02
    with open_session(src, "onnxruntime") as session:
        assert session.run(src.signature.example_inputs())["y"].shape[1] == 8


@pytest.mark.proof
def test_verify_and_bisect_know_int4(tmp_path: Path, cli: object) -> None:
    """Checks that `verify` and `bisect` have an error limit for int4 models, and don't report the rounding of weights
    as a difference. Also fails if `verify` or `bisect` accepts a model with other weights."""
    import json

    pytest.importorskip("nncf")
    src = linear_net(tmp_path / "m.onnx", 17)
    quantize(src, QuantizeConfig(mode="int4-weights"), tmp_path / "four.onnx")
    config = QuantizeConfig(form="openvino", mode="int4-weights")
    ir = run_stage("quantize", src, config, gates=[], cache=StageCache(tmp_path / "cache"))
    for command, path in (("verify", tmp_path / "four.onnx"), ("verify", ir.path), ("bisect", tmp_path / "four.onnx")):
        done = cli(command, src.path, path, "--json")  # type: ignore[operator]
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["limit"] == 0.4
    model = onnx.load(str(src.path))
    for tensor in model.graph.initializer:
        if tensor.name == "w2":
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), "w2"))
    onnx.save(model, str(tmp_path / "other.onnx"))
    for command, key in (("verify", "problems"), ("bisect", "divergence")):
        done = cli(command, tmp_path / "other.onnx", tmp_path / "four.onnx", "--json")  # type: ignore[operator]
        assert done.code == 1, done.stderr
        assert json.loads(done.stdout)[key]
