"""Quantizes models to int8 with ONNX Runtime's static quantizer. ``quantize`` runs this module in a child process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.quantization as ort
from onnxruntime.quantization.calibrate import TensorsData, save_tensors_data
from onnxruntime.quantization.shape_inference import quant_pre_process

from accel.runtimes.onnx_rounded import elem_types, tensor_types
from accel.sources.onnx.file import read_proto
from accel.sources.onnx.weights import read_detached
from accel.spelling import option

from .calibrate import Histograms, collect
from .dynamic.plain import with_shapes
from .histogram import value_range
from .products import PRODUCTS
from .stage import QuantizeFailed, Task, calibration_feeds

_BATCH = 4

# Between two convolutions, these operators are quantized as well, so that values stay int8 from one convolution to the
# next. Softmax, normalizations and Where stay float. The large mask values of a Where would stretch the int8 range.
_BETWEEN = (
    "Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul", "Pad",
    "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def run_static(task: Task) -> dict[str, Any]:
    """Quantizes the model in QDQ form for ONNX Runtime on CPUs. Weights become int8, and activations become uint8 with
    a zero point. Returns the notes."""
    if task.transformer:
        # In a transformer, only products are quantized, because other quantized operators cost more time than they
        # save.
        return _static(task, task.config.ops or PRODUCTS, ort.QuantType.QUInt8, inputs_only=True)
    return _static(task, task.config.ops or (*PRODUCTS, *_BETWEEN), ort.QuantType.QUInt8)


def run_symmetric(task: Task) -> dict[str, Any]:
    """Quantizes the inputs of products with constant weights to int8 for TensorRT, in QDQ form without zero points.

    Outputs and biases stay float. Returns the notes.
    """
    return _static(task, task.config.ops or PRODUCTS, ort.QuantType.QInt8, inputs_only=True, symmetric=True)


def _static(
    task: Task, ops: tuple[str, ...], activations: Any, *, inputs_only: bool = False, symmetric: bool = False
) -> dict[str, Any]:
    """Runs ONNX Runtime's static quantization. ``inputs_only`` quantizes only the inputs of products with constant
    weights."""
    config = task.config
    found = smoothed(task, ops) if inputs_only and task.transformer and config.smooth else {}
    path = _preprocessed(task)
    ranges = path.with_name("ranges.json")
    excluded = list(task.excluded)
    options: dict[str, Any] = {"ActivationSymmetric": symmetric, "WeightSymmetric": True}
    if not inputs_only:
        excluded += _around(path, ops, set(excluded))
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
        reduce_range=bool(config.reduce_range),
        activation_type=activations,
        weight_type=ort.QuantType.QInt8,
        nodes_to_exclude=excluded,
        calibrate_method=ort.CalibrationMethod.MinMax,  # this method is not used, because accel passes its own ranges
        use_external_data_format=_is_large(task.path),
        extra_options=options,
    )
    if inputs_only:
        _spare_bystanders(task.out, ops, set(excluded))
        found["products_left"] = len(excluded) - len(task.excluded)
    elif excluded:
        model = onnx.load(str(task.out), load_external_data=False)
        _read_originals(model, lambda node: node.name in excluded)
        onnx.save(model, str(task.out))
    return found


def smoothed(task: Task, ops: tuple[str, ...]) -> dict[str, Any]:
    """Smooths the model file of ``task`` in place, and returns the notes."""
    from ..graph.write import write_onnx
    from .smooth import smooth

    model = read_detached(task.path)
    excluded = {*task.excluded, *_without_weights(task.path, ops)}
    kept = task.unfinished and task.unfinished / "channels.npz"
    count = smooth(model, ops, excluded, partial(calibration_feeds, task, _BATCH), task.config.smooth, kept)
    write_onnx(model, task.path)
    return {"smoothed": count}


def _without_weights(path: Path, ops: tuple[str, ...]) -> list[str]:
    """Returns the names of the products of two activations, such as the products in attention."""
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [n.name for n in graph.node if n.op_type in ops and len(n.input) > 1 and n.input[1] not in constants]


def _around(path: Path, ops: tuple[str, ...], excluded: set[str]) -> list[str]:
    """Returns the names of the nodes that produce the input or read the output of an excluded product.

    A quantized neighbor would round the input or output of the excluded product.
    """
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    read = {node.input[0] for node in nodes if node.name in excluded and node.op_type in PRODUCTS}
    made = {name for node in nodes if node.name in excluded for name in node.output}
    between = (node for node in nodes if node.op_type in ops and node.op_type not in PRODUCTS)
    return [n.name for n in between if not (made.isdisjoint(n.input) and read.isdisjoint(n.output))]


def _spare_bystanders(path: Path, ops: tuple[str, ...], excluded: set[str]) -> None:
    """Connects all nodes except the quantized products to the original, unquantized tensors.

    If a residual connection read the quantized tensors, it would accumulate the rounding of every layer. Raises
    ``QuantizeFailed`` if an output of the model would be quantized.
    """
    model = onnx.load(str(path), load_external_data=False)
    originals = _read_originals(model, lambda node: node.op_type not in ops or node.name in excluded)
    for value in model.graph.output:
        if value.name in originals:
            raise QuantizeFailed(
                f"the output {value.name!r} would be quantized; pass {option('quantize', ['keep=NAME'])} to keep the "
                "node that computes this output in float"
            )
    onnx.save(model, str(path))


def _read_originals(model: onnx.ModelProto, spared: Callable[[onnx.NodeProto], bool]) -> dict[str, str]:
    """Makes the ``spared`` nodes read the original tensors instead of the dequantized tensors.

    ONNX Runtime's quantizer makes all nodes read the dequantized tensors. Returns a dict that maps the name of each
    dequantized tensor to the name of the original tensor.
    """
    quantized = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    originals = {
        n.output[0]: quantized[n.input[0]]
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[0] in quantized
    }
    for node in model.graph.node:
        if spared(node):
            for position, name in enumerate(node.input):
                node.input[position] = originals.get(name, name)
    return originals


def _calibrate(task: Task, path: Path, ops: tuple[str, ...], ranges: Path, *, symmetric: bool) -> None:
    """Writes the file ``ranges`` for ONNX Runtime's quantizer. The file has the value range of each tensor that
    quantized nodes read or produce."""
    config = task.config
    model = read_detached(path)
    histograms = Histograms(model, _tensors(model, ops))
    collect(histograms, partial(calibration_feeds, task, _BATCH), task.unfinished and task.unfinished / "ranges.npz")
    found = {}
    for name, histogram in histograms.found.items():
        ends = value_range(histogram, config.calibration, percentile=config.percentile, symmetric=symmetric)
        low, high = (np.array(end, np.float32) for end in ends)
        found[name] = (low, high)
    save_tensors_data(TensorsData(ort.CalibrationMethod.MinMax, found), ranges)


def _tensors(model: onnx.ModelProto, ops: tuple[str, ...]) -> list[str]:
    """Returns the names of the float32 activations that nodes with the operators ``ops`` read or produce."""
    types = elem_types(tensor_types(model).graph)
    constants = {tensor.name for tensor in model.graph.initializer}
    around = (name for node in model.graph.node if node.op_type in ops for name in (*node.input, *node.output))
    floats = (name for name in around if types.get(name) == onnx.TensorProto.FLOAT and name not in constants)
    return list(dict.fromkeys(floats))


def _preprocessed(task: Task) -> Path:
    """Infers the shapes in the model with ONNX Runtime, and returns the path of the resulting file. If the inference
    fails, returns the path of the unchanged model."""
    logging.getLogger().setLevel(logging.ERROR)
    inferred = task.path.with_name("inferred.onnx")
    if _is_large(task.path):  # unlike quant_pre_process, ``with_shapes`` doesn't copy the weights three times
        inferred.write_bytes(with_shapes(read_proto(task.path)).SerializeToString())
        return inferred
    with contextlib.suppress(Exception):
        quant_pre_process(
            str(task.path),
            str(inferred),
            skip_optimization=True,
        )
        return inferred
    return task.path


def _is_large(path: Path) -> bool:
    from ..graph.write import SINGLE_FILE_BYTES

    return sum(file.stat().st_size for file in path.parent.glob("*.weights")) > SINGLE_FILE_BYTES // 2
