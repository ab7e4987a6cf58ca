"""Proves that each target's int8 model has the right QDQ pairs, keeps the other tensors float, and stays accurate."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel.converters.quantize.stage as module
from accel import machine as machine_module
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.child import Child
from accel.converters.cast.stage import CastConfig, cast
from accel.converters.quantize.histogram import Histogram, value_range
from accel.converters.quantize.stage import QuantizeConfig, QuantizeFailed, quantize
from accel.errors import BadData, ChildCrashed, UnknownName, UnsupportedHere
from accel.runtimes.base import open_session
from accel.sources.onnx.file import ROWS_SHARE_SCALES, open_onnx, read_proto
from accel.stage import run_stage
from tests.support.cpu_features import needs_vnni

FLOAT = TensorProto.FLOAT
CHANNELS = 32


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    shape: list[Any],
    out_shape: list[Any],
    constants: dict[str, Any],
    opset: int = 17,
) -> Artifact:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, out_shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return open_onnx(path, probe=False)


def conv_net(path: Path, opset: int = 17) -> Artifact:
    """Makes a net of two convolutions, a residual, pooling and a Gemm. The second convolution is depthwise, and its
    channels have very different magnitudes."""
    rng = np.random.default_rng(0)
    depthwise = rng.standard_normal((16, 1, 3, 3)) * np.logspace(-2, 1, 16)[:, None, None, None]
    constants = {
        "w1": (rng.standard_normal((16, 3, 3, 3)) / 5).astype(np.float32),
        "b1": rng.standard_normal(16).astype(np.float32),
        "w2": depthwise.astype(np.float32),
        "w3": (rng.standard_normal((10, 16)) / 4).astype(np.float32),
        "b3": np.zeros(10, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], name="depthwise", pads=[1, 1, 1, 1], group=16),
        helper.make_node("Add", ["c2", "r1"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], name="head", transB=1),
    ]
    return save(path, nodes, ["batch", 3, 16, 16], ["batch", 10], constants, opset)


def attention_net(path: Path) -> Artifact:
    """Makes an attention layer with a residual. A few channels of the layer's input are thirty times as large as its
    other channels."""
    rng = np.random.default_rng(0)
    scale = np.ones(CHANNELS, np.float32)
    scale[:2] = 30
    constants: dict[str, Any] = {
        "scale": scale,
        "low": np.float32(-1e9),
        "positive": np.float32(0),
        "swap": np.float32(1),
    }
    for name in ("q", "k", "v", "o"):
        constants[f"w{name}"] = (rng.standard_normal((CHANNELS, CHANNELS)) / 6).astype(np.float32)
    nodes = [helper.make_node("LayerNormalization", ["x", "scale"], ["n"], name="norm")]
    nodes += [helper.make_node("MatMul", ["n", f"w{name}"], [name], name=f"linear_{name}") for name in "qkv"]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], name="scores"),
        helper.make_node("Mul", ["scores", "swap"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["mixed"], name="mixed"),
        helper.make_node("MatMul", ["mixed", "wo"], ["h"], name="linear_o"),
        helper.make_node("Add", ["h", "n"], ["y"], name="residual"),
    ]
    del constants["low"], constants["positive"]
    return save(path, nodes, ["batch", "sequence", CHANNELS], ["batch", "sequence", CHANNELS], constants, 20)


def calibration(src: Artifact, path: Path, count: int = 16) -> Path:
    sizes = {"sequence": 12} if "sequence" in src.signature.dims else {}
    np.savez(path, **src.signature.example_inputs(seed=9, batch=count, **sizes))  # type: ignore[arg-type]
    return path


def error(src: Artifact, made: Artifact) -> float:
    """Returns the relative l2 error on inputs outside the calibration data. Skips the test on a CPU without VNNI."""
    needs_vnni()
    feeds = src.signature.example_inputs(seed=5, batch=4)
    with open_session(src, "onnxruntime") as reference, open_session(made, "onnxruntime") as candidate:
        wanted, found = reference.run(feeds)["y"], candidate.run(feeds)["y"]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def quantized_inputs(made: Artifact) -> set[str]:
    """Returns the nodes whose first input is the output of a DequantizeLinear."""
    graph = read_proto(made.path).graph
    dequantized = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    return {n.name for n in graph.node if n.input and n.input[0] in dequantized and n.op_type != "QuantizeLinear"}


def constants(made: Artifact) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in read_proto(made.path, weights=True).graph.initializer}


def zero_points(made: Artifact) -> list[np.ndarray]:
    values = constants(made)
    nodes = [n for n in read_proto(made.path).graph.node if n.op_type == "DequantizeLinear"]
    return [values[n.input[2]] for n in nodes]


def test_ort_cpu_form(tmp_path: Path) -> None:
    """Checks that activations are uint8, and that weights are int8 with a scale per channel. Also fails if the residual
    is computed in float. Also fails if the opset, the IR version, a name or the dynamic batch changes."""
    src = conv_net(tmp_path / "m.onnx")
    config = QuantizeConfig(form="ort-cpu", data=calibration(src, tmp_path / "d.npz"))
    made = run_stage("quantize", src, config, cache=StageCache(tmp_path / "cache"))
    assert (made.properties["opset"], made.properties["ir"], made.properties["precision"]) == (17, 8, "int8")
    assert made.signature == src.signature
    assert made.manifest is not None
    assert "warning" not in made.manifest.stages[-1]["notes"]
    assert {z.dtype.name for z in zero_points(made)} >= {"uint8", "int8"}
    values = constants(made)
    assert values["w2_quantized"].dtype == np.int8
    assert values["w2_scale"].shape == (16,)
    assert "Relu" not in Counter(n.op_type for n in read_proto(made.path).graph.node)  # a Relu has no effect on uint8
    assert error(src, made) < 0.03


def test_a_scale_a_channel_matters(tmp_path: Path) -> None:
    """Fails if ``per_channel=True`` gives only one scale per tensor. One scale per tensor would round the depthwise
    convolution's small channels to zero."""
    src = conv_net(tmp_path / "m.onnx")
    data = calibration(src, tmp_path / "d.npz")
    fine = quantize(src, QuantizeConfig(data=data, reduce_range=False), tmp_path / "a.onnx")
    coarse = quantize(src, QuantizeConfig(data=data, reduce_range=False, per_channel=False), tmp_path / "b.onnx")
    assert constants(coarse)["w2_scale"].shape in ((), (1,))
    small = constants(coarse)["w2_quantized"][:4]
    assert np.abs(small).max() <= 1
    assert np.abs(constants(fine)["w2_quantized"][:4]).max() >= 100


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_seven_bits_where_sums_saturate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Checks that weights have 7 bits on a CPU without VNNI and 8 bits on any other CPU. Also checks that the manifest
    records ``reduce_range``, and that a CPU with VNNI doesn't get the cached model of a CPU without VNNI."""
    src = (conv_net if mode == "static" else attention_net)(tmp_path / "m.onnx")
    data = calibration(src, tmp_path / "d.npz") if mode == "static" else None
    for saturates, most in ((True, 64), (False, 127)):
        monkeypatch.setattr(module, "int8_saturates", lambda found=saturates: found)
        made = run_stage("quantize", src, QuantizeConfig(mode=mode, data=data), cache=StageCache(tmp_path / "cache"))
        weights = [value for value in constants(made).values() if value.dtype == np.int8 and value.ndim > 1]
        assert max(int(np.abs(value.astype(int)).max()) for value in weights) == most
        record = made.history[-1]
        assert record["options"]["reduce_range"] is saturates
        assert ("reduce_range" in record["notes"]) is saturates
    for form in ("openvino", "tensorrt"):
        assert QuantizeConfig(form=form).reduce_range is False


