"""Quantizes the inputs of matrix products with constant weights to 8-bit floats (E4M3) for TensorRT.

E4M3 has 4 exponent bits and 3 mantissa bits, and its largest number is 448 (Micikevicius et al., "FP8 formats for deep
learning", arXiv 2209.05433). The steps between int8 numbers are equal. The steps between E4M3 numbers grow with the
value, so that outliers don't make small values less precise. ``quantize`` runs this module in a child process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from accel.signature import numpy_dtype
from accel.sources.onnx.weights import read_detached, weight_array

from ..graph.write import write_onnx
from .calibrate import Histograms, collect
from .histogram import value_range
from .products import channel_axis, drop_unread, layers_to_quantize
from .stage import Task, calibration_feeds

_BATCH = 4

# Only matrix products are quantized. TensorRT has few fp8 kernels for convolutions, and fp8 convolutions need a
# separate requantization.
_PRODUCTS = ("Gemm", "MatMul")

_LARGEST = 448.0


def run_fp8(task: Task) -> dict[str, Any]:
    """Inserts QuantizeLinear and DequantizeLinear nodes before matrix products. Returns the stage's notes.

    An activation has one scale, and a weight tensor has one scale for each channel. Zero points are 0. Biases and
    outputs stay float.
    """
    config = task.config
    model = read_detached(task.path)
    layers = layers_to_quantize(model, task.excluded, config.ops or _PRODUCTS)
    if not layers:
        write_onnx(model, task.out)
        return {}
    histograms = Histograms(model, list(dict.fromkeys(node.input[0] for node in layers)))
    collect(histograms, partial(calibration_feeds, task, _BATCH), task.unfinished and task.unfinished / "ranges.npz")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    written = _Written(model)
    before: dict[str, list[onnx.NodeProto]] = {}  # maps a node's name to the new nodes before that node
    done: dict[tuple[str, int], str] = {}
    for node in layers:
        own = before.setdefault(node.name, [])
        source, weights = node.input[0], node.input[1]
        if (source, -1) not in done:
            _, top = value_range(
                histograms.found[source], config.calibration, percentile=config.percentile, symmetric=True
            )
            done[source, -1] = written.activation(source, top, own)
        axis = channel_axis(node)
        if (weights, axis) not in done:
            tensor = tensors[weights]
            done[weights, axis] = written.weight(tensor, axis if config.per_channel else None, own)
        node.input[0], node.input[1] = done[source, -1], done[weights, axis]
    nodes = [one for node in model.graph.node for one in (*before.get(node.name, ()), node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    drop_unread(model)
    write_onnx(model, task.out)
    return {}


class _Written:
    """Adds quantized tensors and their nodes to a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model

    def activation(self, name: str, top: float, nodes: list[onnx.NodeProto]) -> str:
        """Appends a QuantizeLinear and a DequantizeLinear to ``nodes``, and returns the name of the rounded tensor.

        The new nodes round the tensor ``name``, whose largest absolute value is ``top``.
        """
        scale = np.array(_scale(np.array(top)), np.float32)
        of = [self._constant(f"{name}/scale", scale), self._zero(f"{name}/zero", [])]
        nodes.append(helper.make_node("QuantizeLinear", [name, *of], [f"{name}/fp8"], name=f"{name}/quantize"))
        nodes.append(
            helper.make_node(
                "DequantizeLinear", [f"{name}/fp8", *of], [f"{name}/dequantized"], name=f"{name}/dequantize"
            )
        )
        return f"{name}/dequantized"

    def weight(self, tensor: onnx.TensorProto, axis: int | None, nodes: list[onnx.NodeProto]) -> str:
        """Adds ``tensor`` in fp8, with one scale for each index along ``axis``. Returns the name of the dequantized
        tensor."""
        value = weight_array(tensor)
        others = tuple(i for i in range(value.ndim) if i != axis) if axis is not None else None
        scales = _scale(np.abs(value).max(axis=others))
        shape = [-1 if i == axis else 1 for i in range(value.ndim)] if axis is not None else []
        small = np.clip(value / scales.reshape(shape), -_LARGEST, _LARGEST).astype(numpy_dtype("float8_e4m3fn"))
        name = tensor.name
        of = [
            self._constant(f"{name}/fp8", small),
            self._constant(f"{name}/scales", np.asarray(scales, np.float32)),
            self._zero(f"{name}/zero", list(scales.shape)),
        ]
        node = helper.make_node("DequantizeLinear", of, [f"{name}/dequantized"], name=f"{name}/dequantize")
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        nodes.append(node)
        return f"{name}/dequantized"

    def _constant(self, name: str, value: np.ndarray) -> str:
        self._model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def _zero(self, name: str, shape: list[int]) -> str:
        """Adds a zero point, whose dtype sets the type of the quantized tensor. An fp8 zero point is always 0."""
        self._model.graph.initializer.append(
            helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, shape, b"\0" * int(np.prod(shape)), raw=True)
        )
        return name


def _scale(top: np.ndarray) -> np.ndarray:
    """Returns the scale that maps 448 to ``top``, or 1 if ``top`` is 0."""
    return np.where(top > 0, np.maximum(top / _LARGEST, np.finfo(np.float32).tiny), 1.0).astype(np.float32)
