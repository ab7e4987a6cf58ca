"""Defines the ONNX operators ``accel::FusedGemm``, ``accel::FusedConv2d`` and ``accel::QuantizeRowwise``, and their
function bodies.

A runtime that has the kernel finds the kernel by the operator's name. A runtime without the kernel inlines the
operator's function body. Each epilogue has a function with its own name, such as
``FusedGemm_gemm_nt_bias_gelu_erf_residual_fp32``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import onnx
from accel.errors import UnknownName
from onnx import TensorProto, helper

from ..catalogue.reference import QMAX, SMALLEST_SCALE
from ..catalogue.spec import ACTS

DOMAIN = "accel"
VERSION = 1
MIN_OPSET = 13
MIN_IR = 8  # the first IR version with functions in a model
PRODUCTS = ("matmul", "gemm_nn", "gemm_nt")
DTYPES: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
OPERANDS = {**DTYPES, TensorProto.INT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8_e4m3"}


class _Body:
    """Builds a function body. Value names start with the function's name, because TensorRT inlines functions without
    renaming values."""

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
        return self.returning(x)

    def returning(self, *outputs: str) -> onnx.FunctionProto:
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_function(DOMAIN, self.name, self.inputs, list(outputs), self.nodes, opsets)


def _epilogue(bias: bool, act: str, residual: bool, dtype: int) -> list[str]:
    return [*["bias"] * bias, *([act] if act != "none" else []), *["residual"] * residual, DTYPES[dtype]]


@dataclass(frozen=True, kw_only=True)
class FusedGemm:
    """Describes the operator that computes ``act(row_scale * col_scale * (A @ B) + bias) + residual``.

    ``product`` is ``matmul`` if A can have any rank, and ``gemm_nn`` or ``gemm_nt`` if A is a matrix. B is (N, K) in
    ``gemm_nt``. ``dtype``, one of ``DTYPES``, is the dtype of the output and the residual. ``operand`` is the dtype of
    A and B, by default ``dtype``. The body computes in fp32 if ``operand`` differs from ``dtype``, or if there are
    scales. In a body that computes in fp32, bias and scales are fp32. If the body does not compute in fp32, the bias
    has the dtype ``dtype``. The order of the inputs is A, B, bias, row_scale, col_scale, residual. The last four inputs
    are optional.
    """

    product: str
    act: str
    bias: bool
    residual: bool
    dtype: int
    row_scale: bool = False
    col_scale: bool = False
    operand: int | None = None

    def __post_init__(self) -> None:
        if self.act not in ACTS or self.product not in PRODUCTS:
            raise UnknownName(
                f"FusedGemm doesn't support product {self.product} with activation {self.act}; the activations are "
                f"{', '.join(ACTS)}"
            )
        if self.dtype not in DTYPES or self.operand not in (None, *OPERANDS):
            raise UnknownName(
                f"FusedGemm doesn't support this dtype; the output has to be one of {', '.join(DTYPES.values())}"
            )

    @property
    def wide(self) -> bool:
        """Tells whether the body computes in fp32."""
        return self.row_scale or self.col_scale or self.operand not in (None, self.dtype)

    @property
    def name(self) -> str:
        scales = [*["row"] * self.row_scale, *["col"] * self.col_scale]
        own = [] if self.operand in (None, self.dtype) else [OPERANDS[self.operand or 0]]
        return "_".join(
            ["FusedGemm", self.product, *own, *scales, *_epilogue(self.bias, self.act, self.residual, self.dtype)]
        )

    @property
    def dtypes(self) -> list[int]:
        """Returns the dtype of each input."""
        operand = self.dtype if self.operand is None else self.operand
        added = TensorProto.FLOAT if self.wide else self.dtype
        scales = [TensorProto.FLOAT] * (self.row_scale + self.col_scale)
        return [operand, operand, *[added] * self.bias, *scales, *[self.dtype] * self.residual]

    def function(self, opset: int, *, tensorrt: bool = False) -> onnx.FunctionProto:
        """Returns the body for this opset.

        If ``tensorrt`` is True, an fp8 body is written for TensorRT's parser, and ONNX Runtime 1.31 can't run the body.
        """
        if self.wide:
            return self._wide(opset, tensorrt)
        body = _Body(self.name, self.dtype, opset)
        operands = [body.formal(name) for name in ("a", "b", *["bias"] * self.bias)]
        if self.product == "matmul":
            x = body.add("MatMul", operands[:2], "product")
            x = body.add("Add", [x, operands[2]], "biased") if self.bias else x
        else:
            x = body.add("Gemm", operands, "product", transB=int(self.product == "gemm_nt"))
        return body.finish(self.act, self.residual, x)

    def _wide(self, opset: int, tensorrt: bool) -> onnx.FunctionProto:
        body = _Body(self.name, TensorProto.FLOAT, opset)
        names = ["a", "b", *["bias"] * self.bias, *["row"] * self.row_scale, *["col"] * self.col_scale]
        formal = {name: body.formal(name) for name in [*names, *["residual"] * self.residual]}
        a, b = formal["a"], formal["b"]
        if self.operand == TensorProto.INT8 or (self.operand == TensorProto.FLOAT8E4M3FN and tensorrt):
            # A DequantizeLinear with a scale of 1 converts the operands to fp32. TensorRT can't cast from int8 or fp8,
            # and has no MatMulInteger. ONNX Runtime fuses the int8 nodes to MatMulInteger.
            unit = body.constant(1.0, "unit")
            a, b = (body.add("DequantizeLinear", [v, unit], f"wide_{n}") for n, v in (("a", a), ("b", b)))
        else:
            a, b = (body.add("Cast", [v], f"wide_{n}", to=TensorProto.FLOAT) for n, v in (("a", a), ("b", b)))
        b = body.add("Transpose", [b], "turned", perm=[1, 0]) if self.product == "gemm_nt" else b
        x = body.add("MatMul", [a, b], "product")
        if self.row_scale:
            last = body.add("Constant", [], "last", value=helper.make_tensor("last", TensorProto.INT64, [1], [-1]))
            x = body.add("Mul", [x, body.add("Unsqueeze", [formal["row"], last], "rows")], "by_row")
        x = body.add("Mul", [x, formal["col"]], "by_col") if self.col_scale else x
        x = body.add("Add", [x, formal["bias"]], "biased") if self.bias else x
        x = body.activate(self.act, x)
        if self.residual:
            added = body.add("Cast", [formal["residual"]], "wide_residual", to=TensorProto.FLOAT)
            x = body.add("Add", [x, added], "summed")
        return body.returning(body.add("Cast", [x], "out", to=self.dtype))


@dataclass(frozen=True, kw_only=True)
class QuantizeRowwise:
    """Describes the operator that quantizes a matrix (M, K) to int8 or float8 e4m3 with one fp32 scale per row.

    The operator's arithmetic is the same as in ``reference.quantize_rowwise_torch``.
    """

    source: int
    dtype: int

    @property
    def name(self) -> str:
        return f"QuantizeRowwise_{DTYPES[self.source]}_{OPERANDS[self.dtype]}"

    def function(self, opset: int, *, tensorrt: bool = False) -> onnx.FunctionProto:
        """Returns the body for this opset.

        If ``tensorrt`` is True, an fp8 body is written for TensorRT's parser, and ONNX Runtime 1.31 can't run the body.
        """
        body = _Body(self.name, TensorProto.FLOAT, opset)
        add, constant = body.add, body.constant
        x = add("Cast", [body.formal("x")], "wide", to=TensorProto.FLOAT)
        last = add("Constant", [], "last", value=helper.make_tensor("last", TensorProto.INT64, [1], [-1]))
        if opset >= 18:
            top = add("ReduceMax", [add("Abs", [x], "magnitude"), last], "top", keepdims=0)
        else:
            top = add("ReduceMax", [add("Abs", [x], "magnitude")], "top", axes=[-1], keepdims=0)
        largest = constant(QMAX[OPERANDS[self.dtype]], "largest")
        scale = add("Max", [add("Div", [top, largest], "quotient"), constant(SMALLEST_SCALE, "smallest")], "at_least")
        zero = add("Equal", [top, constant(0.0, "zero")], "is_zero")
        scale = add("Where", [zero, constant(1.0, "one"), scale], "finite")
        # A NaN in the row has to make the scale NaN, but Max and ReduceMax may drop the NaN.
        nans = add("ReduceSum", [add("Mul", [x, constant(0.0, "nothing")], "nans"), last], "any_nan", keepdims=0)
        scale = add("Add", [scale, nans], "scale")
        ratio = add("Div", [x, add("Unsqueeze", [scale, last], "rows")], "ratio")
        ratio = add("Clip", [ratio, add("Neg", [largest], "lowest"), largest], "clipped")
        if self.dtype == TensorProto.INT8:
            ratio = add("Round", [ratio], "rounded")
            ratio = add("Where", [add("IsNaN", [ratio], "is_nan"), constant(0.0, "nan_as"), ratio], "numbers")
        # In TensorRT, only QuantizeLinear converts a variable tensor to int8 or fp8.
        if self.dtype == TensorProto.INT8 or tensorrt:
            origin = add("Constant", [], "origin", value=helper.make_tensor("origin", self.dtype, [], [0]))
            q = add("QuantizeLinear", [ratio, constant(1.0, "unit"), origin], "q")
        else:
            q = add("Cast", [ratio], "q", to=self.dtype)
        return body.returning(q, scale)


@dataclass(frozen=True, kw_only=True)
class FusedConv2d:
    """Describes the operator that computes ``act(conv2d(x, weight) + bias) + residual`` in ONNX's layout (NCHW, OIHW).
    The convolution has one group.

    ``kernel``, ``stride``, ``padding`` and ``dilation`` are pairs (height, width). Each combination of sizes has its
    own function, because TensorRT's parser needs the sizes as constants in the body. TensorRT's parser can't read sizes
    from the attributes of the calling node.
    """

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
            raise UnknownName(f"FusedConv2d doesn't support activation {self.act}; use one of {', '.join(ACTS)}")

    @property
    def name(self) -> str:
        sizes = zip("kspd", (self.kernel, self.stride, self.padding, self.dilation), strict=True)
        geometry = [f"{letter}{height}x{width}" for letter, (height, width) in sizes]
        return "_".join(["FusedConv2d", *geometry, *_epilogue(self.bias, self.act, self.residual, self.dtype)])

    @property
    def dtypes(self) -> list[int]:
        """Returns the dtype of each input."""
        return [self.dtype] * (2 + self.bias + self.residual)

    def function(self, opset: int) -> onnx.FunctionProto:
        """Returns the body for this opset."""
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


def parse(name: str) -> FusedGemm | FusedConv2d | QuantizeRowwise:
    """Returns the operator called ``name``. Raises ``UnknownName`` if ``name`` is not the name of an operator."""
    by_name = {text: dtype for dtype, text in DTYPES.items()}
    operands = {text: dtype for dtype, text in OPERANDS.items()}
    epilogue = rf"(_bias)?(?:_({'|'.join(ACTS[1:])}))?(_residual)?_({'|'.join(by_name)})"
    pair = r"(\d+)x(\d+)"
    gemm = re.fullmatch(rf"FusedGemm_({'|'.join(PRODUCTS)})(?:_({'|'.join(operands)}))?(_row)?(_col)?{epilogue}", name)
    if gemm is not None:
        product, operand, row, col, bias, act, residual, dtype = gemm.groups()
        return FusedGemm(
            product=product,
            act=act or "none",
            bias=bool(bias),
            residual=bool(residual),
            dtype=by_name[dtype],
            row_scale=bool(row),
            col_scale=bool(col),
            operand=operands[operand] if operand else None,
        )
    conv = re.fullmatch(rf"FusedConv2d_k{pair}_s{pair}_p{pair}_d{pair}{epilogue}", name)
    if conv is not None:
        numbers = [int(text) for text in conv.groups()[:8]]
        bias, act, residual, dtype = conv.groups()[8:]
        return FusedConv2d(
            kernel=(numbers[0], numbers[1]),
            stride=(numbers[2], numbers[3]),
            padding=(numbers[4], numbers[5]),
            dilation=(numbers[6], numbers[7]),
            act=act or "none",
            bias=bool(bias),
            residual=bool(residual),
            dtype=by_name[dtype],
        )
    quantize = re.fullmatch(rf"QuantizeRowwise_({'|'.join(by_name)})_(int8|fp8_e4m3)", name)
    if quantize is None:
        raise UnknownName(f"{DOMAIN}::{name} is not one of accel's operators; give it a function body in the model")
    return QuantizeRowwise(source=by_name[quantize[1]], dtype=operands[quantize[2]])