@pytest.mark.parametrize(
    ("machine", "flags", "saturates"),
    [
        ("x86_64", "fpu avx2 avx512_vnni", False),
        ("x86_64", "fpu avx2 avx_vnni", False),
        ("x86_64", "fpu avx2 avx512f", True),
        ("AMD64", None, True),  # Windows has no /proc/cpuinfo
        ("aarch64", None, False),
    ],
)
def test_which_cpus_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str | None, saturates: bool
) -> None:
    """Fails if ``int8_saturates`` contradicts the CPU's instruction set."""
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: {flags}\nbugs\t\t: none\n\n")
    monkeypatch.setattr(machine_module, "_CPU_INFO", info)
    monkeypatch.setattr(machine_module.platform, "machine", lambda: machine)
    assert machine_module.int8_saturates() is saturates


def test_the_dims_of_the_outputs_keep_their_names(tmp_path: Path) -> None:
    """Fails if the batch of an output gets a name that ONNX Runtime's shape inference made up."""
    weights = {"w1": np.ones((4, 3, 3, 3), np.float32), "w2": np.ones((4, 10), np.float32), "axes": [2, 3]}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"]),
        helper.make_node("ReduceMax", ["c", "axes"], ["r"], keepdims=0),
        helper.make_node("Gemm", ["r", "w2"], ["y"]),
    ]
    src = save(tmp_path / "m.onnx", nodes, ["batch", 3, 16, 16], ["batch", 10], weights, opset=20)
    made = quantize(src, QuantizeConfig(), tmp_path / "o.onnx")
    assert made.signature.outputs == src.signature.outputs


