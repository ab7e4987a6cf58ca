"""int8 by ONNX Runtime's quantizer. Runs in a child process: see ``quantize``."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as ort
from onnxruntime.quantization.calibrate import save_tensors_data
from onnxruntime.quantization.shape_inference import quant_pre_process

from accel.converters.quantize import QuantizeFailed, Task, calibration_feeds

_BATCH = 4

# Of the histograms: with the library's 128 an outlier can't be told from the values it dwarfs.
_BINS = 2048

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
        return _static(task, task.config.ops or _PRODUCTS, ort.QuantType.QUInt8, inputs_only=True)
    return _static(task, task.config.ops or (*_PRODUCTS, *_BETWEEN), ort.QuantType.QUInt8)


def run_symmetric(task: Task) -> dict[str, Any]:
    """QDQ for TensorRT: int8 without zero points in front of weight products, outputs and biases as they were."""
    return _static(task, task.config.ops or _PRODUCTS, ort.QuantType.QInt8, inputs_only=True, symmetric=True)


def run_dynamic(task: Task) -> dict[str, Any]:
    """int8 weights; activations are quantized as they come. Only products with weights gain by it on CPUs."""
    config = task.config
    # The quantizer turns a Gemm into a MatMul of this name before it looks at what to leave alone.
    excluded = [name for own in task.excluded for name in (own, f"{own}_MatMul")]
    ort.quantize_dynamic(
        str(_preprocessed(task)),
        str(task.out),
        op_types_to_quantize=list(config.ops or ("MatMul", "Gemm", "LSTM")),
        per_channel=config.per_channel,
        reduce_range=False,
        weight_type=ort.QuantType.QInt8,
        nodes_to_exclude=excluded,
        use_external_data_format=_is_large(task.path),
        extra_options={"MatMulConstBOnly": True},
    )
    return {}


def _static(
    task: Task, ops: tuple[str, ...], activations: Any, *, inputs_only: bool = False, symmetric: bool = False
) -> dict[str, Any]:
    """``inputs_only``: quantize what goes into products with constant weights, and nothing else."""
    config = task.config
    found = _smoothed(task, ops) if inputs_only and task.transformer and config.smooth else {}
    path = _preprocessed(task)
    ranges = path.with_name("ranges.json")
    excluded = list(task.excluded)
    options: dict[str, Any] = {"ActivationSymmetric": symmetric, "WeightSymmetric": True}
    if inputs_only:
        excluded += _without_weights(path, ops)
        options["OpTypesToExcludeOutputQuantization"] = list(ops)
    if symmetric:
        options["QuantizeBias"] = False
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
        nodes_to_exclude=excluded,
        calibrate_method=_METHODS[config.calibration],
        use_external_data_format=_is_large(task.path),
        extra_options=options,
    )
    if inputs_only:
        _spare_bystanders(task.out, ops, set(excluded))
        found["products_left"] = len(excluded) - len(task.excluded)
    return found


def _smoothed(task: Task, ops: tuple[str, ...]) -> dict[str, Any]:
    from accel.converters.onnx_write import write_onnx
    from accel.converters.quantize_smooth import smooth

    model = onnx.load(str(task.path))
    excluded = {*task.excluded, *_without_weights(task.path, ops)}
    count = smooth(model, ops, excluded, calibration_feeds(task, _BATCH), task.config.smooth)
    write_onnx(model, task.path)
    return {"smoothed": count}


def _without_weights(path: Path, ops: tuple[str, ...]) -> list[str]:
    """Products of two activations: the two of attention."""
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [n.name for n in graph.node if n.op_type in ops and len(n.input) > 1 and n.input[1] not in constants]


def _spare_bystanders(path: Path, ops: tuple[str, ...], excluded: set[str]) -> None:
    """The quantizer gives the quantized tensor to everyone who reads it; a residual beside a product reads the
    original again, as it would otherwise carry the rounding of every layer on."""
    model = onnx.load(str(path), load_external_data=False)
    quantized = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    originals = {
        n.output[0]: quantized[n.input[0]]
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in quantized
    }
    for node in model.graph.node:
        if node.op_type not in ops or node.name in excluded:
            for position, name in enumerate(node.input):
                node.input[position] = originals.get(name, name)
    for value in model.graph.output:
        if value.name in originals:
            raise QuantizeFailed(
                f"the output {value.name!r} would be quantized; leave the node that makes it with keep"
            )
    onnx.save(model, str(path))


def _calibrate(task: Task, path: Path, ops: tuple[str, ...], ranges: Path, *, symmetric: bool) -> None:
    """Batch by batch, so that only one batch of activations is in memory, and batches may differ in their shapes."""
    config = task.config
    extra: dict[str, Any] = {"symmetric": symmetric}
    if config.calibration == "percentile":
        extra |= {"percentile": config.percentile, "num_bins": _BINS}
    elif config.calibration == "entropy":
        extra |= {"num_bins": _BINS, "num_quantized_bins": 128}
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
