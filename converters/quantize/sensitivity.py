"""Measures the sensitivity of each layer: the error of the model's outputs if only this layer is int8 or 16-bit.

A single ONNX model has every layer in all precisions. Each layer has a flag for each precision, which selects the
branch of an If. A run can therefore change one layer without loading another model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.progress import report
from accel.proof.compare import rel_l2

from .products import PRODUCTS, channel_axis, layers_to_quantize
from .stage import QuantizeConfig, Task, calibration_feeds, check_source, make_task, run_task

if TYPE_CHECKING:
    import numpy as np
    import onnx

# Outputs are compared on ``_BATCHES`` batches of ``_BATCH`` samples.
_BATCH = 4
_BATCHES = 8

# Weights are read from memory at every run. On CPUs and GPUs alike, reading a weight takes about as long as
# ``_ROWS_A_READ`` multiplications with the weight.
_ROWS_A_READ = 16


@dataclass(frozen=True)
class Sensitivity:
    """``error`` is the largest relative l2 error of an output on any batch if only this node is int8. ``error_in_base``
    is the largest relative l2 error if only this node is fp16 or bf16.

    ``work`` is the number of the node's multiply-adds for one sample. If reading the weights takes longer than the
    multiply-adds, ``work`` is the reading time, expressed as a number of multiply-adds.
    """

    node: str
    op: str
    error: float
    error_in_base: float = 0.0
    work: float = 1.0


def sensitivities(src: Artifact, config: QuantizeConfig, base: str = "fp32") -> list[Sensitivity]:
    """Returns the sensitivity of every product that ``config`` would quantize, the most sensitive first.

    ``config`` also selects the calibration method and the smoothing of transformers. The node names in the result can
    be passed as ``config.keep``. ``base`` is the precision of the layers that aren't int8. Raises the same errors as
    ``quantize`` if the source, the data or ``config`` is wrong.
    """
    from accel.sources.onnx.weights import read_detached

    model = read_detached(src.path)
    check_source(src, model, config)
    report("measuring what each layer loses in int8")
    with tempfile.TemporaryDirectory(prefix="sensitivity-") as folder:
        task = replace(make_task(src, config, model, Path(folder)), base=base)
        found: list[Sensitivity] = run_task("accel.converters.quantize.sensitivity:measure", task, model)
    return sorted(found, key=lambda one: -one.error)


def measure(task: Task) -> list[Sensitivity]:
    """Measures the sensitivity of each layer of the model of ``task``. Runs in a child process."""
    from accel.runtimes.onnx_rounded import RoundedModel
    from accel.sources.onnx.weights import read_detached

    from .calibrate import Histograms, collect
    from .ort import smoothed

    config = task.config
    if task.transformer and config.smooth:
        smoothed(task, config.ops or PRODUCTS)
    model = read_detached(task.path)
    layers = layers_to_quantize(model, task.excluded, config.ops or PRODUCTS)
    histograms = Histograms(model, list(dict.fromkeys(node.input[0] for node in layers)))
    collect(histograms, partial(calibration_feeds, task, _BATCH))
    batches = calibration_feeds(task, _BATCH)
    samples = sum(max((len(value) for value in feeds.values() if value.ndim), default=1) for feeds in batches)
    work = {node.name: _work(node, model, histograms, samples) for node in layers}
    flags = _with_all_forms(model, layers, histograms, task)
    all_forms = RoundedModel(model)
    errors = {form: dict.fromkeys((node.name for node in layers), 0.0) for form in ("int8", task.base)}
    for number, feeds in enumerate(calibration_feeds(task, _BATCH)):
        if number == _BATCHES:
            break
        wanted = all_forms.run({**feeds, **_switched(flags, None)})
        for done, (name, form) in enumerate(flags):
            report(f"computing {name} alone in {form}", (number + done / len(flags)) / _BATCHES)
            found = all_forms.run({**feeds, **_switched(flags, (name, form))})
            off = max(_relative(wanted[output], found[output]) for output in wanted)
            errors[form][name] = max(errors[form][name], off)
    return [
        Sensitivity(node.name, node.op_type, errors["int8"][node.name], errors[task.base][node.name], work[node.name])
        for node in layers
    ]


def _work(node: onnx.NodeProto, model: onnx.ModelProto, histograms: Any, samples: int) -> float:
    """Returns the number of multiply-adds of ``node`` for one sample. Every weight is used once for each position in
    the input. Positions that a stride skips don't count."""
    dims = next(tensor.dims for tensor in model.graph.initializer if tensor.name == node.input[1])
    weights = math.prod(dims)
    if node.op_type in ("Conv", "Gemm"):
        channels = dims[1 - channel_axis(node)]
    else:
        channels = dims[-2] if node.op_type == "MatMul" and len(dims) > 1 else dims[0]
    groups = next((a.i for a in node.attribute if a.name == "group"), 1) if node.op_type == "Conv" else 1
    strides = next((a.ints for a in node.attribute if a.name == "strides"), ())
    skipped = math.prod(strides) if node.op_type == "Conv" else 1
    values = float(histograms.found[node.input[0]].counts.sum()) / max(1, samples)
    return float(weights * max(values / (channels * groups) / skipped, _ROWS_A_READ))


def _switched(flags: Mapping[tuple[str, str], str], on: tuple[str, str] | None) -> dict[str, np.ndarray]:
    import numpy as np

    return {flag: np.array(which == on) for which, flag in flags.items()}


