"""``accel::FusedGemm`` in ONNX: an operator with a local-function body, so that any runtime runs it.

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
        parts = [self.product, *(["bias"] if self.bias else []), *([self.act] if self.act != "none" else [])]
        return "_".join(["FusedGemm", *parts, *(["residual"] if self.residual else []), DTYPES[self.dtype]])

    def function(self, opset: int) -> onnx.FunctionProto:
        """The body. Its formal names start with the function's own: TensorRT inlines them without renaming."""
        prefix = f"accel_{self.name}_"
        inputs = [prefix + "a", prefix + "b"]
        nodes: list[onnx.NodeProto] = []

        def add(op: str, operands: list[str], result: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(op, operands, [prefix + result], **attributes))
            return prefix + result

        def constant(value: float, result: str) -> str:
            return add("Constant", [], result, value=helper.make_tensor(result, self.dtype, [], [value]))

        if self.bias:
            inputs.append(prefix + "bias")
        if self.product == "matmul":
            x = add("MatMul", inputs[:2], "product")
            x = add("Add", [x, inputs[2]], "biased") if self.bias else x
        else:
            x = add("Gemm", inputs, "product", transB=int(self.product == "gemm_nt"))
        x = self._act(x, opset, add, constant)
        if self.residual:
            inputs.append(prefix + "residual")
            x = add("Add", [x, inputs[-1]], "summed")
        opsets = [helper.make_opsetid("", opset)]
        return helper.make_function(DOMAIN, self.name, inputs, [x], nodes, opsets)

    def _act(self, x: str, opset: int, add: object, constant: object) -> str:
        assert callable(add)
        assert callable(constant)
        if self.act == "relu":
            return str(add("Relu", [x], "activated"))
        if self.act == "silu":
            return str(add("Mul", [x, add("Sigmoid", [x], "sigmoid")], "activated"))
        if self.act == "none":
            return x
        if opset >= 20:
            how = "tanh" if self.act == "gelu_tanh" else "none"
            return str(add("Gelu", [x], "activated", approximate=how))
        if self.act == "gelu_erf":
            inner = add("Erf", [add("Mul", [x, constant(math.sqrt(0.5), "sqrt_half")], "scaled")], "inner")
        else:
            cube = add("Mul", [add("Mul", [x, x], "square"), x], "cube")
            cubic = add("Add", [x, add("Mul", [cube, constant(0.044715, "c3")], "cubed")], "cubic")
            scaled = add("Mul", [cubic, constant(math.sqrt(2 / math.pi), "sqrt_2_pi")], "scaled")
            inner = add("Tanh", [scaled], "inner")
        half = add("Mul", [x, constant(0.5, "half")], "halved")
        return str(add("Mul", [half, add("Add", [inner, constant(1.0, "one")], "shifted")], "activated"))