def test_dynamic_form(tmp_path: Path) -> None:
    """Fails if a residual or a product of two activations is quantized, or if dynamic quantization requires data. Also
    checks that the quantized model has the property ``ROWS_SHARE_SCALES``."""
    src = attention_net(tmp_path / "m.onnx")
    made = quantize(src, QuantizeConfig(mode="dynamic"), tmp_path / "o.onnx")
    assert made.properties[ROWS_SHARE_SCALES]
    assert ROWS_SHARE_SCALES not in src.properties
    ops = Counter(n.op_type for n in read_proto(made.path).graph.node)
    assert (ops["MatMulInteger"], ops["MatMul"]) == (4, 2)
    assert "warning" not in made.notes
    assert error(src, made) < 0.05
    with pytest.raises(QuantizeFailed, match="nothing in"):
        quantize(conv_net(tmp_path / "c.onnx"), QuantizeConfig(mode="dynamic", keep=("Gemm",)), tmp_path / "p.onnx")


@pytest.mark.parametrize(("form", "smooth"), [("ort-cpu", 0.85), ("tensorrt", 0.85), ("tensorrt", 0.0)])
def test_attention_stays_whole(tmp_path: Path, form: str, smooth: float) -> None:
    """Fails if a product of two activations is quantized, or if the residual reads a quantized tensor."""
    src = attention_net(tmp_path / "m.onnx")
    data = calibration(src, tmp_path / "d.npz")
    made = quantize(src, QuantizeConfig(form=form, data=data, smooth=smooth), tmp_path / "o.onnx")
    assert quantized_inputs(made) == {"linear_q", "linear_k", "linear_v", "linear_o"}
    residual = next(n for n in read_proto(made.path).graph.node if n.name == "residual")
    assert list(residual.input) == ["h", "n"]
    assert made.notes.get("smoothed", 0) == (2 if smooth else 0)


def test_outliers_are_smoothed(tmp_path: Path) -> None:
    """Fails if smoothing is left out, changes the outputs in float32, or scales along the wrong axis."""
    src = attention_net(tmp_path / "m.onnx")
    data = calibration(src, tmp_path / "d.npz")
    smooth = quantize(src, QuantizeConfig(form="tensorrt", data=data), tmp_path / "a.onnx")
    plain = quantize(src, QuantizeConfig(form="tensorrt", data=data, smooth=0.0), tmp_path / "b.onnx")
    assert error(src, smooth) < 0.5 * error(src, plain)
    assert error(src, smooth) < 0.05


@pytest.mark.proof
def test_tensorrt_form_builds_on_an_fp16_base(tmp_path: Path) -> None:
    """Fails if the model keeps a zero point, an int32 bias or a scale dtype that TensorRT-RTX refuses. Also checks that
    the engine uses int8 kernels. The test quantizes the model first and then casts the model to fp16."""
    pytest.importorskip("tensorrt_rtx_bindings")
    from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, engine_from_onnx

    for make in (conv_net, attention_net):
        src = make(tmp_path / f"{make.__name__}.onnx", **({"opset": 20} if make is conv_net else {}))
        data = calibration(src, tmp_path / "d.npz")
        made = quantize(src, QuantizeConfig(form="tensorrt", data=data), tmp_path / "q.onnx")
        assert {z.dtype.name for z in zero_points(made)} == {"int8"}
        assert not any(np.any(z) for z in zero_points(made))
        assert TensorProto.INT32 not in {t.data_type for t in read_proto(made.path).graph.initializer}
        half = cast(made, CastConfig(data=data), tmp_path / "h.onnx")
        assert half.properties["precision"] == "int8"
        scales = {n.input[1] for n in read_proto(half.path).graph.node if n.op_type == "DequantizeLinear"}
        assert {constants(half)[name].dtype.name for name in scales} == {"float16"}
        for model in (made, half):
            engine = engine_from_onnx(model, EngineFromOnnxConfig(compute_capabilities=("8.6",)), tmp_path / "e.engine")
            inputs = [dtype for kernel in engine.notes["kernels"] for dtype in kernel["inputs"]]
            assert "int8" in inputs


