"""Proves with a stand-in for TensorRT that ``engine_from_onnx`` and the session use accel's operators as plugins.

TensorRT's versions differ in how the parser chooses plugins, and the stand-in can imitate each version. The tests check
that an existing plugin is used, and that an operator without a plugin keeps its function body. The tests also check
that the manifest describes the engine, and that a warning names each operator without a plugin. The tests also fail if
an engine is loaded before its plugins, or if plugins are loaded from a path in a manifest.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig, check_engine, engine_from_onnx
from accel.converters.to_tensorrt.plugins import PluginChoice, with_plugins
from accel.errors import BadConfig, MissingExtra, UnsupportedHere
from accel.kernels.catalogue.units import UNITS
from accel.kernels.native import bridges
from accel.kernels.native.bridges import PLUGINS, TENSORRT_LIBRARY, find_tensorrt_plugins
from accel.kernels.native.build import LIBRARY, RECORD, digest_of, sources_digest
from accel.kernels.onnx.patterns import fuse_products
from accel.kernels.tensorrt import quick_plugins as tensorrt_plugin
from accel.kernels.tensorrt.quick_plugins import PluginKernel
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.notes import notes_on_making
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.runtimes.tensorrt import load_plugins, rebuild
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from accel.tables.target import TARGETS
from tests.support.fake_tensorrt import BODY, LIBRARY_PLUGIN, QUICK, RULES, FakeTensorRT, built, kernel, library

MODEL = """<ir_version: 10, opset_import: ["" : 20]>
g (float16[batch, 16] x, float16[batch, 4, 8, 8] image) => (float16[batch, 24] y, float16[batch, 5, 8, 8] z) {
  p = Gemm<transB = 1>(x, w, b)
  q = Relu(p)
  r = MatMul(q, v)
  y = Add(r, c)
  s = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, k)
  z = Relu(s)
}"""
LAYER, PRODUCT = "FusedGemm_gemm_nt_bias_relu_fp16", "FusedGemm_matmul_bias_fp16"
CONV = "FusedConv2d_k3x3_s1x1_p1x1_d1x1_relu_fp16"


@pytest.fixture
def fused(tmp_path: Path) -> Artifact:
    model = onnx.parser.parse_model(MODEL)
    shapes = {"w": (32, 16), "b": (32,), "v": (32, 24), "c": (24,), "k": (5, 4, 3, 3)}
    g = np.random.default_rng(0)
    weights = [numpy_helper.from_array(g.random(shape).astype(np.float16), name) for name, shape in shapes.items()]
    model.graph.initializer.extend(weights)
    assert sorted(fuse_products(model)) == sorted([LAYER, PRODUCT, CONV])
    onnx.save(model, tmp_path / "fused.onnx")
    return open_onnx(tmp_path / "fused.onnx", probe=False)


def test_without_a_library_all_are_quick_plugins(fused: Artifact, trt: FakeTensorRT, tmp_path: Path) -> None:
    layers, made = built(fused, tmp_path)
    assert layers == dict.fromkeys((LAYER, PRODUCT, CONV), QUICK)
    assert made.properties["plugins"] == dict.fromkeys((LAYER, PRODUCT, CONV), "quick plugin")
    assert made.properties["kernels"] is True
    rows = made.history[-1]["notes"]["plugins"]
    assert [(row["operator"], row["nodes"], row["reason"]) for row in rows] == [
        (name, 1, "") for name in sorted((LAYER, PRODUCT, CONV))
    ]
    assert made.history[-1]["notes"]["warnings"] == []
    assert "--kernels" in rebuild(made).split()
    assert onnx.load(fused.path).functions, "the model itself is as it was"


def test_a_plugin_library_comes_first(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, _ = built(fused, tmp_path)
    assert layers[LAYER] == QUICK
    trt.registry.creators.clear()  # outside of tests, each build runs in a separate process
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path, LAYER)))
    layers, made = built(fused, tmp_path)  # the cached engine lacks the library's plugin, so accel builds again
    assert layers == {"FusedGemm": LIBRARY_PLUGIN, CONV: QUICK}
    wanted = {LAYER: "plugin library", PRODUCT: "plugin library", CONV: "quick plugin"}
    assert made.properties["plugins"] == wanted
    assert [tensor.name for tensor in trt.parsed.graph.initializer] == ["w", "b", "v_transposed", "c", "k"]
    assert trt.registry.loaded == [str(tmp_path / "plugins.so")]


def test_rows_that_the_library_has_no_kernel_for_are_not_its(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if accel chooses the plugin library for a product with K = 15. The library's tensor-core kernels load 16
    bytes at a time, so they can't compute a product with K = 15."""
    model = onnx.load(fused.path)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:, :15].copy(), "w"))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 15
    onnx.save(model, fused.path)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path, LAYER)))
    layers, _ = built(open_onnx(fused.path, probe=False), tmp_path)
    assert layers[LAYER] == QUICK


