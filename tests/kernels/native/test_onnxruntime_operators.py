"""Proves that the C++ operators build against ONNX Runtime's headers, load, and match the reference and the bodies.

These tests fail if a name from ``accel.kernels.onnx.function`` has no operator, if an operator differs from the float64
reference, or if ONNX Runtime inlines the body of an existing operator. The tests fail if operands with wrong shapes
give numbers instead of an error, or if a wrong operator passes the gate of ``accel optimize``. The tests also fail if
the error for missing headers takes more than one line.

ONNX Runtime's wheels lack the headers. Set $ACCEL_ONNXRUNTIME_INCLUDE to the folder of the headers.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper

from accel.artifact import Artifact
from accel.cli.kernels import command
from accel.converters.graph.fuse_kernels import FuseKernelsConfig
from accel.errors import AccelError, BadConfig, GateFailed, UnsupportedHere
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.native import bridges
from accel.kernels.native.bridges import build_for_onnxruntime
from accel.kernels.onnx.function import DOMAIN, DTYPES, OPERANDS, PRODUCTS, FusedConv2d, FusedGemm, QuantizeRowwise
from accel.proof.gates import OutputGate
from accel.runtimes.base import SessionOptions
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from accel.signature import Signature, TensorSpec
from accel.sources.onnx.file import open_onnx
from accel.stage import run_stage
from accel.tables.limits import STAGE_LIMITS

INCLUDE = os.environ.get("ACCEL_ONNXRUNTIME_INCLUDE", "")
M, N, K = 6, 5, 7
IMAGES, CHANNELS, HEIGHT, WIDTH, FILTERS = 2, 3, 7, 6, 4
# Each row has the kernel, stride, padding and dilation of a convolution.
GEOMETRIES = (
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 5), (3, 2), (2, 4), (2, 1)),
)
SHAPES = {
    "a": [M, K],
    "a3": [2, 3, K],
    "nn": [K, N],
    "nt": [N, K],
    "bias": [N],
    "residual": [M, N],
    "residual3": [2, 3, N],
    "row": [M],
    "col": [N],
    "whole_a": [M, K],
    "whole_b": [K, N],
    "image": [IMAGES, CHANNELS, HEIGHT, WIDTH],
    "filters": [FILTERS],
}
TORCH = {dtype: reference.TORCH_DTYPES[text] for dtype, text in OPERANDS.items()}
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]


def convolution(geometry: int = 0, **epilogue: Any) -> FusedConv2d:
    given = {"act": "relu", "bias": True, "residual": False, "dtype": TensorProto.FLOAT, **epilogue}
    return FusedConv2d(
        **dict(zip(("kernel", "stride", "padding", "dilation"), GEOMETRIES[geometry], strict=True)), **given
    )


def spec_of(function: FusedConv2d) -> ConvSpec:
    epilogue = EpilogueSpec(
        act=function.act, bias=function.bias, residual=function.residual, out_dtype=DTYPES[function.dtype]
    )
    return ConvSpec(
        images=IMAGES,
        height=HEIGHT,
        width=WIDTH,
        c_in=CHANNELS,
        c_out=FILTERS,
        kernel=function.kernel,
        stride=function.stride,
        padding=function.padding,
        dilation=function.dilation,
        in_dtype=DTYPES[function.dtype],
        epilogue=epilogue,
    )


def conv_inputs(function: FusedConv2d) -> dict[str, list[int]]:
    """Returns the shapes of the inputs by name."""
    spec = spec_of(function)
    kernel, out = function.kernel, (spec.out_height, spec.out_width)
    found = {"image": SHAPES["image"], f"weight{kernel[0]}x{kernel[1]}": [FILTERS, CHANNELS, *kernel]}
    found |= {"filters": [FILTERS]} if function.bias else {}
    return found | ({f"sum{out[0]}x{out[1]}": [IMAGES, FILTERS, *out]} if function.residual else {})


for _geometry in range(len(GEOMETRIES)):
    SHAPES |= conv_inputs(convolution(_geometry, residual=True))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not INCLUDE or shutil.which("g++") is None:
        pytest.skip("needs g++ and ONNX Runtime's headers in $ACCEL_ONNXRUNTIME_INCLUDE")
    return build_for_onnxruntime(Path(INCLUDE), cache=tmp_path_factory.mktemp("bridge")).path


def options(library: Path | None, *convolutions: FusedConv2d) -> ort.SessionOptions:
    made = ort.SessionOptions()
    for at, function in enumerate(convolutions):
        made.add_session_config_entry(f"custom_op.FusedConv2d.{at}", function.name)
    if library is not None:
        made.register_custom_ops_library(str(library))
    return made


def session(made: onnx.ModelProto, given: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(made.SerializeToString(), given, providers=["CPUExecutionProvider"])


def inputs_of(function: FusedGemm | FusedConv2d) -> list[str]:
    if isinstance(function, FusedConv2d):
        return list(conv_inputs(function))
    wide = "3" if function.product == "matmul" else ""
    names = [f"a{wide}", "nt" if function.product == "gemm_nt" else "nn"]
    if function.operand == TensorProto.INT8:
        names = ["whole_a", "whole_b"]
    scales = [*["row"] * function.row_scale, *["col"] * function.col_scale]
    return [*names, *["bias"] * function.bias, *scales, *[f"residual{wide}"] * function.residual]


def model(functions: Sequence[FusedGemm | FusedConv2d], *, bodies: bool) -> onnx.ModelProto:
    """Returns a model that calls each function once on the same fp32 inputs. The model casts the inputs to each
    function's dtypes, and the outputs to fp32."""
    nodes = []
    taken = {function.name: list(zip(inputs_of(function), function.dtypes, strict=True)) for function in functions}
    for name, dtype in sorted(set(itertools.chain.from_iterable(taken.values()))):
        nodes.append(helper.make_node("Cast", [name], [f"{name}_{dtype}"], to=dtype))
    for function in functions:
        given = [f"{name}_{dtype}" for name, dtype in taken[function.name]]
        nodes.append(helper.make_node(function.name, given, [f"{function.name}_out"], domain=DOMAIN))
        nodes.append(helper.make_node("Cast", [f"{function.name}_out"], [function.name], to=TensorProto.FLOAT))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in SHAPES.items()]
    outputs = [helper.make_tensor_value_info(f.name, TensorProto.FLOAT, None) for f in functions]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    extra = [function.function(20) for function in functions] if bodies else []
    return helper.make_model(graph, opset_imports=OPSETS, functions=extra, ir_version=10)


