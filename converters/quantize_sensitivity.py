"""How much each layer of a model loses in int8, alone, measured at the model's outputs.

One model holds every layer in both forms, behind an If that a flag of its own decides, so that each run quantizes one
layer and nothing is loaded anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.converters.quantize import QuantizeConfig, Task, calibration_feeds, check_source, make_task, run_task
from accel.progress import report
from accel.verify.compare import rel_l2

if TYPE_CHECKING:
    import numpy as np
    import onnx

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")

# Batches of how many samples the outputs are compared on.
_BATCH = 4
_BATCHES = 8


@dataclass(frozen=True)
class Sensitivity:
    """``error``: relative l2 of the worst output when only this node is quantized, as far off as on any batch."""

    node: str
    op: str
    error: float


def sensitivities(src: Artifact, config: QuantizeConfig) -> list[Sensitivity]:
    """Every product with constant weights that ``config`` would quantize, the most sensitive first. Its ranges and, for
    transformers, its smoothing are those of ``config``; the names are those that ``config.keep`` takes.

    Raises what ``quantize`` raises for the source, the data and ``config``.
    """
    from accel.sources.onnx_weights import read_detached

    model = read_detached(src.path)
    check_source(src, model)
    report("measuring what each layer loses in int8")
    with tempfile.TemporaryDirectory(prefix="sensitivity-") as folder:
        task = make_task(src, config, model, Path(folder))
        found: list[Sensitivity] = run_task("accel.converters.quantize_sensitivity:measure", task, model)
    return sorted(found, key=lambda one: -one.error)


def measure(task: Task) -> list[Sensitivity]:
    """In a child process."""
    from accel.converters.calibrate import Histograms, collect
    from accel.converters.quantize_ort import smoothed
    from accel.runtimes.onnx_rounded import RoundedModel
    from accel.sources.onnx_weights import read_detached

    config = task.config
    if task.transformer and config.smooth:
        smoothed(task, config.ops or _PRODUCTS)
    model = read_detached(task.path)
    layers = _layers(model, task)
    histograms = Histograms(model, list(dict.fromkeys(node.input[0] for node in layers)))
    collect(histograms, partial(calibration_feeds, task, _BATCH))
    flags = _with_both_forms(model, layers, histograms, config)
    both = RoundedModel(model)
    errors = dict.fromkeys(flags, 0.0)
    for number, feeds in enumerate(calibration_feeds(task, _BATCH)):
        if number == _BATCHES:
            break
        wanted = both.run({**feeds, **_switched(flags, None)})
        for done, name in enumerate(flags):
            report(f"quantizing {name} alone", (number + done / len(flags)) / _BATCHES)
            found = both.run({**feeds, **_switched(flags, name)})
            errors[name] = max(errors[name], *(_relative(wanted[output], found[output]) for output in wanted))
    ops = {node.name: node.op_type for node in layers}
    return [Sensitivity(name, ops[name], error) for name, error in errors.items()]


def _layers(model: onnx.ModelProto, task: Task) -> list[onnx.NodeProto]:
    weights = {tensor.name for tensor in model.graph.initializer}
    ops = task.config.ops or _PRODUCTS
    return [
        node
        for node in model.graph.node
        if node.op_type in ops
        and node.op_type in _PRODUCTS
        and node.input[1] in weights
        and node.name not in task.excluded
    ]


def _switched(flags: Mapping[str, str], on: str | None) -> dict[str, np.ndarray]:
    import numpy as np

    return {flag: np.array(name == on) for name, flag in flags.items()}


def _relative(wanted: np.ndarray, found: np.ndarray) -> float:
    import numpy as np

    if wanted.dtype.kind != "f":
        return float(np.mean(wanted != found)) if wanted.size else 0.0
    finite = np.isfinite(wanted)
    if not np.isfinite(found[finite]).all():
        return float("inf")
    return rel_l2(wanted[finite], found[finite])


def _with_both_forms(
    model: onnx.ModelProto, layers: list[onnx.NodeProto], histograms: Any, config: QuantizeConfig
) -> dict[str, str]:
    """Replace each layer, in place, by an If between int8 and float32; the name of its flag by that of the node."""
    import onnx
    from onnx import TensorProto, helper

    from accel.converters.histogram import value_range

    symmetric = config.form == "tensorrt"
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    flags: dict[str, str] = {}
    names = {node.name for node in layers}
    nodes = []
    for node in model.graph.node:
        if node.name not in names:
            nodes.append(node)
            continue
        flag = f"{node.name}/in_int8"
        ends = value_range(
            histograms.found[node.input[0]], config.calibration, percentile=config.percentile, symmetric=symmetric
        )
        low_form = _quantized(model, node, tensors[node.input[1]], ends, config, symmetric)
        high_form = onnx.NodeProto()
        high_form.CopyFrom(node)
        high_form.output[0] = f"{node.output[0]}/float32"
        branches = {}
        for branch, inside in (("then_branch", low_form), ("else_branch", [high_form])):
            end = onnx.ValueInfoProto(name=inside[-1].output[0])
            end.type.tensor_type.elem_type = TensorProto.FLOAT
            branches[branch] = helper.make_graph(inside, branch, [], [end])
        nodes.append(helper.make_node("If", [flag], [node.output[0]], name=node.name, **branches))
        model.graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
        flags[node.name] = flag
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return flags


def _quantized(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    weight: onnx.TensorProto,
    ends: tuple[float, float],
    config: QuantizeConfig,
    symmetric: bool,
) -> list[onnx.NodeProto]:
    """The nodes of the int8 form; what they need is added to the initializers of ``model``."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    from accel.sources.onnx_weights import weight_array

    def constant(what: str, value: np.ndarray) -> str:
        name = f"{node.name}/{what}"
        model.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    scale, zero = _activation_scale(ends, symmetric)
    axis = _channel_axis(node)
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


def _channel_axis(node: onnx.NodeProto) -> int:
    """The axis of the weights that has one entry for each output channel."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return 1