def test_what_has_no_plugin_is_named_and_built_from_its_body(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the build names each operator without a plugin, and uses the operator's function body. Without
    Triton, no operator has a plugin. If a single kernel doesn't compile, only the operator of this kernel lacks a
    plugin."""

    def refuses(function: Any, arch: int) -> PluginKernel:
        if function.name == CONV:
            raise RuntimeError("out of\nregisters")
        return kernel(function, arch)

    monkeypatch.setattr(tensorrt_plugin, "compile_kernel", refuses)
    layers, made = built(fused, tmp_path)
    assert layers == {LAYER: QUICK, PRODUCT: QUICK, CONV: BODY}
    assert made.properties["plugins"][CONV] == "function body"
    (note,) = made.history[-1]["notes"]["warnings"]
    assert note.startswith("1 of 3 fused operators run as TensorRT's own kernels")
    assert note.endswith("RuntimeError: out of registers")
    row = CandidateResult(name="tensorrt fp16", artifact=made)
    assert notes_on_making([row, row, CandidateResult(name="left out")], 1, None) == [f"tensorrt fp16: {note}"]

    def missing(*_: Any) -> PluginKernel:
        raise MissingExtra("Triton", "kernels")

    monkeypatch.setattr(tensorrt_plugin, "compile_kernel", missing)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "another"))
    layers, made = built(fused, tmp_path)
    assert set(layers.values()) == {BODY}
    (note,) = made.history[-1]["notes"]["warnings"]
    assert note.startswith("3 of 3")
    assert note.count("accel-toolchain[kernels]") == 1


@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_library_is_an_error_wherever_it_is_loaded(
    named: bool, fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the build, the check of an engine or the session accepts a damaged plugin library. Also fails if the
    build, the check and the session raise different errors. The test uses a library that ACCEL_TENSORRT_LIBRARY names,
    and a library in the cache."""
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path, LAYER)))
    _, made = built(fused, tmp_path)
    monkeypatch.setattr(trt, "Runtime", lambda _: SimpleNamespace(deserialize_cuda_engine=lambda _: object()))
    trt.registry.creators.clear()
    path = tmp_path / "plugins.so"
    path.write_text("no plugin")
    if not named:
        monkeypatch.delenv("ACCEL_TENSORRT_LIBRARY")
        monkeypatch.setattr(bridges, "find_tensorrt_plugins", lambda _: path)
    wanted = (
        (BadConfig, "ACCEL_TENSORRT_LIBRARY names .*unset the") if named else (UnsupportedHere, "plugins in .* again")
    )
    for load in (
        lambda: built(fused, tmp_path),
        lambda: check_engine(made.path),
        lambda: load_plugins(trt, made, "9.0"),
    ):
        with pytest.raises(wanted[0], match=wanted[1]) as caught:
            load()
        assert "TensorRT refuses it" in str(caught.value)


