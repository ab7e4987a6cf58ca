"""Quantizes the weights of large matrix products to 8 or 4 bits, with standard ONNX operators that TensorRT takes.

Activations stay float. A DequantizeLinear restores the weights, with one scale for each block of a column.
``quantize`` runs this module in a child process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.signature import numpy_dtype
from accel.sources.onnx.weights import read_detached, weight_array

from ..graph.write import write_onnx
from .products import channel_axis, drop_unread, product_weights
from .stage import Task

# Maps each mode to the dtype and the largest value of quantized weights. The range is symmetric, so that 0 stays 0.
_STEPS = {"int4-weights": ("int4", 7), "int8-weights": ("int8", 127)}


def run_blocks(task: Task) -> dict[str, Any]:
    """Quantizes weights symmetrically, with one scale for every ``block_size`` weights of a column.

    Products stay float if the length of their columns is not a multiple of ``block_size``. Returns the stage's notes.
    """
    model = read_detached(task.path)
    size = task.config.block_size
    large = {name for name, count in product_weights(model) if count >= task.config.smallest}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    done: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.name in large and node.name not in task.excluded:
            name, axis = node.input[1], 1 - channel_axis(node)
            if tensors[name].dims[axis] % size == 0:
                if (name, axis) not in done:
                    nodes.append(_dequantized(model, tensors[name], axis, size, task.config.mode))
                    done[name, axis] = nodes[-1].output[0]
                node.input[1] = done[name, axis]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    drop_unread(model)
    write_onnx(model, task.out)
    return {"block_size": size}


def _dequantized(model: onnx.ModelProto, tensor: onnx.TensorProto, axis: int, size: int, mode: str) -> onnx.NodeProto:
    """Returns the DequantizeLinear node that restores the weights. Adds the node's inputs to ``model``."""
    dtype, top = _STEPS[mode]
    value = np.moveaxis(weight_array(tensor), axis, 0)
    blocks = value.reshape(-1, size, value.shape[1])
    scales = np.maximum(np.abs(blocks).max(axis=1), np.finfo(np.float32).tiny) / top
    small = np.clip(np.rint(blocks / scales[:, None]), -top, top).reshape(value.shape)
    name = tensor.name
    arrays = {
        f"{name}/{dtype}": np.moveaxis(small, 0, axis).astype(numpy_dtype(dtype)),
        f"{name}/scales": np.moveaxis(scales, 0, axis).astype(np.float32),
    }
    for own, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), own))
    return helper.make_node(
        "DequantizeLinear", list(arrays), [f"{name}/dequantized"], name=f"{name}/dequantize", axis=axis, block_size=size
    )
