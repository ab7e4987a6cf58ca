"""Proves that ``torch.onnx.export`` turns fused modules into operator nodes with function bodies, and keeps the
outputs.

These tests check that each operator has a translation, and that no two operators have the same name. The tests fail if
a function body differs from the operator in a scale, a cast or the order of the operands. The tests also check that
ONNX Runtime can run a fused module from ``accel export``.
"""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from torch import nn

from accel.errors import UnknownName
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ACTS, EpilogueSpec, GemmSpec
from accel.kernels.onnx.export import add_functions, translation_table
from accel.kernels.onnx.function import (
    DOMAIN,
    DTYPES,
    OPERANDS,
    PRODUCTS,
    FusedConv2d,
    FusedGemm,
    QuantizeRowwise,
    parse,
)
from accel.kernels.torch.fuse import fuse
from accel.kernels.torch.gemm import fused_conv2d, fused_gemm, quantize_rowwise


def exported(module: nn.Module, args: tuple[torch.Tensor, ...], dynamic: Any = None) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignores the exporter's warnings
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            dynamic_shapes=dynamic,
            custom_translation_table=translation_table(),
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    add_functions(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model: onnx.ModelProto, *values: torch.Tensor) -> list[torch.Tensor]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = dict(zip((i.name for i in session.get_inputs()), (v.numpy() for v in values), strict=True))
    return [torch.from_numpy(np.asarray(value)) for value in session.run(None, feeds)]


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == DOMAIN]