def test_old_opsets_say_that_scales_are_float32(tmp_path: Path) -> None:
    """Fails if a cast to fp16 leaves scales in float32. With float32 scales, the engine would compute everything in
    float32."""
    src = conv_net(tmp_path / "m.onnx", opset=17)
    made = quantize(src, QuantizeConfig(form="tensorrt"), tmp_path / "q.onnx")
    with pytest.raises(UnsupportedHere, match=r"DequantizeLinear takes float16 from opset 19.*opset=19"):
        cast(made, CastConfig(), tmp_path / "h.onnx")


def test_openvino_form(tmp_path: Path) -> None:
    """Checks that NNCF's graph has the same signature as the source. Also fails if NNCF prints, warns or sends
    telemetry in this process."""
    pytest.importorskip("nncf")
    for make, limit in ((conv_net, 0.05), (attention_net, 0.15)):
        src = make(tmp_path / f"{make.__name__}.onnx")
        config = QuantizeConfig(form="openvino", data=calibration(src, tmp_path / "d.npz"))
        made = run_stage("quantize", src, config, cache=StageCache(tmp_path / "cache"))
        assert made.properties["opset"] == src.properties["opset"]
        assert made.signature == src.signature
        assert error(src, made) < limit


@pytest.mark.parametrize("form", ["ort-cpu", "openvino", "tensorrt"])
def test_kept_nodes_stay_float32(tmp_path: Path, form: str) -> None:
    """Fails if one of the quantization libraries ignores ``keep``."""
    if form == "openvino":
        pytest.importorskip("nncf")
    src = conv_net(tmp_path / "m.onnx")
    config = QuantizeConfig(form=form, data=calibration(src, tmp_path / "d.npz"), keep=("head",))
    made = quantize(src, config, tmp_path / "o.onnx")
    head = next(n for n in read_proto(made.path).graph.node if n.name == "head")
    assert constants(made)[head.input[1]].dtype == np.float32
    assert made.notes["quantized_weights"] == 2


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_calibration_methods(tmp_path: Path, method: str) -> None:
    """Fails if a quantization library rejects a calibration method, or if one outlier in the data determines the whole
    range."""
    src = conv_net(tmp_path / "m.onnx")
    feeds = src.signature.example_inputs(seed=9, batch=16)
    feeds["x"][0, 0, 0, 0] = 1000
    np.savez(tmp_path / "d.npz", **feeds)  # type: ignore[arg-type]
    config = QuantizeConfig(data=tmp_path / "d.npz", calibration=method, percentile=99.9)
    made = quantize(src, config, tmp_path / "o.onnx")
    plain = quantize(src, QuantizeConfig(data=tmp_path / "d.npz"), tmp_path / "p.onnx")
    assert constants(made)["x_scale"] < 0.2 * constants(plain)["x_scale"]
    assert error(src, made) < error(src, plain)


@pytest.mark.proof
def test_the_least_squared_error(tmp_path: Path) -> None:
    """Checks that the scale in the quantized model is the mse method's range divided by 255. On heavy-tailed inputs,
    the mse method gives a smaller range than minmax."""
    src = conv_net(tmp_path / "m.onnx")
    feeds = src.signature.example_inputs(seed=9, batch=64)
    feeds["x"] = np.random.default_rng(3).standard_t(3, feeds["x"].shape).astype(np.float32)
    np.savez(tmp_path / "d.npz", **feeds)  # type: ignore[arg-type]
    histogram = Histogram()
    histogram.add(feeds["x"])
    low, high = value_range(histogram, "mse")
    scales = {}
    for method in ("mse", "minmax"):
        config = QuantizeConfig(data=tmp_path / "d.npz", calibration=method)
        made = quantize(src, config, tmp_path / f"{method}.onnx")
        scales[method] = float(constants(made)["x_scale"])
    assert scales["mse"] == pytest.approx((high - low) / 255, rel=1e-3)
    assert scales["mse"] < 0.97 * scales["minmax"]


