"""Proves that the C++ operators for ONNX Runtime match the reference and the function bodies.

These tests fail if a name from ``accel.kernels.onnx.function`` has no operator, or if an operator differs from the
float64 reference. The tests fail if ONNX Runtime inlines a function body although the library has the operator. The
tests also fail if operands with wrong shapes give numbers instead of an error, or if a wrong operator passes the gate
of ``accel optimize``.

The tests need ONNX Runtime's headers, which its wheels lack. Set $ACCEL_ONNXRUNTIME_INCLUDE to the folder of the
headers.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.converters.graph.fuse_kernels import FuseKernelsConfig
from accel.errors import GateFailed
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ACTS
from accel.kernels.native import bridges
from accel.kernels.native.bridges import build_for_onnxruntime
from accel.kernels.onnx.function import DOMAIN, DTYPES, OPERANDS, PRODUCTS, FusedGemm, QuantizeRowwise
from accel.proof.gates import OutputGate
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from accel.tables.limits import STAGE_LIMITS
from tests.kernels.native.onnxruntime_models import (
    CHANNELS,
    FILTERS,
    GEOMETRIES,
    HEIGHT,
    IMAGES,
    INCLUDE,
    OPSETS,
    TORCH,
    WIDTH,
    K,
    N,
    convolution,
    feeds,
    model,
    options,
    right,
    right_convolution,
    session,
)


@pytest.mark.proof
def test_every_operator_is_the_reference(onnxruntime_library: Path) -> None:
    """Compares 180 operators with the float64 reference, on operands that are rounded to the operator's dtype. One
    model without function bodies contains all operators. The bound is half a unit in the last place of the result, plus
    1e-5 for fp32 sums."""
    flags = itertools.product(PRODUCTS, ACTS, (False, True), (False, True), DTYPES)
    functions = [FusedGemm(product=p, act=act, bias=b, residual=r, dtype=d) for p, act, b, r, d in flags]
    made = model(functions, bodies=False)
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(made, options(None))
    given = feeds()
    found = dict(
        zip((f.name for f in functions), session(made, options(onnxruntime_library)).run(None, given), strict=True)
    )
    for function in functions:
        right(function, found[function.name])


@pytest.mark.proof
def test_products_with_scales_and_of_small_types_are_the_reference(onnxruntime_library: Path) -> None:
    """Fails if one of 660 products differs from the reference. PyTorch's exporter writes these products for W8A8 and
    fp8. The products have row scales, column scales, int8 operands or fp8 operands. The sums of int8 products are
    exact."""
    pairs = [(None, row, col) for row, col in itertools.product((False, True), repeat=2) if row or col]
    pairs += itertools.product((TensorProto.INT8, TensorProto.FLOAT8E4M3FN), (False, True), (False, True))
    functions = [
        FusedGemm(
            product="gemm_nn", act=act, bias=b, residual=r, dtype=d, operand=operand, row_scale=row, col_scale=col
        )
        for (operand, row, col), act, b, r, d in itertools.product(pairs, ACTS, (False, True), (False, True), DTYPES)
    ]
    assert len(functions) == 660
    results = session(model(functions, bodies=False), options(onnxruntime_library)).run(None, feeds())
    for function, got in zip(functions, results, strict=True):
        right(function, got)


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.FLOAT8E4M3FN])
@pytest.mark.parametrize("source", DTYPES)
def test_rows_are_quantized_as_the_reference_does(source: int, dtype: int, onnxruntime_library: Path) -> None:
    """Fails if a quantized value differs from the reference, even in a row of zeros, a row with a NaN or a row of
    subnormal numbers."""
    function = QuantizeRowwise(source=source, dtype=dtype)
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=source),
        helper.make_node(function.name, ["narrow"], ["q", "scales"], domain=DOMAIN),
        helper.make_node("Cast", ["q"], ["values"], to=TensorProto.FLOAT),
    ]
    float_ = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", float_, [6, 37])]
    outputs = [helper.make_tensor_value_info(name, float_, None) for name in ("values", "scales")]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    x = np.random.default_rng(0).standard_normal((6, 37)).astype(np.float32) * 30
    x[1], x[2, 7], x[3] = 0, np.nan, 1e-40
    made = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    values, scales = session(made, options(onnxruntime_library)).run(None, {"x": x})
    q, scale = reference.quantize_rowwise_torch(torch.from_numpy(x).to(TORCH[source]), OPERANDS[dtype])
    np.testing.assert_array_equal(values, q.float().numpy())  # NaNs count as equal
    np.testing.assert_array_equal(scales, scale.numpy())


@pytest.mark.proof
def test_the_operator_is_taken_and_equals_its_body(onnxruntime_library: Path, tmp_path: Path) -> None:
    """Checks that ONNX Runtime runs the operator, and that the operator's result matches the result of the function
    body. The bound for a product and a convolution in fp32 is 1e-5 of the largest element, because the operator and the
    function body sum in different orders."""
    product = FusedGemm(product="matmul", act="gelu_erf", bias=True, residual=True, dtype=TensorProto.FLOAT)
    conv = convolution(residual=True)
    made = model([product, conv], bodies=True)
    optimized = {}
    results = {}
    for name, given in (("inlined", options(None)), ("operator", options(onnxruntime_library, conv))):
        given.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        results[name] = session(made, given).run(None, feeds())
        optimized[name] = {node.op_type for node in onnx.load(tmp_path / f"{name}.onnx").graph.node}
    assert not {product.name, conv.name} & optimized["inlined"]
    assert {product.name, conv.name} <= optimized["operator"]
    for inlined, taken in zip(results["inlined"], results["operator"], strict=True):
        np.testing.assert_allclose(taken, inlined, rtol=0, atol=1e-5 * float(np.abs(inlined).max()))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nn": [K + 1, N]}, "agree on K"),
        ({"bias": [N + 1]}, "N elements"),
        ({"residual3": [2, 3, 1]}, "shape of the output"),
        ({"nn": [2, K, N]}, "b has to be a matrix"),
    ],
)
def test_operands_that_do_not_fit_are_an_error(
    onnxruntime_library: Path, wrong: dict[str, list[int]], message: str
) -> None:
    function = FusedGemm(product="matmul", act="none", bias=True, residual=True, dtype=TensorProto.FLOAT)
    made = model([function], bodies=False)
    for value in made.graph.input:
        value.type.tensor_type.ClearField("shape")
    given = feeds() | {name: np.zeros(shape, np.float32) for name, shape in wrong.items()}
    with pytest.raises(Exception, match=message):
        session(made, options(onnxruntime_library)).run(None, given)


@pytest.mark.proof
def test_every_convolution_is_the_reference(onnxruntime_library: Path) -> None:
    """Compares 240 convolutions without function bodies with the float64 reference. The convolutions cover every
    epilogue and dtype, with a stride, padding and dilation that differ between height and width. The bound is half a
    unit in the last place of the result, plus 1e-5 for fp32 sums."""
    flags = itertools.product(range(len(GEOMETRIES)), ACTS, (False, True), (False, True), DTYPES)
    functions = [convolution(at, act=act, bias=b, residual=r, dtype=d) for at, act, b, r, d in flags]
    made = model(functions, bodies=False)
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(made, options(onnxruntime_library))  # the session options don't list the convolutions
    given = feeds()
    for function, got in zip(
        functions, session(made, options(onnxruntime_library, *functions)).run(None, given), strict=True
    ):
        right_convolution(function, got)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight3x2": [FILTERS, CHANNELS + 1, 3, 2]}, "agree on the channels"),
        ({"weight3x2": [FILTERS, CHANNELS, 3, 3]}, "another kernel than the name says"),
        ({"image": [IMAGES, CHANNELS, HEIGHT, 2]}, "larger than the padded image"),
        ({"image": [CHANNELS, HEIGHT, WIDTH]}, "four axes"),
        ({"filters": [1]}, "an element a channel"),
        ({"sum4x4": [IMAGES, FILTERS, 4, 1]}, "shape of the output"),
    ],
)
def test_a_convolution_of_what_does_not_fit_is_an_error(
    onnxruntime_library: Path, wrong: dict[str, list[int]], message: str
) -> None:
    function = convolution(residual=True)
    made = model([function], bodies=False)
    for value in made.graph.input:
        value.type.tensor_type.ClearField("shape")
    given = feeds() | {name: np.zeros(shape, np.float32) for name, shape in wrong.items()}
    with pytest.raises(Exception, match=message):
        session(made, options(onnxruntime_library, function)).run(None, given)


@pytest.mark.proof
@pytest.mark.parametrize(
    "name", ["FusedConv2d_k3x3_s0x1_p0x0_d1x1_fp32", "FusedConv2d_mine", "FusedConv2d_" + "k" * 900]
)
def test_a_name_that_is_no_convolution_is_passed_over(onnxruntime_library: Path, name: str) -> None:
    """Checks that the library ignores an operator whose name doesn't describe a valid convolution. ONNX Runtime has to
    run the function body of an ignored operator."""
    made = model([convolution()], bodies=True)
    node = next(node for node in made.graph.node if node.domain == DOMAIN)
    node.op_type = made.functions[0].name = name
    given = options(None)
    given.add_session_config_entry("custom_op.FusedConv2d.0", name)
    given.register_custom_ops_library(str(onnxruntime_library))
    right_convolution(convolution(), session(made, given).run(None, feeds())[0])


@pytest.mark.proof
def test_a_wrong_operator_does_not_pass_the_gate(
    onnxruntime_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the gate of ``accel optimize --kernels`` accepts a wrong operator. One library computes the fused
    convolution correctly, and another library ignores the stride."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))

    def fuse(operators: Path, seed: int) -> Artifact:
        # Each call draws new weights, because accel caches the outputs of a model in the process.
        weight = np.random.default_rng(seed).standard_normal((4, 3, 3, 3)).astype(np.float32)
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 1], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"]),
        ]
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
            for name, shape in (("x", [3, 8, 8]), ("y", [4, 4, 8]))
        ]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [onnx.numpy_helper.from_array(weight, "w")])
        onnx.save(helper.make_model(graph, opset_imports=OPSETS[:1], ir_version=10), tmp_path / "conv.onnx")
        monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(operators))
        gates = [OutputGate(limit=STAGE_LIMITS["simplify"])]
        src = open_onnx(tmp_path / "conv.onnx", probe=False)
        return run_stage("fuse_kernels", src, FuseKernelsConfig(), gates=gates, out=tmp_path / f"{seed}.onnx")

    made = fuse(onnxruntime_library, 0)
    assert [node.op_type for node in onnx.load(made.path).graph.node] == ["FusedConv2d_k3x3_s2x1_p1x1_d1x1_relu_fp32"]
    for folder in ("plugins", "csrc", "cpu/csrc"):
        shutil.copytree(bridges.PLUGINS.parent / folder, tmp_path / folder)
    source = tmp_path / "plugins" / "onnxruntime_conv2d.h"
    text = source.read_text()
    assert "oh * spec.stride[0]" in text
    source.write_text(text.replace("oh * spec.stride[0]", "oh"))
    monkeypatch.setattr(bridges, "PLUGINS", tmp_path / "plugins")
    planted = build_for_onnxruntime(Path(INCLUDE), cache=tmp_path / "bridge").path
    with pytest.raises(GateFailed):
        fuse(planted, 1)