@pytest.mark.parametrize("trt", RULES[:1], indirect=True)
def test_the_model_is_read_once_in_each_process(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the parent process or the child process reads the model more than once. The parent process has to find
    the model's precision, and the child process has to check the model's nodes."""
    reads: list[str] = []
    whole = onnx.load

    def load(path: str, **options: Any) -> onnx.ModelProto:
        reads.extend([path] if options else [])  # the stand-in's parser calls onnx.load without options
        return whole(path, **options)

    monkeypatch.setattr(onnx, "load", load)
    engine_from_onnx(fused, EngineFromOnnxConfig(toolkit="tensorrt", kernels=True), tmp_path / "made.engine")
    assert reads == [str(fused.path)] * 2


def test_a_convolution_is_the_librarys_where_triton_has_none(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the plugin library computes a convolution without Triton if the number of channels is a multiple of
    eight. Also checks that the node's attributes contain the kernel size, stride, padding and dilation. With Triton, a
    Triton kernel in a "quick" plugin has to compute the convolution."""
    model = onnx.load(fused.path)
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "k")
    weight.CopyFrom(numpy_helper.from_array(np.zeros((8, 8, 3, 3), np.float16), "k"))
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.shape.dim[1].dim_value = 8
    onnx.save(model, tmp_path / "wide.onnx")
    wide = open_onnx(tmp_path / "wide.onnx", probe=False)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path, LAYER, "FusedConv2d")))
    assert built(wide, tmp_path)[0][CONV] == QUICK
    trt.registry.creators.clear()

    def missing(*_: Any) -> PluginKernel:
        raise MissingExtra("Triton", "kernels")

    monkeypatch.setattr(tensorrt_plugin, "compile_kernel", missing)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "another"))
    layers, made = built(wide, tmp_path)
    assert layers == dict.fromkeys(("FusedGemm", "FusedConv2d"), LIBRARY_PLUGIN)
    assert made.properties["plugins"][CONV] == "plugin library"
    trt.registry.creators.clear()
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "a third"))
    assert built(fused, tmp_path)[0][CONV] == BODY, "four channels"

    choice = PluginChoice(operator=CONV, nodes=1, by="plugin library")
    content, path = with_plugins(model, [choice], wide.path, tmp_path)
    assert path == wide.path, "no weight is another"
    parsed = onnx.ModelProto.FromString(content)
    node = next(node for node in parsed.graph.node if node.op_type == "FusedConv2d")
    words = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert (words.pop("plugin_version"), words.pop("plugin_namespace")) == (b"1", b"")
    pairs = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    sizes = {f"{name}_{axis}": size for name, pair in pairs.items() for axis, size in zip("hw", pair, strict=True)}
    assert words == {"act": 1, "bias": 0, "residual": 0, "dtype": 1, **sizes}


def test_without_kernels_nothing_is_registered(fused: Artifact, trt: FakeTensorRT, tmp_path: Path) -> None:
    config = EngineFromOnnxConfig(toolkit="tensorrt")
    made = run_stage("engine_from_onnx", fused, config, out=tmp_path / "made.engine")
    assert trt.registry.creators == set()
    assert set(dict(json.loads(made.path.read_bytes())).values()) == {BODY}
    assert "plugins" not in made.properties
    with pytest.raises(UnsupportedHere, match="tensorrt-rtx can't use accel's plugins"):
        EngineFromOnnxConfig(toolkit="tensorrt-rtx", kernels=True)


def test_only_tensorrt_is_asked_for_plugins(fused: Artifact) -> None:
    request = RecipeRequest(
        targets=(TARGETS["tensorrt"], TARGETS["tensorrt-rtx"]),
        precisions=("fp16",),
        data=None,
        samples=0,
        threads=1,
        kernels=True,
    )
    asked = {
        recipe.target.name: config.kernels
        for recipe in recipes(fused, request)[0]
        for stage, config, _ in recipe.stages
        if stage == "engine_from_onnx"
    }
    assert asked == {"tensorrt": True, "tensorrt-rtx": False}


@pytest.mark.parametrize("trt", RULES[:1], indirect=True)
def test_an_engine_is_loaded_after_its_plugins(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(tmp_path, LAYER)
    engine = Artifact(path=tmp_path / "m.engine", kind="engine", signature=fused.signature)
    load_plugins(trt, engine, "9.0")
    quick = replace(engine, properties={"toolkit": "tensorrt", "plugins": {CONV: "quick plugin"}})
    load_plugins(trt, quick, "9.0")
    assert trt.registry.creators == set(), "such an engine holds its kernels"
    named = {"plugins": {LAYER: "plugin library"}, "plugin_library": str(path), "kernels": True}
    mixed = replace(engine, properties={"toolkit": "tensorrt", **named})
    with pytest.raises(UnsupportedHere, match=r"kernels build --arch native --tensorrt-include DIR, or .*--kernels"):
        load_plugins(trt, mixed, "9.0")
    assert trt.registry.loaded == [], "a manifest may come from anywhere"
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(tmp_path / "gone.so"))
    with pytest.raises(BadConfig, match="it is no such file"):
        load_plugins(trt, mixed, "9.0")
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(path))
    for _ in range(2):  # the second call loads a second engine in the same process
        load_plugins(trt, mixed, "9.0")
    assert trt.registry.loaded == [str(path)]


