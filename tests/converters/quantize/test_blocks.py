"""Proves that block-wise weight-only quantization to 8 or 4 bits gives correct graphs that TensorRT can build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.runtimes.base import open_session
from accel.tables.target import Target
from tests.support.onnx_builder import FLOAT, artifact


def net(path: Path, opset: int = 21) -> Artifact:
    """Makes a net of three matrix products. The block size divides the inner dim of the first product and of the third
    product, but not of the second product. The third product has a transposed weight."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (256, 300), "w2": (300, 256), "w3": (128, 256)}
    constants = {n: (rng.standard_normal(shape) / 16).astype(np.float32) for n, shape in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("MatMul", ["a", "w2"], ["b"], name="odd"),
        helper.make_node("Gemm", ["b", "w3"], ["y"], name="turned", transB=1),
    ]
    return artifact(path, nodes, {"x": (FLOAT, ["batch", 256])}, {"y": (FLOAT, ["batch", 128])}, constants, opset=opset)


def blocks(value: np.ndarray, axis: int, size: int, top: int) -> np.ndarray:
    """Rounds ``value`` in blocks of ``size`` elements along ``axis``. Each block has a scale of its own."""
    moved = np.moveaxis(value, axis, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, size)
    scales = np.abs(parts).max(axis=-1, keepdims=True) / np.float32(top)
    return np.asarray(np.moveaxis((np.rint(parts / scales) * scales).reshape(moved.shape), -1, axis))


@pytest.mark.parametrize(("mode", "top"), [("int4-weights", 7), ("int8-weights", 127)])
def test_the_numbers_are_those_of_the_blocks(mode: str, top: int, tmp_path: Path) -> None:
    """Fails if blocks run along the wrong axis, or if a quantized weight has a wrong value. Also checks that a product
    stays unchanged if its inner dim isn't a multiple of the block size."""
    src = net(tmp_path / "m.onnx")
    made = quantize(src, QuantizeConfig(form="tensorrt", mode=mode, block_size=64, smallest=1), tmp_path / "q.onnx")
    w = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(src.path)).graph.initializer}
    x = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    wanted = x @ blocks(w["w1"], 0, 64, top) @ w["w2"] @ blocks(w["w3"], 1, 64, top).T
    with open_session(made, "onnx-rounded") as session:  # ONNX Runtime itself would also quantize the activations
        found = session.run({"x": x})["y"]
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
    kinds = {t.name: t.data_type for t in onnx.load(str(made.path)).graph.initializer}
    assert kinds["w2"] == TensorProto.FLOAT
    assert not {"w1", "w3"} & set(kinds)
    assert made.properties["precision"] == mode[:4]
    assert made.notes["quantized_weights"] == 2
    onnx.checker.check_model(str(made.path), full_check=True)
    with pytest.raises(QuantizeFailed, match="the largest of this model has 76800; pass"):
        quantize(src, QuantizeConfig(form="tensorrt", mode=mode, smallest=1 << 20), tmp_path / "n.onnx")


def test_the_candidate(tmp_path: Path) -> None:
    """Checks that --precision int4 makes a candidate with the given block size, and converts an older model to opset
    21."""
    src = net(tmp_path / "m.onnx", opset=17)
    words: dict[str, Any] = {"precisions": ("int4",), "data": None, "samples": 0, "threads": 1}
    for options, size in (({}, 128), ({"block_size": 64}, 64)):
        request = RecipeRequest(targets=(Target.get("tensorrt-rtx"),), quantize=options, **words)
        ((recipe,), _) = recipes(src, request)
        steps = {name: config for name, config, _ in recipe.stages}
        assert list(steps) == ["onnx_from_onnx", "simplify", "quantize", "cast", "engine_from_onnx"]
        assert getattr(steps["onnx_from_onnx"], "opset", 0) == 21
        assert getattr(steps["quantize"], "block_size", 0) == size


def test_the_engine_is_built(tmp_path: Path, cli: Any) -> None:
    """Fails if TensorRT refuses the model, or if TensorRT dequantizes the weights in a separate kernel before the
    product."""
    pytest.importorskip("tensorrt_rtx_bindings")
    src = net(tmp_path / "m.onnx")
    words = ["--target", "tensorrt-rtx", "--precision", "int4", "--compute-capability", "8.9"]
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words, "--quantize", "smallest=1000", "--max-drop", "0.1")
    assert done.code == 0, done.stderr
    stages = json.loads((tmp_path / "out" / "model.engine.manifest.json").read_text())["stages"]
    assert next(stage["options"]["mode"] for stage in stages if stage["name"] == "quantize") == "int4-weights"
    made_of = [set(row["onnx"]) for row in stages[-1]["notes"]["kernels"]]
    assert any({"w1/dequantize", "first"} <= names for names in made_of), made_of
    assert any({"w3/dequantize", "turned"} <= names for names in made_of), made_of
