"""int8 by ONNX Runtime's quantizer. Runs in a child process: see ``quantize``."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime.quantization as ort
from onnxruntime.quantization.calibrate import save_tensors_data
from onnxruntime.quantization.shape_inference import quant_pre_process

from accel.converters.quantize import Task, calibration_feeds

_BATCH = 4

_METHODS = {
    "minmax": ort.CalibrationMethod.MinMax,
    "entropy": ort.CalibrationMethod.Entropy,
    "percentile": ort.CalibrationMethod.Percentile,
}

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")

# What lies between two convolutions: quantized as well, so that values stay int8 from one to the next. Softmax,
# normalisations and Where (whose masks would take the whole range) are not in it.
_BETWEEN = (
    "Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul", "Pad",
    "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def run_static(task: Task) -> dict[str, Any]:
    """QDQ for ONNX Runtime on CPUs: uint8 activations with a zero point, int8 weights."""
    if task.transformer:
        # Only the products: quantizing what is between them costs more than it saves.
        ops = task.config.ops or _PRODUCTS
        options = {"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": list(_PRODUCTS)}
    else:
        ops, options = task.config.ops or (*_PRODUCTS, *_BETWEEN), {}
    return _static(task, ops, ort.QuantType.QUInt8, options)


def run_symmetric(task: Task) -> dict[str, Any]:
    """QDQ for TensorRT: int8 without zero points in front of weight products, outputs and biases as they were."""
    ops = task.config.ops or _PRODUCTS
    options = {
        "ActivationSymmetric": True,
        "WeightSymmetric": True,
        "QuantizeBias": False,
        "MatMulConstBOnly": True,
        "OpTypesToExcludeOutputQuantization": list(ops),
    }
    return _static(task, ops, ort.QuantType.QInt8, options)


def run_dynamic(task: Task) -> dict[str, Any]:
    """int8 weights; activations are quantized as they come. Only products with weights gain by it on CPUs."""
    config = task.config
    ort.quantize_dynamic(
        str(_preprocessed(task)),
        str(task.out),
        op_types_to_quantize=list(config.ops or ("MatMul", "Gemm", "LSTM")),
        per_channel=config.per_channel,
        reduce_range=False,
        weight_type=ort.QuantType.QInt8,
        nodes_to_exclude=list(task.excluded),
        use_external_data_format=_is_large(task.path),
        extra_options={"MatMulConstBOnly": True},
    )
    return {}


def _static(task: Task, ops: tuple[str, ...], activations: Any, options: dict[str, Any]) -> dict[str, Any]:
    config = task.config
    path = _preprocessed(task)
    ranges = path.with_name("ranges.json")
    symmetric = bool(options.get("ActivationSymmetric"))
    _calibrate(task, path, ops, ranges, symmetric=symmetric)
    ort.quantize_static(
        str(path),
        str(task.out),
        calibration_cache_path=ranges,
        quant_format=ort.QuantFormat.QDQ,
        op_types_to_quantize=list(ops),
        per_channel=config.per_channel,
        reduce_range=False,  # with VNNI and on GPUs nothing saturates
        activation_type=activations,
        weight_type=ort.QuantType.QInt8,
        nodes_to_exclude=list(task.excluded),
        calibrate_method=_METHODS[config.calibration],
        use_external_data_format=_is_large(task.path),
        extra_options=options,
    )
    return {}


def _calibrate(task: Task, path: Path, ops: tuple[str, ...], ranges: Path, *, symmetric: bool) -> None:
    """Batch by batch, so that only one batch of activations is in memory, and batches may differ in their shapes."""
    config = task.config
    extra: dict[str, Any] = {"symmetric": symmetric}
    if config.calibration == "percentile":
        extra |= {"percentile": config.percentile, "num_bins": 2048}
    calibrator = ort.create_calibrator(
        path,
        list(ops),
        augmented_model_path=str(path.with_name("augmented_model.onnx")),
        calibrate_method=_METHODS[config.calibration],
        use_external_data_format=_is_large(path),
        extra_options=extra,
    )
    for feeds in calibration_feeds(task, _BATCH):
        calibrator.collect_data(_Once(feeds))
    save_tensors_data(calibrator.compute_data(), ranges)


class _Once(ort.CalibrationDataReader):  # type: ignore[misc]
    """One batch, as the calibrator wants to be given it."""

    def __init__(self, feeds: dict[str, np.ndarray]) -> None:
        self._left: list[dict[str, np.ndarray]] = [feeds]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def _preprocessed(task: Task) -> Path:
    """Shapes and types inferred, with ONNX Runtime's symbolic inference where it can; nothing else changed."""
    logging.getLogger().setLevel(logging.ERROR)
    inferred = task.path.with_name("inferred.onnx")
    with contextlib.suppress(Exception):
        quant_pre_process(
            str(task.path),
            str(inferred),
            skip_optimization=True,
            save_as_external_data=_is_large(task.path),
        )
        return inferred
    return task.path


def _is_large(path: Path) -> bool:
    from accel.converters.onnx_write import SINGLE_FILE_BYTES

    return sum(file.stat().st_size for file in path.parent.glob("*.weights")) > SINGLE_FILE_BYTES // 2