class Calls(nn.Module):
    """Wraps a single operator in a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: torch.Tensor) -> Any:
        return self.function(*values)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.back = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.conv(x)).mean((2, 3))
        return x + self.back(nn.functional.gelu(self.up(x)))


def test_a_fused_module_exports_to_the_operators() -> None:
    """Fails if the exported model, which was traced with a batch of 2, differs from the module for a batch of 5. The
    bound is 1e-5 of the largest element, which covers several fp32 roundings."""
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(2, 3, 9, 7)
    fused, _ = fuse(net, (x,))
    model = exported(fused, (x,), ({0: torch.export.Dim("batch")},))
    assert operators(model) == [
        "FusedConv2d_k3x3_s2x2_p1x1_d1x1_bias_silu_fp32",
        "FusedGemm_gemm_nn_bias_gelu_erf_fp32",
        "FusedGemm_gemm_nn_bias_residual_fp32",
    ]
    other = torch.randn(5, 3, 9, 7)
    wanted = net(other).detach()
    assert float((run(model, other)[0] - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8", "fp8_e4m3"])
def test_gemm_with_scales(dtype: str) -> None:
    """Fails if the error of a function body exceeds the operator's bound. The function body computes in fp32 and
    rounds once, as a kernel does. One model holds the operators of all activations."""
    g = torch.Generator().manual_seed(0)
    kind, out = reference.TORCH_DTYPES[dtype], torch.float16
    draw = (
        (lambda *s: torch.randint(-128, 128, s, generator=g))
        if dtype == "int8"
        else (lambda *s: torch.randn(s, generator=g))
    )
    a, b = (draw(*shape).float() for shape in ((5, 7), (7, 3)))
    a, b = a.to(kind).float(), b.to(kind).float()  # numpy has no float8, so the exported graph casts float32 inputs
    size = 0.01 if dtype == "int8" else 1.0
    bias, residual = torch.randn(3, generator=g), torch.randn(5, 3, generator=g).half()
    row, col = (size * (0.5 + torch.rand(n, generator=g)) for n in (5, 3))

    def call(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        bias, residual, row, col = rest
        given = {"bias": bias, "residual": residual, "row_scale": row, "col_scale": col, "out_dtype": out}
        return [fused_gemm(a.to(kind), b.to(kind), act=act, **given) for act in ACTS]

    values = (a, b, bias, residual, row, col)
    model = exported(Calls(call), values)
    assert len(operators(model)) == len(set(operators(model))) == len(ACTS)
    flags = dict.fromkeys(("bias", "residual", "row_scale", "col_scale"), True)
    operands = {"bias": bias, "residual": residual, "row_scale": row, "col_scale": col}
    for act, got in zip(ACTS, run(model, *values), strict=True):
        spec = GemmSpec(m=5, n=3, k=7, in_dtype=dtype, epilogue=EpilogueSpec(act=act, out_dtype="fp16", **flags))
        exact = reference.gemm_torch(spec, a.to(kind), b.to(kind), operands)
        bound = reference.gemm_bound(spec, a.to(kind), b.to(kind), operands)
        assert got.dtype == out, act
        assert bool(((got.double() - exact).abs() <= bound).all()), act


def test_a_bias_of_another_dtype_is_cast() -> None:
    a, b, bias = torch.randn(4, 8).half(), torch.randn(8, 6).half(), torch.randn(6)
    model = exported(Calls(lambda a, b, bias: fused_gemm(a, b, bias=bias, act="relu")), (a, b, bias))
    (got,) = run(model, a, b, bias)
    wanted = fused_gemm(a, b, bias=bias, act="relu")
    assert float((got - wanted).abs().max()) <= 4 * 2.0**-10 * float(wanted.abs().max())


def test_conv_with_residual() -> None:
    x, w, r = torch.randn(2, 7, 6, 3), torch.randn(5, 3, 2, 3), torch.randn(2, 4, 6, 5)

    def call(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return fused_conv2d(x, w, residual=r, act="gelu_tanh", stride=(2, 1), padding=(1, 1), dilation=(1, 2))

    model = exported(Calls(call), (x, w, r))
    wanted = call(x, w, r)
    assert float((run(model, x, w, r)[0] - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_quantize() -> None:
    """Fails if a quantized value differs from the operator's value, even in a row of zeros or a row with a NaN."""
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(0)) * 20
    x[1], x[2, 7] = 0, float("nan")

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        found = [quantize_rowwise(x, dtype) for x in given for dtype in (torch.int8, torch.float8_e4m3fn)]
        return [value for q, scale in found for value in (q.float(), scale)]

    sources = (x, x.half())
    model = exported(Calls(call), sources)
    assert len(set(operators(model))) == 4
    for mine, wanted in zip(run(model, *sources), call(*sources), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


flags = st.booleans()
pairs = st.tuples(st.integers(1, 11), st.integers(1, 11))
gemms = st.builds(
    FusedGemm,
    product=st.sampled_from(PRODUCTS),
    act=st.sampled_from(ACTS),
    bias=flags,
    residual=flags,
    dtype=st.sampled_from(list(DTYPES)),
    row_scale=flags,
    col_scale=flags,
    operand=st.sampled_from([None, *OPERANDS]),
)
convs = st.builds(
    FusedConv2d,
    kernel=pairs,
    stride=pairs,
    padding=pairs,
    dilation=pairs,
    act=st.sampled_from(ACTS),
    bias=flags,
    residual=flags,
    dtype=st.sampled_from(list(DTYPES)),
)
quantizes = st.builds(
    QuantizeRowwise,
    source=st.sampled_from(list(DTYPES)),
    dtype=st.sampled_from([TensorProto.INT8, TensorProto.FLOAT8E4M3FN]),
)


@settings(max_examples=300, deadline=None)
@given(operator=gemms | convs | quantizes)
def test_a_name_leads_back_to_its_operator(operator: FusedGemm | FusedConv2d | QuantizeRowwise) -> None:
    found = parse(operator.name)
    assert found.name == operator.name
    assert found.function(20) == operator.function(20)


@pytest.mark.parametrize("name", ["FusedGemm", "FusedGemm_matmul_swish_fp32", "FusedConv2d_k3x3_relu_fp32", "Softmax"])
def test_an_unknown_operator_is_named(name: str) -> None:
    with pytest.raises(UnknownName, match=f"accel::{name}"):
        parse(name)


def test_accel_export_takes_a_fused_module(cli: Any, tmp_path: Path) -> None:
    source = tmp_path / "fused_model.py"
    source.write_text(
        textwrap.dedent(
            """
            import torch
            from accel import fuse

            def make():
                torch.manual_seed(0)
                net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 3)).eval()
                return fuse(net, (torch.zeros(2, 6),))[0]
            """
        )
    )
    ran = cli("export", f"{source}:make", "--input", "x:float32[batch,6]", "-o", tmp_path / "fused.onnx")
    assert ran.code == 0, ran.stderr
    assert operators(onnx.load(tmp_path / "fused.onnx")) == [
        "FusedGemm_gemm_nn_bias_gelu_erf_fp32",
        "FusedGemm_gemm_nn_bias_fp32",
    ]