def feeds() -> dict[str, np.ndarray[Any, Any]]:
    g = np.random.default_rng(0)
    made = {name: g.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    made |= {name: 0.01 * made[name] for name in ("row", "col")}
    made |= {name: 0.2 * made[name] for name in made if name.startswith("weight")}
    made |= {name: np.rint(40 * made[name]).clip(-128, 127) for name in ("whole_a", "whole_b")}
    return made | {"a3": made["a"].reshape(SHAPES["a3"]), "residual3": made["residual"].reshape(SHAPES["residual3"])}


@pytest.mark.proof
def test_every_operator_is_the_reference(library: Path) -> None:
    """Fails if one of 180 operators, in one graph without bodies, differs from float64 on operands rounded to the
    dtype. The bound is half a unit in the last place of the result, plus 1e-5 for fp32 sums."""
    flags = itertools.product(PRODUCTS, ACTS, (False, True), (False, True), DTYPES)
    functions = [FusedGemm(product=p, act=act, bias=b, residual=r, dtype=d) for p, act, b, r, d in flags]
    made = model(functions, bodies=False)
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(made, options(None))
    given = feeds()
    found = dict(zip((f.name for f in functions), session(made, options(library)).run(None, given), strict=True))
    for function in functions:
        right(function, found[function.name])


def right(function: FusedGemm, got: np.ndarray[Any, Any]) -> None:
    """Checks that the error is at most half a unit in the last place of the output's dtype, plus 1e-5 for fp32 sums."""
    rounded = {
        name.rstrip("3"): torch.from_numpy(feeds()[name]).to(TORCH[dtype]).double().numpy()
        for name, dtype in zip(inputs_of(function), function.dtypes, strict=True)
    }
    dtype = DTYPES[function.dtype]
    operands = {"bias": "bias", "residual": "residual", "row_scale": "row", "col_scale": "col"}
    there = {flag: name for flag, name in operands.items() if getattr(function, flag)}
    epilogue = EpilogueSpec(act=function.act, out_dtype=dtype, **dict.fromkeys(there, True))
    operand = OPERANDS[function.operand or function.dtype]
    spec = GemmSpec(m=M, n=N, k=K, in_dtype=operand, epilogue=epilogue)
    a, b = list(rounded.values())[:2]
    a, b = a.reshape(M, K), b.T if function.product == "gemm_nt" else b
    wanted = reference.gemm_numpy(
        spec, a, b, **{flag: rounded[name].reshape(SHAPES[name]) for flag, name in there.items()}
    )
    assert got.shape == ((2, 3, N) if function.product == "matmul" else (M, N))
    relative, step = reference.ROUNDING[dtype]
    limit = relative * np.abs(wanted) + step + 1e-5
    assert np.all(np.abs(got.reshape(M, N) - wanted) <= limit), function.name


@pytest.mark.proof
def test_products_with_scales_and_of_small_types_are_the_reference(library: Path) -> None:
    """Fails if one of 660 products differs from the reference. torch's export writes these products for W8A8 and fp8,
    with row and column scales, int8 operands (exact sums) or fp8 operands."""
    pairs = [(None, row, col) for row, col in itertools.product((False, True), repeat=2) if row or col]
    pairs += itertools.product((TensorProto.INT8, TensorProto.FLOAT8E4M3FN), (False, True), (False, True))
    functions = [
        FusedGemm(
            product="gemm_nn", act=act, bias=b, residual=r, dtype=d, operand=operand, row_scale=row, col_scale=col
        )
        for (operand, row, col), act, b, r, d in itertools.product(pairs, ACTS, (False, True), (False, True), DTYPES)
    ]
    assert len(functions) == 660
    results = session(model(functions, bodies=False), options(library)).run(None, feeds())
    for function, got in zip(functions, results, strict=True):
        right(function, got)


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [TensorProto.INT8, TensorProto.FLOAT8E4M3FN])
@pytest.mark.parametrize("source", DTYPES)
def test_rows_are_quantized_as_the_reference_does(source: int, dtype: int, library: Path) -> None:
    """Fails if a quantized value differs at all, even in a row of zeros, a row with a NaN or a row of subnormal
    numbers."""
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
    values, scales = session(made, options(library)).run(None, {"x": x})
    q, scale = reference.quantize_rowwise_torch(torch.from_numpy(x).to(TORCH[source]), OPERANDS[dtype])
    np.testing.assert_array_equal(values, q.float().numpy())  # NaNs count as equal
    np.testing.assert_array_equal(scales, scale.numpy())