def test_without_data_it_says_so(tmp_path: Path) -> None:
    """Checks that a model calibrated on random inputs gets a warning."""
    made = quantize(attention_net(tmp_path / "m.onnx"), QuantizeConfig(), tmp_path / "o.onnx")
    assert "random inputs" in made.notes["warning"]


def test_data_that_does_not_fit_stops_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if NaN reaches the calibrator, or if a child process starts before the data is checked."""
    src = conv_net(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.full((4, 3, 16, 16), np.nan, np.float32))
    monkeypatch.setattr(module, "run_task", lambda *_: pytest.fail("started"))
    with pytest.raises(BadData, match="NaN"):
        quantize(src, QuantizeConfig(data=tmp_path / "d.npz"), tmp_path / "o.onnx")


def test_what_cannot_be_quantized_says_what_to_do(tmp_path: Path) -> None:
    """Fails if an unknown option or an unsuitable source ends in a traceback from a library."""
    src = conv_net(tmp_path / "m.onnx")
    out = tmp_path / "o.onnx"
    for config, message in (
        (QuantizeConfig(form="gpu"), "ort-cpu or openvino or tensorrt"),
        (QuantizeConfig(form="tensorrt", mode="dynamic"), "mode"),
        (QuantizeConfig(calibration="best"), "minmax or entropy or percentile"),
        (QuantizeConfig(keep=("Nothing*",)), "no node and no operator is called"),
    ):
        with pytest.raises(UnknownName, match=message):
            quantize(src, config, out)
    half = cast(src, CastConfig(), tmp_path / "h.onnx")
    with pytest.raises(UnsupportedHere, match="has the precision fp16; quantize the float32 model, then cast"):
        quantize(half, QuantizeConfig(form="tensorrt"), out)
    made = quantize(src, QuantizeConfig(), tmp_path / "q.onnx")
    with pytest.raises(UnsupportedHere, match="quantized already"):
        quantize(made, QuantizeConfig(), out)
    old = conv_net(tmp_path / "old.onnx", opset=12)
    with pytest.raises(UnsupportedHere, match=r"opset >= 13.*opset=20"):
        quantize(old, QuantizeConfig(), out)
    assert not out.exists()


def environment_of(pid: int) -> list[str]:
    """Returns the environment of a newly started process. Waits first, because /proc shows no environment right after a
    process starts."""
    deadline = time.monotonic() + 20
    while "TMPDIR=" not in (found := Path(f"/proc/{pid}/environ").read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found.split("\0")


@pytest.mark.usefixtures("fresh_interpreters")  # their environment is read from /proc
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a library's temporary files remain after a run, an interrupt or a crash. The libraries write files to
    two places: the working directory and the folder of their input. A killed library leaves files in the system's
    temporary folder."""
    src = conv_net(tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    quantize(src, QuantizeConfig(), tmp_path / "o.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "o.onnx"]
    seen: list[str] = []
    for end, error in ((KeyboardInterrupt(), KeyboardInterrupt), (ChildCrashed("SIGSEGV"), QuantizeFailed)):

        def stopped(self: Child, name: str, *, end: BaseException = end, **_: object) -> None:
            seen.extend(str(p) for p in tmp_path.iterdir() if f"TMPDIR={p}" in environment_of(self.pid))
            raise end

        monkeypatch.setattr(module.Child, "call", stopped)
        with pytest.raises(error):
            quantize(src, QuantizeConfig(), tmp_path / "p.onnx")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "o.onnx"]
    assert len(seen) == 2


@pytest.mark.proof
def test_real_model(minilm: Artifact, minilm_data: Path, tmp_path: Path) -> None:
    """Fails if quantizing MiniLM causes a relative error of 0.12 or more. MiniLM's measured error is 0.06 to 0.08."""
    made = quantize(minilm, QuantizeConfig(form="ort-cpu", data=minilm_data, samples=16), tmp_path / "o.onnx")
    feeds = minilm.signature.example_inputs(seed=3, batch=2, sequence=48)
    with open_session(minilm, "onnxruntime") as reference, open_session(made, "onnxruntime") as candidate:
        wanted, found = reference.run(feeds)["embedding"], candidate.run(feeds)["embedding"]
    assert made.path.stat().st_size < 0.7 * minilm.path.stat().st_size
    needs_vnni()
    assert np.linalg.norm(found - wanted) < 0.12 * np.linalg.norm(wanted)
