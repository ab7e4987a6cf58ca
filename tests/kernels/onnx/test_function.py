"""Proves that ``accel::FusedGemm`` and ``accel::FusedConv2d`` replace the right ONNX patterns, and that their function
bodies are correct.

These tests fail if a function body differs from the float64 reference, or if a pattern is missed. The tests fail if a
pattern is fused although its sum broadcasts, or although another node reads an inner value of the pattern. The tests
also fail if the checker, ONNX Runtime or TensorRT-RTX refuses the result, or if two matches use the same node.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.cache import StageCache
from accel.converters.graph.fuse_kernels import FuseKernelsConfig
from accel.converters.to_tensorrt.kernel_table import parse_layers
from accel.errors import UnsupportedHere
from accel.graph.cost import graph_cost
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.onnx.function import DOMAIN, FusedConv2d, FusedGemm
from accel.kernels.onnx.patterns import fuse_products
from accel.kernels.proof import check
from accel.kernels.proof import host as check_host
from accel.sources.onnx.file import describe_model, open_onnx
from accel.stage import run_stage

RANDOM = np.random.default_rng(0)
Array = npt.NDArray[Any]


def constant(name: str, *shape: int, value: float | None = None) -> onnx.TensorProto:
    array = RANDOM.standard_normal(shape) * 0.2 if value is None else np.full(shape, value)
    return numpy_helper.from_array(array.astype(np.float32), name)


def model(
    text: str,
    constants: list[onnx.TensorProto],
    opset: int = 20,
    ir: int = 10,
    shape: tuple[str | int, ...] = ("batch", 5, 8),
    conv: dict[str, Any] | None = None,
) -> onnx.ModelProto:
    """Returns the model that ``text`` describes in lines such as ``out = Op(in, in)``. The input x and the output y
    have the shape ``shape``. ``conv`` contains the attributes of the Conv nodes."""
    nodes = []
    for line in text.strip().splitlines():
        out, call = (part.strip() for part in line.split("="))
        op, inputs = call.rstrip(")").split("(")
        options = (conv or {}) if op == "Conv" else {}
        nodes.append(helper.make_node(op, [i.strip() for i in inputs.split(",")], [out], **options))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.checker.check_model(made, full_check=True)
    return made


def run(made: onnx.ModelProto, **feeds: Array) -> Array:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


W = [constant("w", 8, 8), constant("w2", 8, 8), constant("b", 8), constant("row", 1, 5, 8)]
NUMBERS = {"r2": 2**0.5, "r": 0.5**0.5, "one": 1.0, "half": 0.5, "three": 3.0, "c": 0.044715, "t": (2 / np.pi) ** 0.5}
NUMBERS |= {"quick": 1.702, "wrong": 0.05}
SCALARS = [constant(name, value=value) for name, value in NUMBERS.items()]
FOUND = {
    "bias": ("p = MatMul(x, w)\ny = Add(b, p)", ["matmul_bias"]),
    "gelu": ("p = MatMul(x, w)\nq = Add(p, b)\ny = Gelu(q)", ["matmul_bias_gelu_erf"]),
    "relu and residual": ("p = MatMul(x, w)\nr0 = Relu(p)\ny = Add(x, r0)", ["matmul_relu_residual"]),
    "silu": ("p = MatMul(x, w)\ns = Sigmoid(p)\ny = Mul(s, p)", ["matmul_silu"]),
    "erf, halved last": (
        "p = MatMul(x, w)\nd = Div(p, r2)\ne = Erf(d)\nf = Add(e, one)\ng = Mul(p, f)\ny = Mul(g, half)",
        ["matmul_gelu_erf"],
    ),
    "erf, halved first": (
        "p = MatMul(x, w)\nh = Mul(p, half)\nd = Mul(p, r)\ne = Erf(d)\nf = Add(one, e)\ny = Mul(h, f)",
        None,
    ),
    "erf, half inside": (
        "p = MatMul(x, w)\nd = Div(p, r2)\ne = Erf(d)\nf = Add(e, one)\ng = Mul(half, f)\ny = Mul(p, g)",
        ["matmul_gelu_erf"],
    ),
    "tanh of a power": (
        "p = MatMul(x, w)\nh = Mul(half, p)\nu = Pow(p, three)\nv = Mul(u, c)\ni = Add(p, v)\nj = Mul(i, t)\n"
        "e = Tanh(j)\nf = Add(e, one)\ny = Mul(h, f)",
        ["matmul_gelu_tanh"],
    ),
    "tanh of a product": (
        "p = MatMul(x, w)\nq = Mul(p, p)\nu = Mul(q, c)\nv = Add(one, u)\ni = Mul(p, t)\nj = Mul(i, v)\n"
        "e = Tanh(j)\nf = Add(one, e)\ng = Mul(p, f)\ny = Mul(g, half)",
        ["matmul_gelu_tanh"],
    ),
    "tanh of something else": (
        "p = MatMul(x, w)\nq = Mul(p, p)\nu = Mul(q, wrong)\nv = Add(one, u)\ni = Mul(p, t)\nj = Mul(i, v)\n"
        "e = Tanh(j)\nf = Add(one, e)\ng = Mul(p, f)\ny = Mul(g, half)",
        [],
    ),
    "silu by exp": ("p = MatMul(x, w)\nn = Neg(p)\ne = Exp(n)\nf = Add(e, one)\ny = Div(p, f)", ["matmul_silu"]),
    "quick gelu": ("p = MatMul(x, w)\ni = Mul(p, quick)\ns = Sigmoid(i)\ny = Mul(s, p)", []),
    "gelu whose inside is used": (
        "p = MatMul(x, w)\nd = Div(p, r2)\ne = Erf(d)\nf = Add(e, one)\ng = Mul(p, f)\nh = Mul(g, half)\ny = Add(h, e)",
        [],
    ),
    "a sum of two products": (
        "p = MatMul(x, w)\nq = MatMul(x, w2)\nr0 = Relu(q)\ny = Add(p, r0)",
        ["matmul_relu", "matmul_residual"],
    ),
    "a sum that broadcasts": ("p = MatMul(x, w)\nq = Add(p, b)\ny = Add(q, row)", ["matmul_bias"]),
    "a computed sum that broadcasts": (
        "p = MatMul(x, w)\nq = Add(p, b)\ns = Softmax(row)\ny = Add(q, s)",
        ["matmul_bias"],
    ),
    "a value used twice": ("p = MatMul(x, w)\nq = Add(p, b)\nr0 = Relu(q)\ny = Add(q, r0)", ["matmul_bias"]),
    "nothing": ("p = MatMul(x, w)\ny = Softmax(p)", []),
}


# The operator Gelu begins with opset 20.
@pytest.mark.parametrize(
    ("opset", "case"),
    [(opset, case) for opset in (17, 20) for case in FOUND if opset == 20 or "Gelu" not in FOUND[case][0]],
)
def test_patterns(case: str, opset: int) -> None:
    """Checks that each pattern is fused as expected, and that the output changes by at most 1e-5 of its largest
    element. The bound covers a few fp32 roundings, because the order of the sums may change."""
    text, wanted = FOUND[case]
    before = model(text, [*W, *SCALARS], opset)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    names = [name.removeprefix("FusedGemm_").removesuffix("_fp32") for name in fuse_products(after)]
    assert sorted(names) == (wanted if wanted is not None else ["matmul_gelu_erf"])
    onnx.checker.check_model(after, full_check=True)
    x = RANDOM.standard_normal((3, 5, 8)).astype(np.float32)
    right = run(before, x=x)
    np.testing.assert_allclose(run(after, x=x), right, rtol=0, atol=1e-5 * np.abs(right).max())
    assert fuse_products(after) == [], "a second run finds nothing"
    flops = [
        sum(node.flops or 0 for node in graph_cost(made, describe_model(made)[0]).nodes if node.product)
        for made in (before, after)
    ]
    assert flops[0] == flops[1] > 0, "accel inspect counts what is in the operators"
    read = {name for node in after.graph.node for name in node.input}
    assert not names or {tensor.name for tensor in after.graph.initializer} <= read, "what nobody reads is gone"


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("product", ["matmul", "gemm_nn", "gemm_nt"])
@pytest.mark.parametrize("opset", [17, 20])
def test_the_body_is_the_reference(act: str, product: str, opset: int) -> None:
    """Fails if a function body differs from the float64 reference by more than 2e-6 of the largest element. The bound
    covers eight fp32 roundings of 6e-8 each, and the roundings of one activation."""
    function = FusedGemm(product=product, act=act, bias=True, residual=True, dtype=TensorProto.FLOAT)
    shapes = {"a": (3, 8), "b": (6, 8) if product == "gemm_nt" else (8, 6), "bias": (6,), "residual": (3, 6)}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    node = helper.make_node(function.name, list(shapes), ["y"], domain=DOMAIN)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 6))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "g", inputs, [out])
    made = helper.make_model(graph, opset_imports=opsets, functions=[function.function(opset)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    feeds = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    spec = GemmSpec(m=3, n=6, k=8, epilogue=EpilogueSpec(act=act, bias=True, residual=True, out_dtype="fp32"))
    b = feeds["b"].T if product == "gemm_nt" else feeds["b"]
    right = reference.gemm_numpy(spec, feeds["a"], b, bias=feeds["bias"], residual=feeds["residual"])
    np.testing.assert_allclose(run(made, **feeds), right, rtol=0, atol=2e-6 * np.abs(right).max())
    formals = {n for nodes in function.function(opset).node for n in (*nodes.input, *nodes.output)}
    assert all(name.startswith("accel_FusedGemm_") for name in formals)


def test_check_runs_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ``accel kernels check`` accepts a function body that computes another activation."""
    found = check_host.body_errors()
    assert len(found) == 15
    assert max(found.values()) <= 1
    right = FusedGemm.function
    # opset 17 lacks the Gelu of later opsets
    monkeypatch.setattr(FusedGemm, "function", lambda self, opset: right(self, opset + 3))
    assert check._within("bodies", check_host.body_errors).passed is False
    monkeypatch.setattr(FusedGemm, "function", right)
    monkeypatch.setattr("accel.kernels.onnx.function._Body.activate", lambda _self, _act, x: x)
    assert check._within("bodies", check_host.body_errors).passed is False


