"""Defines the PyTorch operators ``accel::fused_gemm``, ``fused_conv2d`` and ``quantize_rowwise``, which run the
kernels.

Each operator has an implementation for CPU and CUDA, and a fake implementation. The fake implementation lets
``torch.compile`` and ``torch.export`` keep an operator as one node. ``fused_gemm`` and ``fused_conv2d`` have an
autograd formula. Importing this module registers the operators.
"""

from __future__ import annotations

from typing import Any

import torch

from ..catalogue import problem, reference
from ..catalogue.spec import ConvSpec, GemmSpec
from ..choose import dispatch

Tensor = torch.Tensor
Maybe = Tensor | None

EPILOGUE = "Tensor? bias=None, Tensor? residual=None, Tensor? row_scale=None, Tensor? col_scale=None"
torch.library.define(
    "accel::fused_gemm",
    f'(Tensor a, Tensor b, {EPILOGUE}, str act="none", ScalarType? out_dtype=None) -> Tensor',
)
torch.library.define(
    "accel::fused_conv2d",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? col_scale=None, int[2] stride=1, "
    'int[2] padding=0, int[2] dilation=1, str act="none", ScalarType? out_dtype=None) -> Tensor',
)
torch.library.define("accel::quantize_rowwise", "(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")

fused_gemm = torch.ops.accel.fused_gemm.default
fused_conv2d = torch.ops.accel.fused_conv2d.default
quantize_rowwise = torch.ops.accel.quantize_rowwise.default


def _given(**operands: Maybe) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in operands.items() if tensor is not None}


def _pair(values: list[int]) -> tuple[int, int]:
    return (values[0], values[-1])


