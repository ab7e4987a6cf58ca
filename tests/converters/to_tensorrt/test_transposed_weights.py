"""Proves that ``engine_from_onnx`` transposes (K, N) weights so that the plugin library can compute the products.

The tests check that the library computes the matrix products of a transformer. The activations of a transformer have
three dims: batch, length and K. The tests also check that each weight is transposed, and that other nodes still get the
original weight. The tests also fail if the source's file or folder changes. The tests also fail if accel chooses the
plugin library for a product that no kernel of the library can compute. An operator's name contains its options, and the
tests fail if a node's attributes contradict this name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from accel.artifact import Artifact
from accel.converters.to_tensorrt.plugins import PluginChoice, with_plugins
from accel.errors import MissingExtra
from accel.kernels.catalogue.spec import ACTS
from accel.kernels.onnx.export import add_functions
from accel.kernels.onnx.function import FusedGemm
from accel.kernels.onnx.patterns import fuse_products
from accel.kernels.tensorrt import quick_plugins as tensorrt_plugin
from accel.kernels.tensorrt.quick_plugins import PluginKernel
from accel.sources.onnx.file import open_onnx
from tests.support.fake_tensorrt import BODY, LIBRARY_PLUGIN, QUICK, RULES, FakeTensorRT, built, library, with_weights

# The model is a feed-forward block. A second, unfused product uses one of the block's weights.
BLOCK = """<ir_version: 10, opset_import: ["" : 20]>
g (float16[batch, length, 16] x) => (float16[batch, length, 16] y, float16[batch, length, 16] z) {
  p = MatMul(x, u)
  q = Add(p, b)
  r = Gelu(q)
  s = MatMul(r, w)
  t = Add(s, c)
  y = Add(t, x)
  z = MatMul(r, w)
}"""
UP, DOWN = "FusedGemm_matmul_bias_gelu_erf_fp16", "FusedGemm_matmul_bias_residual_fp16"
PRODUCT = "FusedGemm_matmul_bias_fp16"


def block(path: Path, *, shared: bool = False, external: bool = False) -> Artifact:
    model = onnx.parser.parse_model(BLOCK)
    if not shared:
        del model.graph.node[-1], model.graph.output[-1]
    shapes = {"u": (16, 32), "b": (32,), "w": (32, 16), "c": (16,)}
    g = np.random.default_rng(0)
    weights = [numpy_helper.from_array(g.random(shape).astype(np.float16), name) for name, shape in shapes.items()]
    model.graph.initializer.extend(weights)
    assert fuse_products(model) == [UP, DOWN]
    options = {"save_as_external_data": True, "location": "weights", "size_threshold": 0} if external else {}
    onnx.save(model, path, **options)
    return open_onnx(path, probe=False)


def multiplied(model: onnx.ModelProto) -> list[Any]:
    """Returns the outputs of ``model`` for random rows. Replaces each FusedGemm plugin with an ONNX function that
    computes the same product."""
    own = onnx.ModelProto()
    own.CopyFrom(model)
    nodes = []
    for at, node in enumerate(own.graph.node):
        if node.op_type == "FusedGemm":
            words = {attribute.name: attribute.i for attribute in node.attribute}
            assert words["dtype"] == words["out_dtype"] == 1
            flags = {name: bool(words[name]) for name in ("bias", "residual", "row_scale", "col_scale")}
            function = FusedGemm(product="matmul", act=ACTS[words["act"]], dtype=TensorProto.FLOAT16, **flags)
            nodes.append(onnx.helper.make_node("Transpose", [node.input[1]], [f"turned_{at}"], perm=[1, 0]))
            operands = [node.input[0], f"turned_{at}", *node.input[2:]]
            node.CopyFrom(onnx.helper.make_node(function.name, operands, node.output, domain="accel"))
        nodes.append(node)
    made = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del own.graph.node[:]
    own.graph.node.extend(made)
    add_functions(own)
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float16)
    return list(ort.InferenceSession(own.SerializeToString()).run(None, {"x": x}))


@pytest.mark.parametrize("external", [False, True])
def test_a_transformers_products_are_the_librarys(
    external: bool, trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the library computes products of (batch, length, K) activations and (K, N) weights, and that the
    source's file and folder stay the same."""
    source = block(tmp_path / "block.onnx", external=external)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path)))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    (tmp_path / "made").mkdir()
    layers, made = built(source, tmp_path / "made")
    assert layers == {"FusedGemm": LIBRARY_PLUGIN}
    assert made.properties["plugins"] == {UP: "plugin library", DOWN: "plugin library"}
    assert [row["nodes"] for row in made.history[-1]["notes"]["plugins"]] == [1, 1]
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert not [path for path in (tmp_path / "made").iterdir() if path.is_dir()]
    assert {tensor.name: tuple(tensor.dims) for tensor in trt.parsed.graph.initializer} == {
        "u_transposed": (32, 16), "b": (32,), "w_transposed": (16, 32), "c": (16,)
    }  # fmt: skip
    for got, wanted in zip(multiplied(trt.parsed), multiplied(onnx.load(source.path)), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("trt", RULES[:1], indirect=True)
def test_a_weight_that_another_node_uses_stays_for_that(
    trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a node that needs the original weight gets the transposed weight. Also fails if two products with the
    same weight make two transposed copies."""
    source = block(tmp_path / "block.onnx", shared=True)
    model = onnx.load(source.path)
    again = onnx.helper.make_node(DOWN, ["r", "w", "c", "y"], ["again"], domain="accel")
    model.graph.node.append(again)
    model.graph.output[0].name = "again"
    onnx.save(model, source.path)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path)))
    built(open_onnx(source.path, probe=False), tmp_path)
    names = [tensor.name for tensor in trt.parsed.graph.initializer]
    assert sorted(names) == ["b", "c", "u_transposed", "w", "w_transposed"]
    (other,) = (node for node in trt.parsed.graph.node if node.op_type == "MatMul")
    assert other.input[1] == "w"
    for got, wanted in zip(multiplied(trt.parsed), multiplied(model), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_what_the_library_cant_have_of_an_operator_stays_with_triton(
    trt: FakeTensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the library computes a product with sixteen columns. The library must not compute a product with
    twelve columns, or a product whose weight isn't a constant. Without Triton, a product that the library can't compute
    has to run as a function body."""
    source = block(tmp_path / "block.onnx")
    model = onnx.load(source.path)
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["u"], ["computed"]))
    model.graph.node[1].input[1] = "computed"
    weights = [("narrow", np.ones((16, 12), np.float16)), ("bias", np.ones(12, np.float16))]
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights)
    for name, operands in (("head", ("y", "narrow", "bias")), ("tail", ("y", "w2", "c"))):
        model.graph.node.append(onnx.helper.make_node(PRODUCT, operands, [name], domain="accel"))
        size = 12 if name == "head" else 16
        shape = ["batch", "length", size]
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16), np.float16), "w2"))
    add_functions(model)
    onnx.save(model, source.path)
    source = open_onnx(source.path, probe=False)
    monkeypatch.setenv("ACCEL_TENSORRT_LIBRARY", str(library(tmp_path)))
    _, made = built(source, tmp_path)
    pairs = [("Identity", "operator"), (UP, QUICK), ("FusedGemm", LIBRARY_PLUGIN), (PRODUCT, QUICK)]
    assert [tuple(row) for row in json.loads(made.path.read_bytes())] == [*pairs, pairs[2]]
    rows = made.history[-1]["notes"]["plugins"]
    assert [(row["operator"], row["nodes"], row["by"]) for row in rows] == [
        (PRODUCT, 1, "quick plugin"),
        (PRODUCT, 1, "plugin library"),
        (UP, 1, "quick plugin"),
        (DOWN, 1, "plugin library"),
    ]
    assert made.properties["plugins"][PRODUCT] == "plugin library", "the engine needs it"

    def missing(*_: Any) -> PluginKernel:
        raise MissingExtra("Triton", "kernels")

    trt.registry.creators.clear()
    monkeypatch.setattr(tensorrt_plugin, "compile_kernel", missing)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "another"))
    _, made = built(source, tmp_path)
    taken = [(name, BODY if by == QUICK else by) for name, by in pairs]
    assert [tuple(row) for row in json.loads(made.path.read_bytes())] == [*taken, taken[2]]
    assert made.history[-1]["notes"]["warnings"][0].startswith("2 of 4 fused operators")