def _relative(wanted: np.ndarray, found: np.ndarray) -> float:
    import numpy as np

    if wanted.dtype.kind != "f":
        return float(np.mean(wanted != found)) if wanted.size else 0.0
    finite = np.isfinite(wanted)
    if not np.isfinite(found[finite]).all():
        return float("inf")
    return rel_l2(wanted[finite], found[finite])


def _with_all_forms(
    model: onnx.ModelProto, layers: list[onnx.NodeProto], histograms: Any, task: Task
) -> dict[tuple[str, str], str]:
    """Replaces each layer of ``model`` by an If that selects int8 or float32.

    If ``task`` has a 16-bit base precision, the float32 branch has a second If that selects the base precision or
    float32. Returns a dict that maps a node name and a precision to the name of the flag.
    """
    import onnx

    from .histogram import value_range

    config = task.config
    symmetric = config.form == "tensorrt"
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    flags: dict[tuple[str, str], str] = {}
    names = {node.name for node in layers}
    nodes = []
    for node in model.graph.node:
        if node.name not in names:
            nodes.append(node)
            continue
        ends = value_range(
            histograms.found[node.input[0]], config.calibration, percentile=config.percentile, symmetric=symmetric
        )
        weight = tensors[node.input[1]]
        low_form = _quantized(model, node, weight, ends, config, symmetric)
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        plain.output[0] = f"{node.output[0]}/float32"
        otherwise = [plain]
        if task.base != "fp32":
            flag = flags[node.name, task.base] = f"{node.name}/in_{task.base}"
            result = f"{node.output[0]}/not_int8"
            otherwise = [_choice(model, node, flag, _in_16_bits(node, task.base), otherwise, result)]
        flag = flags[node.name, "int8"] = f"{node.name}/in_int8"
        nodes.append(_choice(model, node, flag, low_form, otherwise, node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return flags


def _choice(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    flag: str,
    then: list[onnx.NodeProto],
    otherwise: list[onnx.NodeProto],
    result: str,
) -> onnx.NodeProto:
    """Returns an If that replaces ``node``, and adds the If's flag to the inputs of ``model``."""
    import onnx
    from onnx import TensorProto, helper

    branches = {}
    for branch, inside in (("then_branch", then), ("else_branch", otherwise)):
        end = onnx.ValueInfoProto(name=inside[-1].output[0])
        end.type.tensor_type.elem_type = TensorProto.FLOAT
        branches[branch] = helper.make_graph(inside, branch, [], [end])
    model.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
    return helper.make_node("If", [flag], [result], name=f"{node.name}/{flag}", **branches)


def _in_16_bits(node: onnx.NodeProto, base: str) -> list[onnx.NodeProto]:
    """Returns nodes that compute the product ``node`` with inputs and result rounded to ``base``. Sums are computed in
    float32, as in hardware."""
    import onnx
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT16 if base == "fp16" else TensorProto.BFLOAT16
    nodes: list[onnx.NodeProto] = []

    def rounded(name: str, result: str) -> str:
        nodes.append(helper.make_node("Cast", [name], [f"{result}/{base}"], to=kind))
        nodes.append(helper.make_node("Cast", [f"{result}/{base}"], [result], to=TensorProto.FLOAT))
        return result

    product = onnx.NodeProto()
    product.CopyFrom(node)
    for index, name in enumerate(node.input):
        if name:
            product.input[index] = rounded(name, f"{node.name}/input_{index}_in_{base}")
    product.output[0] = f"{node.output[0]}/exact_of_{base}"
    nodes.append(product)
    rounded(product.output[0], f"{node.output[0]}/of_{base}")
    return nodes


def _quantized(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    weight: onnx.TensorProto,
    ends: tuple[float, float],
    config: QuantizeConfig,
    symmetric: bool,
) -> list[onnx.NodeProto]:
    """Returns the nodes that compute ``node`` in int8. Adds the constants of the new nodes to the initializers of
    ``model``."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    from accel.sources.onnx.weights import weight_array

    def constant(what: str, value: np.ndarray) -> str:
        name = f"{node.name}/{what}"
        model.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    scale, zero = _activation_scale(ends, symmetric)
    axis = channel_axis(node)
    value = weight_array(weight)
    others = tuple(i for i in range(value.ndim) if i != axis) if config.per_channel else None
    steps = np.maximum(np.abs(value).max(axis=others), np.finfo(np.float32).tiny) / 127
    around = steps.reshape([-1 if i == axis else 1 for i in range(value.ndim)]) if config.per_channel else steps
    small = np.clip(np.rint(value / around), -127, 127).astype(np.int8)
    of_input = [constant("scale", scale), constant("zero", zero)]
    of_weight = [constant("int8", small), constant("steps", np.asarray(steps, np.float32))]
    product = onnx.NodeProto()
    product.CopyFrom(node)
    product.input[0], product.input[1] = f"{node.name}/rounded", f"{node.name}/weights"
    product.output[0] = f"{node.output[0]}/int8"
    return [
        helper.make_node("QuantizeLinear", [node.input[0], *of_input], [f"{node.name}/steps_of_input"]),
        helper.make_node("DequantizeLinear", [f"{node.name}/steps_of_input", *of_input], [product.input[0]]),
        helper.make_node("DequantizeLinear", of_weight, [product.input[1]], axis=axis),
        product,
    ]


def _activation_scale(ends: tuple[float, float], symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    if symmetric:
        scale = max(-low, high) / 127 or 1.0
        return np.array(scale, np.float32), np.array(0, np.int8)
    scale = (high - low) / 255 or 1.0
    return np.array(scale, np.float32), np.array(round(-low / scale), np.uint8)
