"""Quantizes models to int8 with NNCF for OpenVINO. ``quantize`` runs this module in a child process."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import nncf
import numpy as np
import onnx

from accel.sources.onnx.file import external_files, read_proto

from ..graph.write import write_onnx
from .stage import Task, calibration_batches, calibration_feeds


def run_nncf(task: Task) -> dict[str, Any]:
    """Quantizes activations to uint8 or int8 and weights to int8, by NNCF's rules for OpenVINO. Returns the notes."""
    nncf.set_log_level(logging.ERROR)
    config = task.config
    model = read_proto(task.path)
    feeds = _Feeds(task)
    ignored = [re.escape(name) for name in task.excluded]
    if config.ops:
        ignored += [re.escape(node.name) for node in model.graph.node if node.op_type not in config.ops]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NNCF and torch warn of deprecations
        made = nncf.quantize(
            model,
            nncf.Dataset(feeds),
            subset_size=calibration_batches(task, 1),
            model_type=nncf.ModelType.TRANSFORMER if task.transformer else None,
            ignored_scope=nncf.IgnoredScope(patterns=ignored, validate=False) if ignored else None,
            advanced_parameters=_advanced(task, weights_folder(task, model)),
        )
    changed = unsigned_where_pooled(made)
    write_onnx(made, task.out)
    return {"made_unsigned": changed} if changed else {}


def weights_folder(task: Task, model: onnx.ModelProto) -> dict[str, Any]:
    """Returns NNCF's parameter for the folder of external weights, or {} if the model has no external weights."""
    from nncf.onnx.quantization.backend_parameters import BackendParameters

    return {BackendParameters.EXTERNAL_DATA_DIR: str(task.path.parent)} if external_files(model) else {}


_POOLS = ("MaxPool", "AveragePool")


def unsigned_where_pooled(model: onnx.ModelProto) -> int:
    """Turns int8 activations of ``model`` into uint8, and adds 128 to their zero points so that the results don't
    change.

    OpenVINO (2026.4) gives wrong results if a pooling node and another node read the same int8 tensor. The function
    changes the model only in this case. In a U-Net, NNCF quantizes a skip tensor to int8 if a Concat joins the skip
    tensor with a tensor that may be negative. Returns the number of tensors that were changed.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    signed = []
    for node in model.graph.node:
        zero = constants.get(node.input[2]) if node.op_type == "QuantizeLinear" and len(node.input) > 2 else None
        if zero is not None and zero.data_type == onnx.TensorProto.INT8 and node.input[0] not in constants:
            signed.append(node)
    quantized = {node.output[0] for node in signed}
    restored = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in quantized]
    source = {node.output[0]: node.input[0] for node in restored}
    readers: dict[str, list[str]] = {}  # maps each quantized tensor to the operators that read the tensor
    for node in model.graph.node:
        for name in node.input:
            if name in source:
                readers.setdefault(source[name], []).append(node.op_type)
    if not any(len(ops) > 1 and set(ops) & set(_POOLS) for ops in readers.values()):
        return 0
    unsigned: dict[str, str] = {}  # maps each old zero point, which several nodes may share, to the new zero point
    for node in (*signed, *restored):
        name = node.input[2]
        if name not in unsigned:
            values = onnx.numpy_helper.to_array(constants[name]).astype(np.int32) + 128
            unsigned[name] = next(n for n in (f"{name}_u8", f"{name}_u8_") if n not in constants)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.uint8), unsigned[name]))
        node.input[2] = unsigned[name]
    used = {name for node in model.graph.node for name in node.input}
    spent = (set(unsigned) - used) | quantized  # entries to delete: unused zero points, tensors with a changed dtype
    for field in (model.graph.initializer, model.graph.value_info):
        for index in reversed(range(len(field))):
            if field[index].name in spent:
                del field[index]
    return len(signed)


class _Feeds:
    """Yields the samples one at a time. NNCF reads the samples again in each iteration."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return calibration_feeds(self._task, 1)


def _advanced(task: Task, backend: dict[str, Any]) -> Any:
    """Returns NNCF's parameters for the range estimator, for per-channel weights, and for ``weights_folder``."""
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters
    from nncf.quantization.range_estimator import (
        AggregatorType,
        RangeEstimatorParameters,
        StatisticsCollectorParameters,
        StatisticsType,
    )

    config = task.config
    parameters = AdvancedQuantizationParameters(
        weights_quantization_params=QuantizationParameters(per_channel=config.per_channel),
        backend_params=backend,
    )
    if config.calibration == "percentile":
        outside = 1 - config.percentile / 100
        low, high = (
            StatisticsCollectorParameters(
                statistics_type=StatisticsType.QUANTILE,
                aggregator_type=AggregatorType.MEAN,
                quantile_outlier_prob=outside,
            )
            for _ in range(2)
        )
        parameters.activations_range_estimator_params = RangeEstimatorParameters(low, high)
    return parameters
