"""Packs products of the same value with several weights into one product, which starts the threads once."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import onnx

from accel.sources.onnx.weights import weight_array

from .wires import Wires

# The packed weights are in memory until the model is written.
_MOST_BYTES = 4 << 30


def pack_products(wires: Wires) -> int:
    """Replaces all products of a value with constant matrices, such as those of queries, keys and values or of gate and
    up, by one product and a Split. Returns the number of packed products."""
    groups: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in wires.nodes:
        if node.op_type == "MatMul" and _is_matrix(wires, node.input[1]):
            groups[node.input[0]].append(node)
    packed = [nodes for nodes in groups.values() if len(nodes) > 1]
    names = {node.input[1] for nodes in packed for node in nodes}
    if sum(4 * math.prod(wires.constants[name].dims) for name in names) > _MOST_BYTES:
        return 0
    for nodes in packed:
        first = nodes[0]
        tensors = [wires.constants[node.input[1]] for node in nodes]
        weights = wires.constant(np.concatenate([weight_array(tensor) for tensor in tensors], axis=1), "packed")
        product = wires.instead(first, "MatMul", [first.input[0], weights])
        sizes = wires.constant(np.array([tensor.dims[1] for tensor in tensors]))
        wires.instead(first, "Split", [product, sizes], [node.output[0] for node in nodes], axis=-1)
    return len(packed)


def _is_matrix(wires: Wires, name: str) -> bool:
    tensor = wires.constants.get(name)
    return tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2
