"""The operators for ONNX Runtime in C++: built against its headers, loaded by it, equal to the reference and the body.

These fail where a name that ``accel.kernels.onnx_function`` gives has no operator, where one computes something else
than the float64 reference, where ONNX Runtime inlines the body although the operator is there, where operands that
don't fit give numbers instead of an error, or where missing headers get anything but one line.

The headers are in no wheel of ONNX Runtime: $ACCEL_ONNXRUNTIME_INCLUDE says where they are.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper

from accel.cli.kernels import command
from accel.errors import UnsupportedHere
from accel.kernels import reference
from accel.kernels.bridges import build_for_onnxruntime
from accel.kernels.onnx_function import DOMAIN, DTYPES, PRODUCTS, FusedGemm
from accel.kernels.spec import ACTS, EpilogueSpec, GemmSpec

INCLUDE = os.environ.get("ACCEL_ONNXRUNTIME_INCLUDE", "")
M, N, K = 6, 5, 7
SHAPES = {
    "a": [M, K],
    "a3": [2, 3, K],
    "nn": [K, N],
    "nt": [N, K],
    "bias": [N],
    "residual": [M, N],
    "residual3": [2, 3, N],
}
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not INCLUDE or shutil.which("g++") is None:
        pytest.skip("needs g++ and ONNX Runtime's headers in $ACCEL_ONNXRUNTIME_INCLUDE")
    return build_for_onnxruntime(Path(INCLUDE), cache=tmp_path_factory.mktemp("bridge")).path


def options(library: Path | None) -> ort.SessionOptions:
    made = ort.SessionOptions()
    if library is not None:
        made.register_custom_ops_library(str(library))
    return made


def session(made: onnx.ModelProto, given: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(made.SerializeToString(), given, providers=["CPUExecutionProvider"])


def inputs_of(function: FusedGemm) -> list[str]:
    wide = "3" if function.product == "matmul" else ""
    names = [f"a{wide}", "nt" if function.product == "gemm_nt" else "nn"]
    return [*names, *["bias"] * function.bias, *[f"residual{wide}"] * function.residual]


def model(functions: list[FusedGemm], *, bodies: bool) -> onnx.ModelProto:
    """Each function once on the same fp32 inputs, cast to its dtype; its output cast back to fp32."""
    nodes = []
    for dtype in sorted({function.dtype for function in functions}):
        nodes += [helper.make_node("Cast", [name], [f"{name}_{dtype}"], to=dtype) for name in SHAPES]
    for function in functions:
        given = [f"{name}_{function.dtype}" for name in inputs_of(function)]
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
    return made | {"a3": made["a"].reshape(SHAPES["a3"]), "residual3": made["residual"].reshape(SHAPES["residual3"])}


@pytest.mark.proof
def test_every_operator_is_the_reference(library: Path) -> None:
    """180 of them in one graph without bodies, against float64 from operands rounded to the dtype: half a unit in the
    last place of the result, and 1e-5 of fp32 sums."""
    flags = itertools.product(PRODUCTS, ACTS, (False, True), (False, True), DTYPES)
    functions = [FusedGemm(product=p, act=act, bias=b, residual=r, dtype=d) for p, act, b, r, d in flags]
    made = model(functions, bodies=False)
    with pytest.raises(Exception, match=r"is not a registered function/op"):
        session(made, options(None))
    given = feeds()
    found = dict(zip((f.name for f in functions), session(made, options(library)).run(None, given), strict=True))
    for function in functions:
        dtype = DTYPES[function.dtype]
        rounded = {
            name: torch.from_numpy(array).to(reference.TORCH_DTYPES[dtype]).double().numpy()
            for name, array in given.items()
        }
        epilogue = EpilogueSpec(act=function.act, bias=function.bias, residual=function.residual, out_dtype=dtype)
        spec = GemmSpec(m=M, n=N, k=K, in_dtype=dtype, epilogue=epilogue)
        b = rounded["nt"].T if function.product == "gemm_nt" else rounded["nn"]
        right = reference.gemm_numpy(spec, rounded["a"], b, bias=rounded["bias"], residual=rounded["residual"])
        got = found[function.name]
        assert got.shape == ((2, 3, N) if function.product == "matmul" else (M, N))
        relative, step = reference.ROUNDING[dtype]
        limit = relative * np.abs(right) + step + 1e-5
        assert np.all(np.abs(got.reshape(M, N) - right) <= limit), function.name


@pytest.mark.proof
def test_the_operator_is_taken_and_equals_its_body(library: Path, tmp_path: Path) -> None:
    """fp32: 1e-5 of the largest element, another order of the same few roundings."""
    function = FusedGemm(product="matmul", act="gelu_erf", bias=True, residual=True, dtype=TensorProto.FLOAT)
    made = model([function], bodies=True)
    optimized = {}
    results = {}
    for name, given in (("inlined", options(None)), ("operator", options(library))):
        given.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        results[name] = session(made, given).run(None, feeds())[0]
        optimized[name] = {node.op_type for node in onnx.load(tmp_path / f"{name}.onnx").graph.node}
    assert function.name not in optimized["inlined"]
    assert function.name in optimized["operator"]
    limit = 1e-5 * float(np.abs(results["inlined"]).max())
    np.testing.assert_allclose(results["operator"], results["inlined"], rtol=0, atol=limit)


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
def test_the_command_builds_it_once(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    for cached in ("false", "true"):
        result = CliRunner().invoke(command, ["build", "--onnxruntime-include", INCLUDE, "--json", "-q"])
        assert result.exit_code == 0, result.output
        assert f'"cached": {cached}' in result.output
        assert "libaccel_onnxruntime.so" in result.output


def test_missing_headers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedHere, match="pass the include folder of an ONNX Runtime release"):
        build_for_onnxruntime(tmp_path)
    result = CliRunner().invoke(command, ["build"])
    assert result.exit_code == 2
    assert "--arch sm_90a, or --onnxruntime-include DIR" in result.output


@pytest.mark.proof
def test_what_has_no_operator_is_still_inlined(library: Path) -> None:
    """A product with scales beside a plain one, both with bodies: registering the library must not hide a body."""
    plain = FusedGemm(product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT)
    scaled = FusedGemm(
        product="gemm_nn", act="silu", bias=True, residual=False, dtype=TensorProto.FLOAT, col_scale=True
    )
    made = model([plain], bodies=True)
    made.graph.node.append(helper.make_node(scaled.name, ["a", "nn", "bias", "bias"], [scaled.name], domain=DOMAIN))
    made.graph.output.append(helper.make_tensor_value_info(scaled.name, TensorProto.FLOAT, None))
    made.functions.append(scaled.function(20))
    for with_it, without in zip(
        session(made, options(library)).run(None, feeds()), session(made, options(None)).run(None, feeds()), strict=True
    ):
        np.testing.assert_allclose(with_it, without, rtol=0, atol=1e-5 * float(np.abs(without).max()))
