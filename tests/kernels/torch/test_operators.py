"""Proves that accel's PyTorch operators pass opcheck, have correct gradients and aren't decomposed by torch.compile.

These tests fail if a schema is wrong about mutation or aliasing, or if an autograd formula is wrong. The tests fail if
a fake implementation differs from the real implementation in shape, dtype or stride. The tests also fail if
torch.compile breaks the graph or decomposes the operator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.kernels.catalogue import reference
from accel.kernels.catalogue.spec import ACTS
from accel.kernels.torch import operators
from accel.kernels.torch.gemm import fused_conv2d, fused_gemm, quantize_rowwise


def made(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck_gemm(act: str, dtype: torch.dtype) -> None:
    a, b = made(3, 5, dtype=dtype), made(4, 5, dtype=dtype).t().detach().requires_grad_()
    operands = (made(4, dtype=dtype), made(3, 4, dtype=dtype), made(3), made(4))
    torch.library.opcheck(operators.fused_gemm, (a, b, *operands, act))


def test_opcheck_fp8() -> None:
    """Checks that the fake implementation passes opcheck for fp8. The other tests of opcheck need fp8 arithmetic, which
    torch lacks on the CPU."""
    a, b = (made(*s, grad=False).to(torch.float8_e4m3fn) for s in ((3, 16), (4, 16)))
    torch.library.opcheck(
        operators.fused_gemm,
        (a, b.t(), made(4), None, made(3), made(4), "silu", torch.float16),
        test_utils="test_faketensor",
    )


def test_opcheck_int8_conv_and_quantize() -> None:
    a, b = (torch.randint(-9, 9, s, dtype=torch.int8) for s in ((3, 5), (5, 4)))
    torch.library.opcheck(operators.fused_gemm, (a, b, None, None, made(3), made(4), "relu", torch.bfloat16))
    x, w = made(2, 6, 5, 3), made(4, 3, 2, 3)
    args: tuple[Any, ...] = (x, w, made(4), made(2, 3, 4, 4), made(4), [2, 1], [1, 0], [1, 1], "silu")
    torch.library.opcheck(operators.fused_conv2d, args)
    torch.library.opcheck(operators.quantize_rowwise, (made(4, 7, grad=False), torch.int8))
    torch.library.opcheck(operators.quantize_rowwise, (made(4, 7), torch.float8_e4m3fn))


@pytest.mark.parametrize("act", ACTS)
def test_gemm_gradients_are_those_of_the_formula(act: str) -> None:
    """Fails if a gradient in fp32 differs from autograd in float64 by more than 1e-4 of the largest gradient. The limit
    of 1e-4 covers the rounding errors of a hundred fp32 operations."""
    tensors = [made(6, 5, seed=1), made(5, 7, seed=2), made(7, seed=3), made(6, 7, seed=4), made(6, seed=5), made(7)]
    a, b, bias, residual, row, col = tensors
    upstream = made(6, 7, grad=False, seed=6)
    got = torch.autograd.grad(
        fused_gemm(a, b, bias=bias, residual=residual, row_scale=row, col_scale=col, act=act), tensors, upstream
    )
    wide = [t.detach().double().requires_grad_() for t in tensors]
    plain = reference.act_torch(act, wide[4][:, None] * wide[5] * (wide[0] @ wide[1]) + wide[2]) + wide[3]
    wanted = torch.autograd.grad(plain, wide, upstream.double())
    for found, right in zip(got, wanted, strict=True):
        assert float((found - right).abs().max()) <= 1e-4 * float(right.abs().max())


def test_conv_gradients_are_those_of_the_formula() -> None:
    """Fails if a gradient in fp32 differs from autograd in float64 by more than 1e-4 of the largest gradient."""
    tensors = [made(2, 6, 5, 3, seed=1), made(4, 3, 2, 3, seed=2), made(4, seed=3), made(2, 3, 4, 4), made(4, seed=5)]
    x, w, bias, residual, col = tensors
    upstream = made(2, 3, 4, 4, grad=False, seed=6)
    geometry: dict[str, Any] = {"stride": (2, 1), "padding": (1, 0)}
    out = fused_conv2d(x, w, bias=bias, residual=residual, col_scale=col, act="gelu_erf", **geometry)
    got = torch.autograd.grad(out, tensors, upstream)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    product = torch.nn.functional.conv2d(wide[0].permute(0, 3, 1, 2), wide[1].permute(0, 3, 1, 2), **geometry)
    plain = torch.nn.functional.gelu(product.permute(0, 2, 3, 1) * wide[4] + wide[2]) + wide[3]
    wanted = torch.autograd.grad(plain, wide, upstream.double())
    for found, right in zip(got, wanted, strict=True):
        assert float((found - right).abs().max()) <= 1e-4 * float(right.abs().max())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_operators_whole(dynamic: bool) -> None:
    """Fails if torch.compile breaks the graph. With ``fullgraph=True``, a graph break raises an error. Also checks that
    the captured graph calls the operators by name, and that a compiled result matches the uncompiled result."""
    calls: list[str] = []

    def capture(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_rowwise(x)
        return fused_gemm(q, w, row_scale=scale, act="silu", out_dtype=torch.float32)

    w = torch.randint(-9, 9, (8, 5), dtype=torch.int8)
    compiled = torch.compile(model, backend=capture, fullgraph=True, dynamic=dynamic)
    for rows in (3, 6):
        x = made(rows, 8, grad=False)
        assert torch.equal(compiled(x, w), model(x, w))
    assert {"accel.quantize_rowwise.default", "accel.fused_gemm.default"} <= set(calls)


def test_export_keeps_the_operators_whole() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return fused_gemm(x, w, act="relu")

    x, w = made(3, 8, grad=False), made(8, 5, grad=False)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Model(), (x, w), dynamic_shapes={"x": {0: batch}, "w": None})
    assert "accel.fused_gemm.default" in [str(n.target) for n in program.graph.nodes]
    longer = made(9, 8, grad=False)
    assert torch.equal(program.module()(longer, w), fused_gemm(longer, w, act="relu"))