@pytest.mark.parametrize(
    "dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.FLOAT8E4M3FN]
)
@pytest.mark.parametrize("raw", [True, False])
def test_a_weight_of_every_dtype_is_transposed(raw: bool, dtype: int, tmp_path: Path) -> None:
    """Checks that each weight is transposed, whether ONNX stores the weight in ``raw_data`` or in a typed field. Also
    checks that the node's attributes describe the product's scales and dtypes."""
    values = np.random.default_rng(0).integers(-100, 100, (32, 16)).astype(np.float32)
    tensor = onnx.helper.make_tensor("w", dtype, values.shape, values.reshape(-1).tolist())
    exact = numpy_helper.to_array(tensor)
    tensor = numpy_helper.from_array(exact, "w") if raw else tensor
    assert bool(tensor.raw_data) is raw
    scaled = dtype in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)
    out = TensorProto.BFLOAT16 if scaled else dtype
    function = FusedGemm(
        product="gemm_nn",
        act="silu",
        bias=False,
        residual=False,
        dtype=out,
        operand=dtype,
        row_scale=scaled,
        col_scale=scaled,
    )
    operands = ["a", "w", *["rows", "columns"] * scaled]
    node = onnx.helper.make_node(function.name, operands, ["y"], domain="accel")
    graph = onnx.helper.make_graph([node], "g", [], [], [tensor])
    choice = PluginChoice(operator=function.name, nodes=1, by="plugin library")
    content, path = with_plugins(onnx.helper.make_model(graph), [choice], tmp_path / "m.onnx", tmp_path)
    parsed = with_weights(content, path).graph
    (turned,) = parsed.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(turned).astype(np.float32), exact.T.astype(np.float32))
    words = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in parsed.node[0].attribute}
    assert (words.pop("plugin_version"), words.pop("plugin_namespace")) == (b"1", b"")
    number = {TensorProto.FLOAT16: 1, TensorProto.BFLOAT16: 2, TensorProto.INT8: 3, TensorProto.FLOAT8E4M3FN: 4}
    flags = {"bias": 0, "residual": 0, "row_scale": int(scaled), "col_scale": int(scaled)}
    assert words == {"act": 4, **flags, "dtype": number[dtype], "out_dtype": number[out]}