CONVS = {
    "relu": ("c = Conv(x, k, kb)\ny = Relu(c)", {}, ["k3x3_s1x1_p1x1_d1x1_bias_relu"]),
    "silu and residual": (
        "c = Conv(x, k)\ns = Sigmoid(c)\nm = Mul(c, s)\ny = Add(m, x)",
        {},
        ["k3x3_s1x1_p1x1_d1x1_silu_residual"],
    ),
    "dilated": (
        "c = Conv(x, k, kb)\ny = Relu(c)",
        {"dilations": [2, 1], "pads": [2, 1, 2, 1]},
        ["k3x3_s1x1_p2x1_d2x1_bias_relu"],
    ),
    "grouped": ("c = Conv(x, kd, kb)\ny = Relu(c)", {"group": 4}, []),
    "padded on one side": ("c = Conv(x, k, kb)\ny = Relu(c)", {"pads": [2, 1, 0, 1]}, []),
    "padded by name": ("c = Conv(x, k, kb)\ny = Relu(c)", {"auto_pad": "SAME_UPPER", "pads": None}, []),
    "bare": ("y = Conv(x, k, kb)", {}, []),
}


@pytest.mark.parametrize("case", CONVS)
@pytest.mark.parametrize("opset", [17, 20])
def test_convolutions(case: str, opset: int) -> None:
    """Checks that each convolution is fused as expected, and that the output changes by at most 1e-5 of its largest
    element. Each output element is a sum of 36 fp32 products."""
    text, attributes, wanted = CONVS[case]
    constants = [constant("k", 4, 4, 3, 3), constant("kd", 4, 1, 3, 3), constant("kb", 4)]
    before = model(text, constants, opset, shape=("batch", 4, 5, 8), conv={"pads": [1, 1, 1, 1], **attributes})
    after = onnx.ModelProto.FromString(before.SerializeToString())
    names = [name.removeprefix("FusedConv2d_").removesuffix("_fp32") for name in fuse_products(after)]
    assert names == wanted
    onnx.checker.check_model(after, full_check=True)
    x = RANDOM.standard_normal((3, 4, 5, 8)).astype(np.float32)
    right = run(before, x=x)
    np.testing.assert_allclose(run(after, x=x), right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_a_strided_convolution_keeps_its_geometry() -> None:
    """Fails if a strided convolution differs from the float64 reference by more than 2e-6 of the largest element. The
    reference takes NHWC images and OHWI weights."""
    function = FusedConv2d(
        kernel=(3, 2),
        stride=(2, 1),
        padding=(1, 0),
        dilation=(1, 2),
        act="silu",
        bias=True,
        residual=True,
        dtype=TensorProto.FLOAT,
    )
    sizes: dict[str, Any] = {"images": 2, "height": 7, "width": 6, "c_in": 3, "c_out": 5}
    epilogue = EpilogueSpec(act="silu", bias=True, residual=True, out_dtype="fp32")
    spec = ConvSpec(
        **sizes, kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), in_dtype="fp32", epilogue=epilogue
    )
    out_shape = (2, 5, spec.out_height, spec.out_width)
    shapes = {"x": (2, 3, 7, 6), "weight": (5, 3, 3, 2), "bias": (5,), "residual": out_shape}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    node = helper.make_node(function.name, list(shapes), ["y"], domain=DOMAIN)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, out_shape)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "g", inputs, [out])
    made = helper.make_model(graph, opset_imports=opsets, functions=[function.function(20)], ir_version=10)
    onnx.checker.check_model(made, full_check=True)
    feeds = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nhwc = {name: feeds[name].transpose(0, 2, 3, 1) for name in ("x", "weight", "residual")}
    right = reference.conv2d_numpy(spec, nhwc["x"], nhwc["weight"], bias=feeds["bias"], residual=nhwc["residual"])
    right = right.transpose(0, 3, 1, 2)
    np.testing.assert_allclose(run(made, **feeds), right, rtol=0, atol=2e-6 * np.abs(right).max())