@pytest.mark.parametrize("trt", RULES[:1], indirect=True)
def test_the_check_of_an_engine_knows_its_plugins(
    fused: Artifact, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ``check_engine`` reports a good engine as corrupt because its plugins aren't loaded or aren't
    installed."""
    path = library(tmp_path, LAYER)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(path))
    _, made = built(fused, tmp_path)

    def deserialized(_: bytes) -> object | None:
        return None if trt.registry.get_creator(LAYER, "1") is None else object()

    monkeypatch.setattr(trt, "Runtime", lambda _: SimpleNamespace(deserialize_cuda_engine=deserialized))
    trt.registry.creators.clear()
    assert check_engine(made.path) is None
    assert trt.registry.loaded == [str(path)] * 2
    trt.registry.creators.clear()
    monkeypatch.delenv("ACCEL_TENSORRT_LIBRARY")
    assert check_engine(made.path) is None


@pytest.mark.gpu
def test_tensorrt_runs_the_plugins(fused: Artifact, tmp_path: Path) -> None:
    """Compares the engine's outputs with the outputs of the function bodies in ONNX Runtime. The outputs may differ by
    four times the fp16 rounding error of the largest value."""
    pytest.importorskip("tensorrt", reason="needs the extra [tensorrt]")
    config = EngineFromOnnxConfig(toolkit="tensorrt", kernels=True)
    made = run_stage("engine_from_onnx", fused, config, out=tmp_path / "made.engine")
    assert "function body" not in made.properties["plugins"].values(), made.history[-1]["notes"]["plugins"]
    with accel.load(made.path) as engine, accel.load(fused.path) as bodies:
        for batch in (1, 2, 5):
            feeds = bodies.example_inputs(batch=batch)
            wanted = bodies.run(feeds)
            for name, got in engine.run(feeds).items():
                limit = 4 * 2.0**-10 * np.abs(wanted[name]).max()
                assert np.abs(got.astype(np.float32) - wanted[name].astype(np.float32)).max() <= limit, name


def test_the_library_is_that_for_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that accel chooses the only suitable plugin library in the cache. A suitable library was built from
    accel's current sources and has tensor-core GEMMs for the GPU."""
    monkeypatch.delenv("ACCEL_TENSORRT_LIBRARY", raising=False)
    assert find_tensorrt_plugins((9, 0), tmp_path) is None
    plugins = digest_of(PLUGINS)

    def put(name: str, arch: str, units: list[str], **changed: str) -> Path:
        for folder, file in ((f"{name}_kernels", LIBRARY), (name, TENSORRT_LIBRARY)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / file).touch()
        kernels = tmp_path / f"{name}_kernels" / LIBRARY
        record = {"archs": [arch], "files": units}
        kernels.with_name(RECORD).write_text(json.dumps(record))
        own = {"sources": sources_digest(), "plugins": plugins, "kernels": str(kernels), "archs": ["host"], **changed}
        (tmp_path / name / RECORD).write_text(json.dumps(own))
        return tmp_path / name / TENSORRT_LIBRARY

    hopper = next(unit.name for unit in UNITS if "sm_90a" in unit.family.archs)
    right = put("right", "sm_90a", [hopper])
    put("another_gpu", "sm_80", [unit.name for unit in UNITS if "sm_80" in unit.family.archs])
    put("no_gemm", "sm_90a", [])
    put("other_sources", "sm_90a", [hopper], sources="0")
    put("other_plugins", "sm_90a", [hopper], plugins="0")
    put("kernels_gone", "sm_90a", [hopper], kernels=str(tmp_path / "gone.so"))
    assert find_tensorrt_plugins((9, 0), tmp_path) == right
    assert find_tensorrt_plugins((12, 1), tmp_path) is None