@pytest.mark.proof
def test_the_operator_is_taken_and_equals_its_body(library: Path, tmp_path: Path) -> None:
    """Fails if ONNX Runtime doesn't run the operator, or if the operator's result differs from the body's. The bound
    for a product and a convolution in fp32 is 1e-5 of the largest element, which covers the same few roundings in
    another order."""
    product = FusedGemm(product="matmul", act="gelu_erf", bias=True, residual=True, dtype=TensorProto.FLOAT)
    conv = convolution(residual=True)
    made = model([product, conv], bodies=True)
    optimized = {}
    results = {}
    for name, given in (("inlined", options(None)), ("operator", options(library, conv))):
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
def test_operands_that_do_not_fit_are_an_error(library: Path, wrong: dict[str, list[int]], message: str) -> None:
    function = FusedGemm(product="matmul", act="none", bias=True, residual=True, dtype=TensorProto.FLOAT)
    made = model([function], bodies=False)
    for value in made.graph.input:
        value.type.tensor_type.ClearField("shape")
    given = feeds() | {name: np.zeros(shape, np.float32) for name, shape in wrong.items()}
    with pytest.raises(Exception, match=message):
        session(made, options(library)).run(None, given)


@pytest.mark.proof
def test_every_convolution_is_the_reference(library: Path) -> None:
    """Fails if one of 240 convolutions without bodies differs from float64. The convolutions cover every epilogue and
    dtype, with strides, padding and dilation that differ by axis. The bound is half a unit in the last place of the
    result, plus 1e-5 for fp32 sums."""
    flags = itertools.product(range(len(GEOMETRIES)), ACTS, (False, True), (False, True), DTYPES)
    functions = [convolution(at, act=act, bias=b, residual=r, dtype=d) for at, act, b, r, d in flags]
    made = model(functions, bodies=False)
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(made, options(library))  # the options don't name the convolutions of the model
    given = feeds()
    for function, got in zip(functions, session(made, options(library, *functions)).run(None, given), strict=True):
        right_convolution(function, got)


