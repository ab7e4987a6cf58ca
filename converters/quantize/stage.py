"""Quantizes float32 ONNX models to 8 or 4 bits, in the form that runs fastest on the target."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.cache import unfinished
from accel.child import Child
from accel.errors import AccelError, CannotWrite, ChildCrashed, MissingExtra, StageFailed, UnknownName, UnsupportedHere
from accel.machine import int8_saturates
from accel.progress import report
from accel.signature import Signature
from accel.spelling import option
from accel.stage import StageConfig
from accel.tables.precision import PRECISIONS

if TYPE_CHECKING:
    import numpy as np
    import onnx

CALIBRATIONS = ("minmax", "entropy", "percentile", "mse")

# The steps between fp8 numbers grow with the value, but entropy and mse assume equal steps.
FP8_CALIBRATIONS = ("minmax", "percentile")

# The modes for 4-bit weights of decoders that are calibrated on texts.
GPTQ, AWQ = "int4-gptq", "int4-awq"
# The mode that multiplies the outlier columns of the activations in float32.
OUTLIERS = "dynamic-outliers"
_OF_WEIGHTS = ("int8-weights", "int4-weights", GPTQ, AWQ)

_CHECKED_AT_ONCE = 16

# The number of random inputs for each set of input sizes, used if there is no calibration data.
_RANDOM_FEEDS = 4


class QuantizeFailed(StageFailed):
    """The model could not be quantized, or has nothing to quantize."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Describes the quantization for one kind of target. ``runs`` maps each mode to the function that a child process
    calls. ``calibrations`` lists the supported calibration methods. ``module`` is the required Python module, and
    ``extra`` is the extra that installs it.
    """

    runs: dict[str, str]
    calibrations: tuple[str, ...] = CALIBRATIONS
    extra: str | None = None
    module: str = "onnxruntime"


# Maps each kind of target to its quantization. A model quantized for the wrong kind of target was up to four times
# slower.
# For ort-cpu, activations are uint8 with a zero point and weights are int8. Operators between two convolutions are
#     quantized as well. Mode dynamic quantizes activations at run time, without calibration.
# For openvino, NNCF decides which tensors to quantize, by rules made for OpenVINO's kernels.
# For tensorrt, only the inputs of products with weights are int8, without zero points. Biases and outputs stay float,
#     because TensorRT refuses some quantized biases and outputs, and can't fuse the others. The products of attention
#     stay float, because TensorRT fuses these products only in float. For an fp16 engine, a model is first
#     quantized and then cast to fp16, so that the cast also converts the scales to the dtype of the engine's layers.
FORMS = {
    "ort-cpu": Form(
        runs={
            "static": "accel.converters.quantize.ort:run_static",
            "dynamic": "accel.converters.quantize.dynamic.plain:run_dynamic",
            OUTLIERS: "accel.converters.quantize.dynamic.outliers:run_outliers",
            "int8-weights": "accel.converters.quantize.weights:run_nbits",
            "int4-weights": "accel.converters.quantize.weights:run_nbits",
            GPTQ: "accel.converters.quantize.gptq:run_gptq",
            AWQ: "accel.converters.quantize.weights:run_compressed",
        }
    ),
    "openvino": Form(
        runs={
            "static": "accel.converters.quantize.nncf:run_nncf",
            "int8-weights": "accel.converters.quantize.weights:run_compressed",
            "int4-weights": "accel.converters.quantize.weights:run_compressed",
            AWQ: "accel.converters.quantize.weights:run_compressed",
        },
        calibrations=("minmax", "percentile"),
        extra="openvino",
        module="nncf",
    ),
    "tensorrt": Form(
        runs={
            "static": "accel.converters.quantize.ort:run_symmetric",
            "fp8": "accel.converters.quantize.fp8:run_fp8",
            "int8-weights": "accel.converters.quantize.blocks:run_blocks",
            "int4-weights": "accel.converters.quantize.blocks:run_blocks",
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(StageConfig):
    """The options of a quantization.

    ``form`` is the kind of target: ort-cpu, openvino or tensorrt. ``mode`` is static, dynamic (ort-cpu only), fp8
    (tensorrt only), int8-weights or int4-weights. Mode fp8 means E4M3, calibrated by minmax or percentile. Modes
    int8-weights and int4-weights quantize only the weights of products with at least ``smallest`` weights. Each block
    of ``block_size`` weights has a scale, but 8-bit weights for openvino have one scale for each channel instead.
    Mode dynamic-outliers (ort-cpu only) is as dynamic, but multiplies the columns of the activations that are many
    times larger than the others in ``data`` in float32. Modes int4-gptq (ort-cpu only) and int4-awq are for decoders:
    they are as int4-weights, but choose the weights by the activations of the texts in ``data`` (see
    ``texts.text_feeds``).

    ``data`` is the calibration data. At most ``samples`` samples of the data are used. ``calibration`` is minmax,
    percentile, entropy or mse (see ``histogram.value_range``). The form openvino only supports minmax and percentile.
    ``smooth`` sets how far outliers move from activations into weights of a transformer, from 0 (not at all) to 1
    (completely). For openvino, NNCF does its own smoothing. Mode fp8 needs no smoothing. If ``ops`` is not empty, only
    the operators in ``ops`` are quantized. ``keep`` lists shell patterns. Nodes whose name or operator matches a
    pattern stay float32.
    """

    form: str = "ort-cpu"
    mode: str = "static"
    data: Path | None = None
    samples: int = 128
    calibration: str = "minmax"
    percentile: float = 99.999
    per_channel: bool = True
    smooth: float = 0.85  # MiniLM's error on TensorRT: 0.18 at smooth=0, 0.37 at 0.5, 0.10 at 0.7 and 0.07 at 0.85
    ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    block_size: int = 32
    smallest: int = 1 << 16
    # If True, weights for ort-cpu have 7 bits instead of 8, because sums of 8-bit products saturate on some CPUs. If
    # reduce_range is None, accel uses 7 bits on CPUs that saturate.
    reduce_range: bool | None = None

    def __post_init__(self) -> None:
        if self.reduce_range is None:  # sets the value early, so that the manifest and the cache key record it
            products = self.form == "ort-cpu" and self.mode in ("static", "dynamic", OUTLIERS)
            object.__setattr__(self, "reduce_range", products and int8_saturates())


@dataclass(frozen=True, kw_only=True)
class Task:
    """Holds the input of the child process: files, the config, and properties of the graph."""

    path: Path
    out: Path
    signature: Signature
    config: QuantizeConfig
    excluded: tuple[str, ...]
    transformer: bool
    unfinished: Path | None = None  # The folder in which a killed calibration leaves its state. See ``collect``.
    base: str = "fp32"  # The precision of the layers that don't become int8, used by ``sensitivity.measure``.


def quantize(src: Artifact, config: QuantizeConfig, out: Path) -> Artifact:
    """Quantizes ``src`` for the kind of target ``config.form``. Names, dtypes, dynamic dims, opset and IR don't change.

    Without ``data``, static quantization is calibrated on random inputs, and ``notes["warning"]`` says so.

    Raises ``UnknownName`` for an unknown form, mode or calibration, or a pattern that matches no node. Raises
    ``UnsupportedHere`` if the model is not float32 or its opset is below 13 (fp8: 19, blocks: 21). Also raises
    ``QuantizeFailed``, ``MissingExtra`` and ``BadData``.
    """
    from accel.sources.onnx.file import read_proto
    from accel.sources.onnx.weights import read_detached

    from ..graph.write import onnx_artifact

    form = _form(config)
    model = read_detached(src.path)
    check_source(src, model, config)
    notes: dict[str, Any] = {"form": config.form, "mode": config.mode}
    if config.mode in ("static", "fp8"):
        notes |= _calibration_notes(src, config)
    bits = ""
    if config.reduce_range:
        bits = ", weights in 7 bits (for a CPU without VNNI)"
        notes["reduce_range"] = "weights in 7 bits: sums of 8-bit products saturate on a CPU without VNNI"
    report(f"quantize for {config.form}{bits}")
    with tempfile.TemporaryDirectory(prefix="quantize-", dir=out.parent) as folder:
        task = make_task(src, config, model, Path(folder))
        notes |= run_task(form.runs[config.mode], task, model)
        made = read_detached(task.out)
        before = read_proto(src.path)
        _restore_header(before, made)
        _restore_dim_names(before, made)
        notes |= _counts(made)
        if not notes["quantized_weights"]:
            raise QuantizeFailed(_why_nothing(before, config))
        try:
            return onnx_artifact(src, made, out, notes)
        except StageFailed as error:
            raise QuantizeFailed(str(error)) from error


def _form(config: QuantizeConfig) -> Form:
    import importlib.util

    for kind, name, known in (
        ("form", config.form, FORMS),
        ("mode", config.mode, FORMS[config.form].runs if config.form in FORMS else ()),
        ("calibration", config.calibration, FORMS[config.form].calibrations if config.form in FORMS else ()),
    ):
        if name not in known:
            raise UnknownName(f"unknown {kind} of quantization {name!r}; use {' or '.join(known)}")
    if config.mode == "fp8" and config.calibration not in FP8_CALIBRATIONS:
        raise UnknownName(f"fp8 has no calibration method {config.calibration!r}; use {' or '.join(FP8_CALIBRATIONS)}")
    form = FORMS[config.form]
    if config.mode == AWQ and importlib.util.find_spec("nncf") is None:
        raise MissingExtra("nncf", "openvino")
    if form.extra and importlib.util.find_spec(form.module) is None:
        raise MissingExtra(form.module, form.extra)
    return form


def make_task(src: Artifact, config: QuantizeConfig, model: onnx.ModelProto, folder: Path) -> Task:
    """Returns the task of a child process that works on ``model`` in ``folder``. Gives every node a name."""
    inside = folder.absolute()  # an absolute path, because the child process has another working folder
    return Task(
        path=inside / "prepared.onnx",
        out=inside / "quantized.onnx",
        signature=src.signature,
        config=config if config.data is None else replace(config, data=config.data.absolute()),
        excluded=_prepare(model, config),
        transformer=is_transformer(model),
        unfinished=unfinished(),
    )


def least_opset(config: QuantizeConfig) -> int:
    """Returns the least opset that a model needs for the quantization ``config``."""
    if config.mode == "fp8":
        return PRECISIONS["fp8"].min_opset
    in_blocks = config.form == "tensorrt" and config.mode in ("int8-weights", "int4-weights")
    return PRECISIONS["int4" if in_blocks else "int8"].min_opset


def check_source(src: Artifact, model: onnx.ModelProto, config: QuantizeConfig) -> None:
    """Raises ``UnsupportedHere`` if the precision of ``src`` is wrong, or if its opset is too low for the
    quantization."""
    from accel.sources.onnx.file import describe_model, opset_of

    precision = describe_model(model)[1]["precision"]
    if precision in PRECISIONS and PRECISIONS[precision].quantized:
        raise UnsupportedHere(f"{src.path} is quantized already; start from the float32 model")
    if precision != "fp32":
        raise UnsupportedHere(
            f"{src.path} has the precision {precision}; quantize the float32 model, then cast the result to {precision}"
        )
    least = least_opset(config)
    if opset_of(model) < least:
        what = "int8" if least == PRECISIONS["int8"].min_opset else config.mode
        have = opset_of(model)
        raise UnsupportedHere(
            f"{what} needs opset >= {least}, but {src.path} has opset {have}; pass {option('opset', max(20, least))}"
        )


def _calibration_notes(src: Artifact, config: QuantizeConfig) -> dict[str, Any]:
    from accel.proof.stream import SampleStream

    found: dict[str, Any] = {"calibration": config.calibration}
    if config.data is None:
        found["warning"] = (
            "calibrated on random inputs, whose ranges differ from those of real data; give calibration data"
        )
        return found
    stream = SampleStream(config.data, src.signature)
    for _ in stream.batches(_CHECKED_AT_ONCE, config.samples):  # raises early if samples don't fit the signature
        pass
    return found | {"samples": min(len(stream), config.samples)}


def _prepare(model: onnx.ModelProto, config: QuantizeConfig) -> tuple[str, ...]:
    """Names every node, and turns Constant nodes into initializers. Returns the names of the nodes that stay float:
    those that ``keep`` lists, and those that read an input with a default, such as the products of an adapter."""
    from onnx import AttributeProto

    from accel.sources.onnx.value_spec import optional_inputs

    from ..graph.names import nodes_matching

    taken = {node.name for node in model.graph.node}
    kept: list[str] = []
    nodes = []
    for index, node in enumerate(model.graph.node):
        value = next((a.t for a in node.attribute if a.name == "value" and a.type == AttributeProto.TENSOR), None)
        if node.op_type == "Constant" and value is not None and not node.domain:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
            continue
        nodes.append(node)
        if not node.name or node.name in kept:
            node.name = next(n for n in (f"{node.op_type}_{index}", f"{node.op_type}_{index}_") if n not in taken)
            taken.add(node.name)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    given = {spec.name for spec in optional_inputs(model)}
    kept += [node.name for node in nodes if given & set(node.input)]
    for pattern in config.keep:
        kept += [nodes[index].name for index in nodes_matching(nodes, pattern)]
    return tuple(dict.fromkeys(kept))


def is_transformer(model: onnx.ModelProto) -> bool:
    """Tells whether ``model`` has an Attention node, or a Softmax and a product of two activations."""
    constants = {t.name for t in model.graph.initializer}
    ops = {node.op_type for node in model.graph.node}
    products = (n for n in model.graph.node if n.op_type == "MatMul" and not constants & set(n.input))
    return "Attention" in ops or ("Softmax" in ops and any(True for _ in products))


# NNCF copies the model several times, but not weights in a second file. NNCF gets the weights of a model over this size
# in a second file. For BERT-base, NNCF then needs 2.8 instead of 4.4 GiB of memory, and its result doesn't change.
_APART_BYTES = 64 << 20

# NNCF's error message if the ends of a range are NaN.
_NO_RANGE = "only support input_high == output_high"


def run_task(function: str, task: Task, model: onnx.ModelProto) -> Any:
    """Writes ``model`` to the folder of ``task``, calls ``function`` in a child process, and returns its result.

    The child process writes its temporary files into the same folder. ``model`` must not be used afterwards.
    """
    from ..graph.write import write_onnx

    write_onnx(model, task.path, limit=_APART_BYTES if task.config.form == "openvino" else None)
    environment = {"TMPDIR": str(task.path.parent), "NNCF_CI": "1"}  # NNCF_CI: no telemetry
    try:
        # ONNX Runtime's shape inference leaves files in the working folder. No quantizer needs torch.
        with Child(env=environment, folder=task.path.parent, hidden=("torch",)) as child:
            return child.call(function, task=task)
    except ChildCrashed as error:
        if _NO_RANGE in str(error):
            raise QuantizeFailed(
                f"a tensor inside the model is NaN on the calibration data, so quantization for {task.config.form} "
                "finds no range; correct the operation that computes NaN, remove the samples that cause NaN, or pass "
                f"{option('quantize', ['keep=NODE'])} for each node that reads the tensor"
            ) from error
        raise QuantizeFailed(
            f"quantization for {task.config.form} failed ({error}); use {_floats(task.config.form)} instead"
        ) from error
    except OSError as error:
        raise CannotWrite(
            f"can't write the quantized model for {task.config.form} ({error}); free some space"
        ) from error


def _why_nothing(model: onnx.ModelProto, config: QuantizeConfig) -> str:
    """Returns the error for a model in which nothing was quantized, with what helps."""
    from .products import product_weights

    largest = max((count for _, count in product_weights(model)), default=0)
    if config.mode in _OF_WEIGHTS and 0 < largest < config.smallest:
        return (
            f"accel quantizes products of at least {config.smallest} weights for {config.form}, but the largest of "
            f"this model has {largest}; pass {option('quantize', ['smallest=1'])} to quantize smaller ones"
        )
    return f"nothing in the model could be quantized for {config.form}; use {_floats(config.form)} instead"


def _floats(form: str) -> str:
    """Returns the float precisions that the targets of ``form`` have, for advice."""
    return "fp32 or fp16" if form == "tensorrt" else "fp32"


def _restore_header(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Restores the IR version, opsets, metadata and producer, which quantization libraries change."""
    after.ir_version = before.ir_version
    after.producer_name, after.producer_version = before.producer_name, before.producer_version
    used = {node.domain for node in after.graph.node} | {entry.domain for entry in before.opset_import}
    imports = [entry for entry in after.opset_import if entry.domain in used or entry.domain in ("", "ai.onnx")]
    del after.opset_import[:]
    after.opset_import.extend(imports)
    del after.metadata_props[:]
    after.metadata_props.extend(before.metadata_props)


