"""Defines the ONNX operators ``accel::PackedProduct*``: products with packed int4 or int8 weights.

accel's library for ONNX Runtime runs them with the kernels of ``native/cpu``. Without the library, ONNX Runtime inlines
the function body, which puts the weights back into the order of MatMulNBits and calls it. So any ONNX Runtime runs the
file.

The attributes ``K``, ``N``, ``bits`` and ``block_size`` are those of the MatMulNBits, where N counts the outputs of all
matrices, each filled up to a multiple of 16. ``shape`` is that of the weights of MatMulNBits, and ``gain`` the number
to multiply the scales by. ``begin_i`` and ``end_i`` are where matrix i lies within N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

from ..native.cpu.layout import LANES, Packed
from .function import DOMAIN, VERSION

__all__ = [
    "DOMAIN",
    "GATED",
    "MOST_PARTS",
    "OF_PARTS",
    "PARTS",
    "RESIDUAL",
    "VERSION",
    "packed_function",
    "packed_node",
]

PRODUCT, TWO, THREE = "PackedProduct", "PackedProduct_2", "PackedProduct_3"
GATED, RESIDUAL = "PackedProduct_gated", "PackedProduct_residual"
PARTS = {PRODUCT: 1, TWO: 2, THREE: 3, GATED: 2, RESIDUAL: 1}
"""The names of the operators, with the number of matrices of each."""
MOST_PARTS = 3
OF_PARTS = {1: PRODUCT, 2: TWO, 3: THREE}
"""The operator without an epilogue, by the number of matrices."""

MICROSOFT = "com.microsoft"
_SAME = ("K", "N", "bits", "block_size")
_ACCURACY_LEVEL = 4  # rounds the rows to int8, as the kernels do
_MIN_OPSET = 13


def packed_node(name: str, inputs: Sequence[str], outputs: Sequence[str], packed: Packed) -> onnx.NodeProto:
    """Returns a node of the operator ``name`` with the inputs x, weights, scales and maybe a residual. The weights and
    scales are those of ``packed``."""
    ends: dict[str, Any] = {}
    begin = 0
    for at, size in enumerate(packed.sizes):
        ends |= {f"begin_{at}": [begin], f"end_{at}": [begin + size]}
        begin += -(-size // LANES) * LANES
    return helper.make_node(
        name,
        list(inputs),
        list(outputs),
        name=f"{outputs[0]}/{name}",
        domain=DOMAIN,
        K=packed.k,
        N=begin,
        bits=packed.bits,
        block_size=packed.block,
        gain=[packed.gain],
        shape=[begin, packed.scales.shape[1], packed.block * packed.bits // 8],
        **ends,
    )


def packed_function(name: str, opset: int) -> onnx.FunctionProto:
    """Returns the body of the operator ``name`` for a model of this opset."""
    body = _Body(name)
    inputs = [body.name(one) for one in ("x", "weights", "scales", *(("residual",) if name == RESIDUAL else ()))]
    x, weights, scales = inputs[:3]
    by_output = body.add("Transpose", [weights], "by_output", perm=[0, 2, 1, 3])
    rows = body.add("Reshape", [by_output, body.attribute("shape")], "rows")
    own = body.add("Transpose", [scales], "scales_by_output", perm=[0, 2, 1])
    flat = body.add("Reshape", [own, body.constant([-1], "flat")], "flat_scales")
    wide = body.add("Cast", [flat], "wide_scales", to=TensorProto.FLOAT)
    whole = body.add("Mul", [wide, body.attribute("gain", "value_floats", onnx.AttributeProto.FLOATS)], "whole_scales")
    # The Cast changes nothing. It tells shape inference, which doesn't know MatMulNBits, the dtype of the product.
    product = body.add("Cast", [body.product([x, rows, whole])], "typed", to=TensorProto.FLOAT)
    parts = [
        body.add(
            "Slice",
            [product, body.attribute(f"begin_{at}"), body.attribute(f"end_{at}"), body.constant([-1], f"axis_{at}")],
            f"part_{at}",
        )
        for at in range(PARTS[name])
    ]
    if name == GATED:
        silu = body.add("Mul", [parts[0], body.add("Sigmoid", [parts[0]], "sigmoid")], "silu")
        parts = [body.add("Mul", [silu, parts[1]], "gated")]
    if name == RESIDUAL:
        parts = [body.add("Add", [parts[0], inputs[3]], "sum")]
    opsets = [helper.make_opsetid("", max(opset, _MIN_OPSET)), helper.make_opsetid(MICROSOFT, 1)]
    attributes = [*_SAME, "shape", "gain", *(f"{end}_{at}" for at in range(PARTS[name]) for end in ("begin", "end"))]
    return helper.make_function(DOMAIN, name, inputs, parts, body.nodes, opsets, attributes)


class _Body:
    def __init__(self, function: str) -> None:
        self._function = function
        self.nodes: list[onnx.NodeProto] = []

    def name(self, value: str) -> str:
        return f"accel_{self._function}_{value}"

    def add(self, op: str, inputs: list[str], result: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [self.name(result)], **attributes))
        return self.name(result)

    def constant(self, values: list[int], result: str) -> str:
        return self.add("Constant", [], result, value_ints=values)

    def attribute(
        self, name: str, value: str = "value_ints", kind: onnx.AttributeProto.AttributeType = onnx.AttributeProto.INTS
    ) -> str:
        """Adds the value of an attribute of the function, a list of numbers."""
        out = self.add("Constant", [], name)
        self.nodes[-1].attribute.append(_reference(value, name, kind))
        return out

    def product(self, inputs: list[str]) -> str:
        out = self.name("product")
        node = helper.make_node("MatMulNBits", inputs, [out], domain=MICROSOFT, accuracy_level=_ACCURACY_LEVEL)
        node.attribute.extend(_reference(name, name, onnx.AttributeProto.INT) for name in _SAME)
        self.nodes.append(node)
        return out


def _reference(name: str, to: str, kind: onnx.AttributeProto.AttributeType) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, ref_attr_name=to, type=kind)