TWO_LAYERS = "p = MatMul(x, w)\nq = Add(p, b)\ng = Gelu(q)\nm = MatMul(g, w2)\ny = Add(m, x)"


def test_the_stage_is_recorded_and_keeps_the_contract(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(model(TWO_LAYERS, W), file)
    cache = StageCache(tmp_path / "cache")
    src = open_onnx(file, cache=cache)
    made = run_stage("fuse_kernels", src, FuseKernelsConfig(), out=tmp_path / "fused.onnx", cache=cache)
    record = made.history[-1]
    assert record["notes"] == {
        "fused": 2,
        "functions": {"FusedGemm_matmul_bias_gelu_erf_fp32": 1, "FusedGemm_matmul_residual_fp32": 1},
    }
    x = RANDOM.standard_normal((2, 5, 8)).astype(np.float32)
    right = run(onnx.load(file), x=x)
    np.testing.assert_allclose(run(onnx.load(made.path), x=x), right, rtol=0, atol=1e-5 * np.abs(right).max())


def test_a_model_without_functions_is_refused() -> None:
    with pytest.raises(UnsupportedHere, match="export it again"):
        fuse_products(model("p = MatMul(x, w)\ny = Add(p, b)", W, opset=12, ir=7))


def kernels_of(made: onnx.ModelProto, file: Path) -> list[dict[str, Any]]:
    """Builds an engine for sm_86 with TensorRT-RTX and returns the kernels that compute ONNX nodes."""
    onnx.save(made, file)
    script = Path(__file__).with_name("build_engine.py")
    done = subprocess.run([sys.executable, script, file], capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parsed"]
    assert found["errors"] == []
    assert found["bytes"] > 1000
    return [row for row in parse_layers(found["layers"]) if row["onnx"]]


@pytest.mark.proof
def test_tensorrt_rtx_builds_the_fused_model(tmp_path: Path) -> None:
    """Checks that TensorRT-RTX builds the same kernels from the fused model as from the plain model. TensorRT-RTX
    inlines the functions, so that the functions cost no time. The first layer becomes one kernel that computes the
    product, the bias and the GELU. TensorRT-RTX computes the residual of the second layer in a separate kernel."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra [tensorrt-rtx]")
    plain = model(TWO_LAYERS, W)
    made = onnx.ModelProto.FromString(plain.SerializeToString())
    first, second = fuse_products(made)
    rows = kernels_of(made, tmp_path / "fused.onnx")
    sources = [{source.partition(" | ")[0].removeprefix("node_of_accel_") for source in row["onnx"]} for row in rows]
    assert sources == [
        {f"{first}_product", f"{first}_biased", f"{first}_activated"},
        {f"{second}_product"},
        {f"{second}_summed"},
    ]
    assert [row["type"] for row in rows] == ["runtime_fusion", "gemm", "kgen"]
    assert all(row["inputs"] == row["outputs"] == ["float32"] for row in rows)
    without = kernels_of(plain, tmp_path / "plain.onnx")
    assert [(row["type"], len(row["onnx"])) for row in without] == [(row["type"], len(row["onnx"])) for row in rows]