def _restore_dim_names(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Restores the names of the outputs' dynamic dims. ONNX Runtime's shape inference makes up names of its own."""
    known = {output.name: output.type.tensor_type.shape.dim for output in before.graph.output}
    for output in after.graph.output:
        dims, old = output.type.tensor_type.shape.dim, known.get(output.name, ())
        if len(dims) != len(old):
            continue
        for dim, wanted in zip(dims, old, strict=True):
            if wanted.dim_param and not dim.HasField("dim_value"):
                dim.dim_param = wanted.dim_param


def _counts(model: onnx.ModelProto) -> dict[str, Any]:
    from onnx import TensorProto

    ops: dict[str, int] = {}
    for node in model.graph.node:
        ops[node.op_type] = ops.get(node.op_type, 0) + 1
    kinds = (
        TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN,
    )  # fmt: skip
    weights = [t for t in model.graph.initializer if t.data_type in kinds]
    wanted = (
        "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "MatMulNBits",
    )  # fmt: skip
    counted = {op: ops[op] for op in wanted if op in ops}
    return {"nodes": counted, "quantized_weights": sum(len(t.dims) >= 2 for t in weights)}


def calibration_feeds(task: Task, size: int, skip: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yields the calibration inputs in batches of ``size`` samples. Leaves out the first ``skip`` batches.

    The inputs come from the config's ``data``. Without ``data``, the inputs are random, at every combination of dim
    sizes in ``signature.cases()``.
    """
    from accel.proof.stream import SampleStream

    config, signature = task.config, task.signature
    total = calibration_batches(task, size)
    if config.data is not None:
        batches = SampleStream(config.data, signature).batches(size, config.samples, skip)
    else:
        cases = signature.cases(largest_batch=size)
        batches = (
            signature.example_inputs(seed=number, **cases[number // _RANDOM_FEEDS]) for number in range(skip, total)
        )
    if not total:
        raise AccelError(f"{config.data} has fewer samples than the model's fixed batch size; add samples")
    for done, feeds in enumerate(batches, skip):
        report(f"calibrating, batch {done + 1} of {total}", done / total)
        yield feeds


def calibration_batches(task: Task, size: int) -> int:
    """Returns the number of calibration batches of ``size`` samples."""
    from accel.proof.stream import SampleStream

    if task.config.data is None:
        return len(task.signature.cases(largest_batch=size)) * _RANDOM_FEEDS
    return SampleStream(task.config.data, task.signature).batch_count(size, task.config.samples)