def right_convolution(function: FusedConv2d, got: np.ndarray[Any, Any]) -> None:
    rounded = [
        torch.from_numpy(feeds()[name]).to(TORCH[function.dtype]).double().numpy() for name in inputs_of(function)
    ]
    image, weight, *rest = (x.transpose(0, 2, 3, 1) if x.ndim == 4 else x for x in rounded)
    there = [name for name in ("bias", "residual") if getattr(function, name)]
    wanted = reference.conv2d_numpy(spec_of(function), image, weight, **dict(zip(there, rest, strict=True)))
    wanted = wanted.transpose(0, 3, 1, 2)
    relative, step = reference.ROUNDING[DTYPES[function.dtype]]
    assert got.shape == wanted.shape
    assert np.all(np.abs(got - wanted) <= relative * np.abs(wanted) + step + 1e-5), function.name


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
    library: Path, wrong: dict[str, list[int]], message: str
) -> None:
    function = convolution(residual=True)
    made = model([function], bodies=False)
    for value in made.graph.input:
        value.type.tensor_type.ClearField("shape")
    given = feeds() | {name: np.zeros(shape, np.float32) for name, shape in wrong.items()}
    with pytest.raises(Exception, match=message):
        session(made, options(library, function)).run(None, given)


@pytest.mark.proof
@pytest.mark.parametrize(
    "name", ["FusedConv2d_k3x3_s0x1_p0x0_d1x1_fp32", "FusedConv2d_mine", "FusedConv2d_" + "k" * 900]
)
def test_a_name_that_is_no_convolution_is_passed_over(library: Path, name: str) -> None:
    """Fails if a name that is no convolution raises an error. ONNX Runtime then runs the operator's body, as for any
    operator of another library."""
    made = model([convolution()], bodies=True)
    node = next(node for node in made.graph.node if node.domain == DOMAIN)
    node.op_type = made.functions[0].name = name
    given = options(None)
    given.add_session_config_entry("custom_op.FusedConv2d.0", name)
    given.register_custom_ops_library(str(library))
    right_convolution(convolution(), session(made, given).run(None, feeds())[0])


@pytest.mark.proof
def test_a_session_takes_the_convolutions_of_its_model(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = convolution(act="silu", residual=True)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(library))
    with opened(function, tmp_path) as session:
        right_convolution(function, session.run(feeds())[function.name])


