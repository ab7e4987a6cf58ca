"""Finds matrix products and convolutions with constant weights in a graph, and the layout of the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from accel.sources.onnx.value_spec import optional_inputs

if TYPE_CHECKING:
    import onnx

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")

_FLOAT = 1  # TensorProto.FLOAT


def layers_to_quantize(model: onnx.ModelProto, excluded: Collection[str], ops: tuple[str, ...]) -> list[onnx.NodeProto]:
    """Returns the products among ``ops`` that have constant float32 weights and are not ``excluded`` by name."""
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == _FLOAT}
    weights -= {spec.name for spec in optional_inputs(model)}  # the default of an input is no constant
    return [
        node
        for node in model.graph.node
        if node.op_type in ops and node.op_type in PRODUCTS and node.input[1] in weights and node.name not in excluded
    ]


def channel_axis(node: onnx.NodeProto) -> int:
    """Returns the axis of the weights that has one entry for each output channel."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return 1


def drop_unread(model: onnx.ModelProto) -> None:
    """Removes unused initializers."""
    from ..graph.subgraphs import reads

    read = {name for node in model.graph.node for name in reads(node)} | {value.name for value in model.graph.output}
    left = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)


def turn_matrices(model: onnx.ModelProto) -> None:
    """Transposes the constant matrix of each Gemm with ``transB``, which becomes 0.

    ONNX Runtime transposes such a matrix in place for each Gemm that reads it, so that it would be wrong for the other
    nodes that read it. A matrix that other nodes read as it is stays, and the Gemms get a transposed copy.
    """
    import numpy as np
    from onnx import numpy_helper

    from accel.sources.onnx.weights import weight_array

    from ..graph.subgraphs import reads

    gemms: dict[str, list[tuple[onnx.NodeProto, onnx.AttributeProto]]] = {}
    for node in model.graph.node:
        for flag in node.attribute:
            if node.op_type == "Gemm" and flag.name == "transB" and flag.i:
                gemms.setdefault(node.input[1], []).append((node, flag))
    uses = Counter(name for node in model.graph.node for name in reads(node))
    uses.update(value.name for value in (*model.graph.input, *model.graph.output))
    for tensor in [one for one in model.graph.initializer if one.name in gemms]:
        alone = uses[tensor.name] == len(gemms[tensor.name])
        name = tensor.name if alone else f"{tensor.name}/transposed"
        matrix = numpy_helper.from_array(np.ascontiguousarray(weight_array(tensor).T), name)
        for node, flag in gemms[tensor.name]:
            flag.i = 0
            node.input[1] = name
        if alone:
            tensor.CopyFrom(matrix)
        else:
            model.graph.initializer.append(matrix)


def product_weights(model: onnx.ModelProto) -> list[tuple[str, int]]:
    """Returns the name of each MatMul and Gemm with a constant float32 matrix, and the number of its weights."""
    given = {spec.name for spec in optional_inputs(model)}  # the default of an input is no constant
    weights = {t.name: t for t in model.graph.initializer if t.data_type == _FLOAT and len(t.dims) == 2}
    found = []
    for node in model.graph.node:
        turned = any(a.name == "transA" and a.i for a in node.attribute)
        if node.op_type in ("MatMul", "Gemm") and not turned and node.input[1] in weights.keys() - given:
            found.append((node.name, math.prod(weights[node.input[1]].dims)))
    return found
