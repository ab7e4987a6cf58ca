"""Protects padding in front of a MaxPool from ONNX Runtime."""

from __future__ import annotations

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

# ONNX Runtime may move these operators to another place.
_MOVABLE = ("Cast", "Transpose")


def keep_zero_padding(model: onnx.ModelProto) -> None:
    """Pads with -0 instead of 0 in front of each MaxPool.

    ONNX Runtime merges a Pad with 0 into the MaxPool after it, although a MaxPool pads with the lowest number. ONNX
    Runtime compares the bits of the number, so it doesn't merge a Pad with -0.
    """
    graph = model.graph
    pooled = {node.input[0] for node in graph.node if node.op_type == "MaxPool"}
    for node in reversed(graph.node):
        if node.op_type in _MOVABLE and node.output[0] in pooled:
            pooled.add(node.input[0])
    pads = [node for node in graph.node if node.op_type == "Pad" and node.output[0] in pooled]
    pads = [node for node in pads if len(node.input) in (2, 3) and _pads_with_zero(node, graph)]
    if not pads:
        return
    types = {value.name: value.type.tensor_type.elem_type for value in _values(model)}
    for node in pads:
        dtype = types.get(node.output[0], TensorProto.UNDEFINED)
        if dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):
            name = f"{node.output[0]}_negative_zero"
            graph.initializer.append(helper.make_tensor(name, dtype, [], [-0.0]))
            node.input[2:] = [name]


def _pads_with_zero(node: NodeProto, graph: onnx.GraphProto) -> bool:
    name = next(iter(node.input[2:]), "")
    if not name:
        return True
    constants = (one for one in graph.node if one.op_type == "Constant" and one.output[0] == name)
    given = [tensor for tensor in graph.initializer if tensor.name == name]
    given += [field.t for one in constants for field in one.attribute if field.name == "value"]
    return any(not numpy_helper.to_array(tensor).any() for tensor in given)


def _values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return [*graph.input, *graph.value_info, *graph.output]
