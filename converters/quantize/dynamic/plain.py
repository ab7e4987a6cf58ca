"""Quantizes weights to int8, and activations at run time. ``quantize`` runs this module in a child process.

Uses the classes of ONNX Runtime's quantizer. ONNX Runtime's own function ``quantize_dynamic`` writes and reads the
model three times, and quantizes the channels of a weight one by one.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, base_quantizer, onnx_quantizer
from onnxruntime.quantization.quant_utils import (
    TENSOR_NAME_QUANT_SUFFIX,
    QuantizationMode,
    find_by_name,
    get_qmin_qmax_for_qType,
)

from accel.runtimes.onnx_rounded import tensor_types
from accel.sources.onnx.file import read_proto

from ...graph.write import write_onnx
from ..products import turn_matrices
from ..stage import Task


def run_dynamic(task: Task) -> dict[str, Any]:
    """Quantizes products with constant weights, because dynamic quantization speeds up only these products on CPUs."""
    config = task.config
    logging.getLogger().setLevel(logging.ERROR)
    for module in (base_quantizer, onnx_quantizer):
        module.save_and_reload_model_with_shape_infer = with_shapes
    # The quantizer turns a Gemm into a MatMul called ``<name>_MatMul`` before it applies the list of excluded nodes.
    excluded = [name for own in task.excluded for name in (own, f"{own}_MatMul")]
    model = read_proto(task.path, weights=True)
    turn_matrices(model)
    quantizer = DynamicQuantizer(
        with_shapes(model),
        config.per_channel,
        bool(config.reduce_range),
        QuantizationMode.IntegerOps,
        False,
        QuantType.QInt8,
        QuantType.QUInt8,
        None,
        [],
        excluded,
        list(config.ops or ("MatMul", "Gemm", "LSTM")),
        {"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    quantizer.quantize_model()
    write_onnx(quantizer.model.model, task.out)
    return {}


class DynamicQuantizer(onnx_quantizer.ONNXQuantizer):  # type: ignore[misc]
    """Quantizes all channels of a weight at once. The results are the same.

    A stack of matrices gets scales for each matrix and channel. ONNX Runtime's own quantizer gives it a scale for each
    channel, which MatMulInteger doesn't take.
    """

    def quantize_weight_per_channel_impl(
        self, weight_name: str, weight_qType: Any, channel_axis: int, reduce_range: bool = True, *_: Any
    ) -> tuple[str, str, str]:
        """Adds the int8 weight, its scales and its zero points to the model, and returns their names."""
        initializer = find_by_name(weight_name, self.model.initializer())
        weights = onnx.numpy_helper.to_array(initializer)
        axis = channel_axis % weights.ndim
        stacked = weights.ndim > 2 and axis == weights.ndim - 1
        others = (axis - 1,) if stacked else tuple(other for other in range(weights.ndim) if other != axis)
        _, highest = get_qmin_qmax_for_qType(weight_qType, self.reduce_range and reduce_range, symmetric=True)
        largest = np.maximum(weights.max(others, initial=0), -weights.min(others, initial=0))
        exact = largest.astype(np.float64) / float(highest)
        scales = np.where(exact < np.finfo(weights.dtype).tiny, 1.0, exact).astype(weights.dtype)
        steps = np.round(weights / np.expand_dims(scales, others))
        small = np.clip(steps, -128, 127, out=steps).astype(np.int8)
        names = (weight_name + TENSOR_NAME_QUANT_SUFFIX, weight_name + "_zero_point", weight_name + "_scale")
        if stacked:
            scales = np.expand_dims(scales, others)
        values = (small, np.zeros(scales.shape, np.int8), scales)
        self.model.initializer_extend(
            [onnx.numpy_helper.from_array(value, name) for name, value in zip(names, values, strict=True)]
        )
        return names


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infers the shapes of the tensors of ``model`` again, in place, and returns ``model``."""
    known = tensor_types(model).graph.value_info
    del model.graph.value_info[:]
    model.graph.value_info.extend(known)
    return model
