"""Proves that fp8 quantization for TensorRT gives graphs with a small error and engines that compute in fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.converters.cast.stage import CastConfig
from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from accel.errors import UnknownName, UnsupportedHere
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.proof.gates import OutputGate, gate_runtime
from accel.runtimes.base import open_session
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from accel.tables.target import Target

WIDTH = 64
E4M3 = ml_dtypes.float8_e4m3fn


def net(path: Path, opset: int = 20, outlier: float = 1.0) -> Artifact:
    """Makes a net of three matrix products. The first two products share an input. One channel of the shared input is
    multiplied by ``outlier``, and the weights of the same channel are divided by ``outlier``."""
    rng = np.random.default_rng(0)
    scale = np.ones(WIDTH, np.float32)
    scale[3] = outlier
    constants = {"s": scale, "b": rng.standard_normal(WIDTH).astype(np.float32)}
    for name in ("w1", "w2", "w3"):
        constants[name] = (rng.standard_normal((WIDTH, WIDTH)) * np.logspace(-2, 0, WIDTH) / 8).astype(np.float32)
    constants["w1"][3] /= outlier
    constants["w2"][:, 3] /= outlier
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["m"], name="scale"),
        helper.make_node("MatMul", ["m", "w1"], ["a"], name="first"),
        helper.make_node("Gemm", ["m", "w2", "b"], ["c"], name="second", transB=1),
        helper.make_node("Add", ["a", "c"], ["d"], name="sum"),
        helper.make_node("MatMul", ["d", "w3"], ["y"], name="third"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, str(path))
    return open_onnx(path, probe=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    x = np.random.default_rng(1).standard_normal((64, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x)
    return tmp_path / "d.npz"


def rounded(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(value / scale, -448, 448).astype(E4M3).astype(np.float32) * scale)


def config(data: Path, **more: Any) -> QuantizeConfig:
    return QuantizeConfig(form="tensorrt", mode="fp8", data=data, **more)


def test_the_numbers_are_those_of_the_type(data: Path, tmp_path: Path) -> None:
    """Checks that each weight has one scale per channel, and that each activation has the calibrated scale. Also checks
    that each weight is rounded to E4M3. Also fails if a bias or an output is rounded, or if the shared input of two
    products is rounded twice."""
    src = net(tmp_path / "m.onnx")
    made = quantize(src, config(data), tmp_path / "q.onnx")
    assert made.properties["precision"] == "fp8"
    assert made.manifest is None or made.signature == src.signature
    x = np.load(data)["x"]
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(src.path)).graph.initializer}

    def product(value: np.ndarray, name: str, turned: bool = False) -> np.ndarray:
        axis = 1 if turned else 0
        own = rounded(weights[name], np.abs(weights[name]).max(axis=axis, keepdims=True) / np.float32(448))
        return value @ (own.T if turned else own)

    m = rounded(x, np.abs(x).max() / np.float32(448))
    d = product(m, "w1") + product(m, "w2", turned=True) + weights["b"]
    exact = x @ weights["w1"] + x @ weights["w2"].T + weights["b"]
    wanted = product(rounded(d, np.abs(exact).max() / np.float32(448)), "w3")
    assert gate_runtime(made) == "onnx-rounded"
    with open_session(made, gate_runtime(made)) as session:
        found = session.run({"x": x})["y"]
    # A value halfway between two steps may be rounded either way, because the order of summation may vary.
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.abs(wanted).max()
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
    graph = onnx.load(str(made.path)).graph
    ops = [node.op_type for node in graph.node]
    assert (ops.count("QuantizeLinear"), ops.count("DequantizeLinear")) == (2, 5)
    kinds = {t.name: t.data_type for t in graph.initializer}
    assert not {"w1", "w2", "w3"} & set(kinds)
    assert list(kinds.values()).count(TensorProto.FLOAT8E4M3FN) == 3 + 5
    onnx.checker.check_model(str(made.path), full_check=True)


def test_outliers_cost_the_others_nothing(data: Path, tmp_path: Path) -> None:
    """Fails if fp8 rounds with equal steps, as int8 does. In this test, equal steps would round all channels except the
    largest to zero."""
    src = net(tmp_path / "m.onnx", outlier=1000.0)
    errors = {}
    for mode in ("static", "fp8"):
        made = quantize(
            src, QuantizeConfig(form="tensorrt", mode=mode, data=data, smooth=0.0), tmp_path / f"{mode}.onnx"
        )
        errors[mode] = max(r.value or 0.0 for r in OutputGate(limit=10.0, data=data).check(src, made))
    assert errors["fp8"] < 0.1 < errors["static"]
    assert errors["fp8"] > 1e-3  # an error below 1e-3 would mean that nothing was rounded


def test_what_stays_and_what_is_refused(data: Path, tmp_path: Path) -> None:
    """Checks that no node in ``keep`` is rounded, and that per_channel=False gives one scale per tensor. Also checks
    that an unsupported request is refused."""
    src = net(tmp_path / "m.onnx")
    made = quantize(src, config(data, keep=("third",), per_channel=False), tmp_path / "q.onnx")
    graph = onnx.load(str(made.path)).graph
    third = next(node for node in graph.node if node.name == "third")
    assert list(third.input) == ["d", "w3"]
    scales = [numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("/scales")]
    assert [scale.shape for scale in scales] == [(), ()]
    with pytest.raises(QuantizeFailed, match="nothing in the model could be quantized"):
        quantize(src, config(data, keep=("*",)), tmp_path / "none.onnx")
    with pytest.raises(UnknownName, match="minmax or percentile"):
        quantize(src, config(data, calibration="entropy"), tmp_path / "none.onnx")
    with pytest.raises(UnsupportedHere, match="fp8 needs opset >= 19"):
        quantize(net(tmp_path / "old.onnx", opset=17), config(data), tmp_path / "none.onnx")
    with pytest.raises(UnsupportedHere, match="quantized already"):
        quantize(made, config(data), tmp_path / "none.onnx")


def request(data: Path | None, *capabilities: str, precisions: tuple[str, ...] | None = None) -> RecipeRequest:
    target = Target.get("tensorrt-rtx")
    return RecipeRequest(
        targets=(target,), precisions=precisions, data=data, samples=8, threads=1, compute_capabilities=capabilities
    )


def test_it_is_tried_where_every_gpu_has_it(data: Path, tmp_path: Path) -> None:
    """Checks that accel tries fp8 only if calibration data is given and all GPUs support fp8. Also checks that accel
    raises an older opset to the opset that fp8 needs."""
    src = net(tmp_path / "m.onnx", opset=17)
    for capabilities, tried in ((("8.9",), True), (("8.9", "12.0"), True), (("8.6", "8.9"), False), ((), False)):
        found, _ = recipes(src, request(data, *capabilities))
        assert ("fp8" in [recipe.precision for recipe in found]) is tried
    found, _ = recipes(src, request(data, "8.9"))
    steps = next(recipe.stages for recipe in found if recipe.precision == "fp8")
    assert [name for name, _, _ in steps] == ["onnx_from_onnx", "simplify", "quantize", "cast", "engine_from_onnx"]
    assert getattr(steps[0][1], "opset", 0) == 19
    _, left_out = recipes(src, request(None, "8.9", precisions=("fp16", "fp8")))
    assert [item.reason for item in left_out] == ["fp8 needs data to calibrate on; pass data="]


def test_the_cast_around_it(data: Path, tmp_path: Path) -> None:
    """Fails if the cast to fp16 after quantization removes the 8-bit weights or leaves a product in float32. Also fails
    if the cast changes the outputs."""
    cache = StageCache(tmp_path / "cache")
    src = net(tmp_path / "m.onnx")
    quantized = run_stage("quantize", src, config(data), cache=cache)
    gates = [OutputGate(limit=0.05, data=data)]
    made = run_stage("cast", quantized, CastConfig(precision="fp16", data=data), gates=gates, cache=cache)
    kinds = [t.data_type for t in onnx.load(str(made.path)).graph.initializer]
    assert kinds.count(TensorProto.FLOAT8E4M3FN) == 8
    assert TensorProto.FLOAT16 in kinds
    assert TensorProto.FLOAT not in kinds
    assert made.properties["precision"] == "fp8"


def test_the_engine_is_built(data: Path, tmp_path: Path, cli: Any) -> None:
    """Checks that TensorRT accepts the model, and that a kernel of the engine computes in fp8."""
    pytest.importorskip("tensorrt_rtx_bindings")
    src = net(tmp_path / "m.onnx")
    words = ["--target", "tensorrt-rtx", "--precision", "fp8", "--data", data]
    words += ["--compute-capability", "8.9", "--compute-capability", "12.0"]
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words, "--max-drop", "0.05")
    assert done.code == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "model.engine.manifest.json").read_text())
    kernels = manifest["stages"][-1]["notes"]["kernels"]
    types = {kind for row in kernels for kind in (*row["inputs"], *row["outputs"])}
    assert any("fp8" in kind.lower() or "float8" in kind.lower() for kind in types), types


def test_a_gpu_without_it(data: Path, tmp_path: Path, cli: Any) -> None:
    """Checks that accel refuses to build an fp8 engine for a GPU without fp8, and that the error names the fix."""
    pytest.importorskip("tensorrt_rtx_bindings")
    src = net(tmp_path / "m.onnx")
    words = ["--target", "tensorrt-rtx", "--precision", "fp8", "--data", data]
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words, "--compute-capability", "8.6")
    assert done.code == 2
    assert "8.6 has no fp8; use int8 or build for 8.9 and later" in done.stderr
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words)
    assert done.code == 2
    assert "--compute-capability 8.9" in done.stderr
    assert not (tmp_path / "out").exists()
