"""Gives a sigmoid all its digits if a logarithm follows."""

from __future__ import annotations

from itertools import count

import onnx
from onnx import NodeProto, TensorProto, helper

# These operators may stand between the sigmoid and the logarithm, as in log(sigmoid(x).clamp(min=1e-12)).
_BETWEEN = {
    "Add", "Cast", "Clip", "Concat", "Div", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity",
    "Max", "Min", "Mul", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def exact_sigmoids(model: onnx.ModelProto) -> None:
    """Writes 1 / (1 + e^-x) instead of Sigmoid, if a Log takes the result.

    The error of ONNX Runtime's Sigmoid is about 1e-7, whatever the result. Below -16, this is more than the result, and
    the logarithm is wrong or infinite.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [name for node in graph.node if node.op_type == "Log" for name in node.input]
    found: dict[str, NodeProto] = {}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type == "Sigmoid":
            found[name] = node
        elif node.op_type in _BETWEEN:
            waiting.extend(node.input)
    if not found:
        return
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    taken, number = {*makers, *(tensor.name for tensor in graph.initializer)}, count()
    nodes: list[NodeProto] = []
    for node in graph.node:
        dtype = types.get(node.output[0], TensorProto.UNDEFINED)
        if node.output[0] in found and dtype in (TensorProto.FLOAT, TensorProto.DOUBLE):
            names = [f"exact_sigmoid_{next(number)}" for _ in range(4)]
            while taken & set(names):
                names = [f"exact_sigmoid_{next(number)}" for _ in range(4)]
            one, negative, power, sum_ = names
            graph.initializer.append(helper.make_tensor(one, dtype, [], [1.0]))
            nodes.append(helper.make_node("Neg", [node.input[0]], [negative]))
            nodes.append(helper.make_node("Exp", [negative], [power]))
            nodes.append(helper.make_node("Add", [power, one], [sum_]))
            nodes.append(helper.make_node("Reciprocal", [sum_], [node.output[0]], name=node.name))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
