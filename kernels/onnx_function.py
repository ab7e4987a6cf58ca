"""``accel::FusedGemm`` and ``accel::FusedConv2d`` in ONNX: operators with a local-function body, so that any runtime
runs them.

A runtime that has the kernel takes it by its name; every other one inlines the body. There is one function an epilogue,
named after it: ``FusedGemm_nt_bias_gelu_erf_residual_fp32``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from accel.errors import UnknownName
from accel.kernels.spec import ACTS

DOMAIN = "accel"
VERSION = 1
MIN_OPSET = 13
MIN_IR = 8  # the first with functions in a model
DTYPES: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}


class _Body:
    """A function under way. Its formal names start with its own name: TensorRT inlines them without renaming."""

    def __init__(self, name: str, dtype: int, opset: int) -> None:
        self.name, self.dtype, self.opset = name, dtype, opset
        self.inputs: list[str] = []
        self.nodes: list[onnx.NodeProto] = []

    def formal(self, name: str) -> str:
        self.inputs.append(f"accel_{self.name}_{name}")
        return self.inputs[-1]

    def add(self, op: str, operands: list[str], result: str, **attributes: Any) -> str:
        out = f"accel_{self.name}_{result}"
        self.nodes.append(helper.make_node(op, operands, [out], **attributes))
        return out

    def constant(self, value: float, result: str) -> str:
        return self.add("Constant", [], result, value=helper.make_tensor(result, self.dtype, [], [value]))

    def activate(self, act: str, x: str) -> str:
        add, constant = self.add, self.constant
        if act == "none":
            return x
        if act == "relu":
            return add("Relu", [x], "activated")
        if act == "silu":
            return add("Mul", [x, add("Sigmoid", [x], "sigmoid")], "activated")
        if self.opset >= 20:
            return add("Gelu", [x], "activated", approximate="tanh" if act == "gelu_tanh" else "none")
        if act == "gelu_erf":
            inner = add("Erf", [add("Mul", [x, constant(math.sqrt(0.5), "sqrt_half")], "scaled")], "inner")
        else:
            cube = add("Mul", [add("Mul", [x, x], "square"), x], "cube")
            cubic = add("Add", [x, add("Mul", [cube, constant(0.044715, "c3")], "cubed")], "cubic")
            scaled = add("Mul", [cubic, constant(math.sqrt(2 / math.pi), "sqrt_2_pi")], "scaled")
            inner = add("Tanh", [scaled], "inner")
        half = add("Mul", [x, constant(0.5, "half")], "halved")
        return add("Mul", [half, add("Add", [inner, constant(1.0, "one")], "shifted")], "activated")

    def finish(self, act: str, residual: bool, x: str) -> onnx.FunctionProto:
        x = self.activate(act, x)
        if residual:
            x = self.add("Add", [x, self.formal("residual")], "summed")
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_function(DOMAIN, self.name, self.inputs, [x], self.nodes, opsets)


def _epilogue(bias: bool, act: str, residual: bool, dtype: int) -> list[str]:
    return [*["bias"] * bias, *([act] if act != "none" else []), *["residual"] * residual, DTYPES[dtype]]


@dataclass(frozen=True, kw_only=True)
class FusedGemm:
    """``act(A @ B + bias) + residual``; ``product``: ``matmul`` (A of any rank), ``gemm_nn`` or ``gemm_nt``
    (matrices, ``nt``: B is (N, K)). ``dtype`` is one of ``DTYPES``, that of every operand."""

    product: str
    act: str
    bias: bool
    residual: bool
    dtype: int

    def __post_init__(self) -> None:
        if self.act not in ACTS or self.product not in ("matmul", "gemm_nn", "gemm_nt"):
            raise UnknownName(f"no FusedGemm for {self.product} and {self.act}; the activations are {', '.join(ACTS)}")

    @property
    def name(self) -> str:
        return "_".join(["FusedGemm", self.product, *_epilogue(self.bias, self.act, self.residual, self.dtype)])

    def function(self, opset: int) -> onnx.FunctionProto:
        """The body for this opset."""
        body = _Body(self.name, self.dtype, opset)
        operands = [body.formal(name) for name in ("a", "b", *["bias"] * self.bias)]
        if self.product == "matmul":
            x = body.add("MatMul", operands[:2], "product")
            x = body.add("Add", [x, operands[2]], "biased") if self.bias else x
        else:
            x = body.add("Gemm", operands, "product", transB=int(self.product == "gemm_nt"))
        return body.finish(self.act, self.residual, x)


@dataclass(frozen=True, kw_only=True)
class FusedConv2d:
    """``act(conv2d(x, weight) + bias) + residual`` in ONNX's own layout (NCHW, OIHW), one group; ``kernel``,
    ``stride``, ``padding`` and ``dilation`` are (height, width). One function a geometry: TensorRT's parser gets
    constants, not attributes of the caller."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    act: str
    bias: bool
    residual: bool
    dtype: int

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise UnknownName(f"no FusedConv2d for {self.act}; the activations are {', '.join(ACTS)}")

    @property
    def name(self) -> str:
        sizes = zip("kspd", (self.kernel, self.stride, self.padding, self.dilation), strict=True)
        geometry = [f"{letter}{height}x{width}" for letter, (height, width) in sizes]
        return "_".join(["FusedConv2d", *geometry, *_epilogue(self.bias, self.act, self.residual, self.dtype)])

    def function(self, opset: int) -> onnx.FunctionProto:
        """The body for this opset."""
        body = _Body(self.name, self.dtype, opset)
        operands = [body.formal(name) for name in ("x", "weight", *["bias"] * self.bias)]
        x = body.add(
            "Conv",
            operands,
            "product",
            kernel_shape=list(self.kernel),
            strides=list(self.stride),
            pads=[*self.padding, *self.padding],
            dilations=list(self.dilation),
        )
        return body.finish(self.act, self.residual, x)