@pytest.mark.proof
def test_a_wrong_operator_does_not_pass_the_gate(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the gate of ``accel optimize --kernels`` accepts a wrong operator. The library computes the fused
    convolution once correctly and once without the stride."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))

    def fuse(operators: Path, seed: int) -> Artifact:
        # The weights are new each time, because a process caches the outputs of a model.
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

    made = fuse(library, 0)
    assert [node.op_type for node in onnx.load(made.path).graph.node] == ["FusedConv2d_k3x3_s2x1_p1x1_d1x1_relu_fp32"]
    for folder in ("plugins", "csrc"):
        shutil.copytree(bridges.PLUGINS.parent / folder, tmp_path / folder)
    source = tmp_path / "plugins" / "onnxruntime_conv2d.h"
    text = source.read_text()
    assert "oh * spec.stride[0]" in text
    source.write_text(text.replace("oh * spec.stride[0]", "oh"))
    monkeypatch.setattr(bridges, "PLUGINS", tmp_path / "plugins")
    planted = build_for_onnxruntime(Path(INCLUDE), cache=tmp_path / "bridge").path
    with pytest.raises(GateFailed):
        fuse(planted, 1)


@pytest.mark.proof
def test_the_command_builds_it_once(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    for cached in ("false", "true"):
        result = CliRunner().invoke(command, ["build", "--onnxruntime-include", INCLUDE, "--json", "-q"])
        assert result.exit_code == 0, result.output
        assert f'"cached": {cached}' in result.output
        assert "libaccel_onnxruntime.so" in result.output


def opened(function: FusedGemm | FusedConv2d, folder: Path) -> OnnxRuntimeSession:
    """Opens accel's session of a model with one operator that has no body."""
    onnx.save(model([function], bodies=False), folder / "model.onnx")
    inputs = tuple(TensorSpec(name, "float32", tuple(shape)) for name, shape in SHAPES.items())
    out = (M, N)
    if isinstance(function, FusedConv2d):
        out = tuple(conv_inputs(replace(function, residual=True)).popitem()[1])
    signature = Signature(inputs, (TensorSpec(function.name, "float32", out),))
    return OnnxRuntimeSession(Artifact(path=folder / "model.onnx", kind="onnx", signature=signature), SessionOptions())


PLAIN = FusedGemm(product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT)


@pytest.mark.proof
def test_a_session_takes_the_library_that_the_environment_names(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCEL_ONNXRUNTIME_LIBRARY", raising=False)
    with pytest.raises(AccelError, match="is not a registered function/op"):
        opened(PLAIN, tmp_path)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(library))
    with opened(PLAIN, tmp_path) as session:
        right(PLAIN, session.run(feeds())[PLAIN.name])


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_wrong_library_in_the_environment_is_an_error(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "mine.so").write_bytes(content)
    monkeypatch.setenv("ACCEL_ONNXRUNTIME_LIBRARY", str(tmp_path / "mine.so"))
    with pytest.raises(BadConfig, match=r"ACCEL_ONNXRUNTIME_LIBRARY is .*mine\.so.*unset it") as caught:
        opened(PLAIN, tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_headers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedHere, match="pass the include folder of an ONNX Runtime release"):
        build_for_onnxruntime(tmp_path)
    result = CliRunner().invoke(command, ["build"])
    assert result.exit_code == 2
    assert "--arch sm_90a, --onnxruntime-include DIR, or --tensorrt-include DIR" in result.output


@pytest.mark.proof
def test_what_has_no_operator_is_still_inlined(library: Path) -> None:
    """Fails if registering the library hides the function body of a product without an operator. The model also
    contains a product with an operator, and both products have bodies."""
    plain = FusedGemm(product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT)
    scaled = FusedGemm(
        product="gemm_nt", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT, col_scale=True
    )
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(model([scaled], bodies=False), options(library))
    made = model([plain, scaled], bodies=True)
    for with_it, without in zip(
        session(made, options(library)).run(None, feeds()), session(made, options(None)).run(None, feeds()), strict=True
    ):
        np.testing.assert_allclose(with_it, without, rtol=0, atol=1e-5 * float(np.abs(without).max()))