def _gemm_problem(
    a: Tensor,
    b: Tensor,
    bias: Maybe = None,
    residual: Maybe = None,
    row_scale: Maybe = None,
    col_scale: Maybe = None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> tuple[GemmSpec, dict[str, Tensor]]:
    """Checks the arguments of ``accel::fused_gemm``. Returns the spec, and the operands of the epilogue by name."""
    operands = _given(bias=bias, residual=residual, row_scale=row_scale, col_scale=col_scale)
    return problem.gemm_spec(a, b, operands, act, out_dtype), operands


@torch.library.impl("accel::fused_gemm", ("cpu", "cuda"))
def _gemm(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    spec, operands = _gemm_problem(a, b, *rest, **named)
    return dispatch.run_gemm(spec, a, b, operands)


@torch.library.register_fake("accel::fused_gemm")  # type: ignore[untyped-decorator]
def _gemm_fake(a: Tensor, b: Tensor, *rest: Any, **named: Any) -> Tensor:
    spec, _ = _gemm_problem(a, b, *rest, **named)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=reference.TORCH_DTYPES[spec.epilogue.out_dtype])


def _conv2d_problem(
    x: Tensor,
    weight: Tensor,
    bias: Maybe = None,
    residual: Maybe = None,
    col_scale: Maybe = None,
    stride: list[int] = [1],  # noqa: B006 - the schema's default, never written to
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> tuple[ConvSpec, dict[str, Tensor]]:
    """Checks the arguments of ``accel::fused_conv2d``. Returns the spec, and the operands of the epilogue by name."""
    operands = _given(bias=bias, residual=residual, col_scale=col_scale)
    geometry = (_pair(stride), _pair(padding), _pair(dilation))
    return problem.conv_spec(x, weight, operands, geometry, act, out_dtype), operands


@torch.library.impl("accel::fused_conv2d", ("cpu", "cuda"))
def _conv2d(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    spec, operands = _conv2d_problem(x, weight, *rest, **named)
    return dispatch.run_conv2d(spec, x, weight, operands)


@torch.library.register_fake("accel::fused_conv2d")  # type: ignore[untyped-decorator]
def _conv2d_fake(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    spec, _ = _conv2d_problem(x, weight, *rest, **named)
    shape = (spec.images, spec.out_height, spec.out_width, spec.c_out)
    return x.new_empty(shape, dtype=reference.TORCH_DTYPES[spec.epilogue.out_dtype])


@torch.library.impl("accel::quantize_rowwise", ("cpu", "cuda"))
def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return dispatch.run_quantize(x, problem.quantized_dtype(x, dtype))


@torch.library.register_fake("accel::quantize_rowwise")  # type: ignore[untyped-decorator]
def _quantize_fake(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    problem.quantized_dtype(x, dtype)
    return x.new_empty(tuple(x.shape), dtype=dtype), x.new_empty((x.shape[0],), dtype=torch.float32)


def _act_gradient(act: str, grad: Tensor, before: Tensor) -> Tensor:
    if act == "relu":
        return torch.where(before > 0, grad, torch.zeros_like(grad))
    if act == "silu":
        return torch.ops.aten.silu_backward(grad, before)  # type: ignore[no-any-return]
    if act in ("gelu_erf", "gelu_tanh"):
        how = "tanh" if act == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(grad, before, approximate=how)  # type: ignore[no-any-return]
    return grad


def _backward(saved: Any, act: str, grad: Tensor, product: Tensor) -> tuple[Tensor, list[Maybe]]:
    """Returns the gradients with respect to the product (..., N), bias, residual, row_scale and col_scale."""
    bias, residual, row, col = saved
    rows = None if row is None else row.float().unsqueeze(-1)
    columns = None if col is None else col.float()
    by_row = product if rows is None else product * rows
    before = by_row if columns is None else by_row * columns
    if bias is not None:
        before = before + bias.float()
    at_act = _act_gradient(act, grad.float(), before)
    down = at_act if columns is None else at_act * columns
    leading = tuple(range(grad.dim() - 1))
    found: list[Maybe] = [
        None if bias is None else at_act.sum(leading).to(bias.dtype),
        None if residual is None else grad.to(residual.dtype),
        None if row is None else (down * product).sum(-1).to(row.dtype),
        None if col is None else (at_act * by_row).sum(leading).to(col.dtype),
    ]
    return down if rows is None else down * rows, found


def _gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs[:6])
    ctx.act = inputs[6]


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, b, *rest = ctx.saved_tensors
    product = reference.accumulate_torch(a, b, torch.float32)
    at_product, others = _backward(rest, ctx.act, grad, product)
    floating = problem.NAMES[a.dtype] in ("fp32", "fp16", "bf16")  # int8 and fp8 operands have no gradient
    to_a = (at_product @ b.float().t()).to(a.dtype) if floating and ctx.needs_input_grad[0] else None
    to_b = (a.float().t() @ at_product).to(b.dtype) if floating and ctx.needs_input_grad[1] else None
    return (to_a, to_b, *others, None, None)


def _conv2d_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, residual, col_scale, stride, padding, dilation, act, _ = inputs
    ctx.save_for_backward(x, weight, bias, residual, col_scale)
    ctx.geometry = (list(_pair(stride)), list(_pair(padding)), list(_pair(dilation)))
    ctx.act = act


def _conv2d_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, residual, col = ctx.saved_tensors
    wide_x, wide_w = x.float().permute(0, 3, 1, 2), weight.float().permute(0, 3, 1, 2)
    product = torch.nn.functional.conv2d(wide_x, wide_w, None, *ctx.geometry).permute(0, 2, 3, 1)
    at_product, others = _backward((bias, residual, None, col), ctx.act, grad, product)
    floating = problem.NAMES[x.dtype] in ("fp32", "fp16", "bf16")
    wanted = [floating and ctx.needs_input_grad[0], floating and ctx.needs_input_grad[1], False]
    to_x, to_w, _ = torch.ops.aten.convolution_backward(
        at_product.permute(0, 3, 1, 2), wide_x, wide_w, None, *ctx.geometry, False, [0, 0], 1, wanted
    )
    to_x = None if to_x is None else to_x.permute(0, 2, 3, 1).to(x.dtype)
    to_w = None if to_w is None else to_w.permute(0, 2, 3, 1).to(weight.dtype)
    return (to_x, to_w, others[0], others[1], others[3], None, None, None, None, None)


def _quantize_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG001
    ctx.mark_non_differentiable(*output)


def _quantize_backward(ctx: Any, *grads: Any) -> tuple[None, None]:  # noqa: ARG001
    return None, None


torch.library.register_autograd("accel::fused_gemm", _gemm_backward, setup_context=_gemm_setup)
torch.library.register_autograd("accel::fused_conv2d", _conv2d_backward, setup_context=_conv2d_setup)
torch.library.register_autograd("accel::quantize_rowwise", _quantize_backward, setup_context=_quantize_setup)
