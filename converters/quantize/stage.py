"""float32 ONNX to 8 bits, in the form that the target runs fastest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.cache import unfinished
from accel.child import Child
from accel.cpu import int8_saturates
from accel.errors import AccelError, CannotWrite, ChildCrashed, MissingExtra, StageFailed, UnknownName, UnsupportedHere
from accel.progress import report
from accel.signature import Signature
from accel.stage import StageConfig

if TYPE_CHECKING:
    import numpy as np
    import onnx

CALIBRATIONS = ("minmax", "entropy", "percentile", "mse")

# Before opset 13 QuantizeLinear knows no axis, which per-channel scales need; before 19 no 8-bit floats; before 21 no
# blocks.
_MIN_OPSET = 13
FP8_OPSET = 19
BLOCK_OPSET = 21

# Of the values in fp8 the steps grow with the value: what entropy and mse weigh is something else.
FP8_CALIBRATIONS = ("minmax", "percentile")

_CHECKED_AT_ONCE = 16

# Random calibration: this many feeds at each shape of the signature.
_RANDOM_FEEDS = 4


class QuantizeFailed(StageFailed):
    """The model could not be quantized, or nothing in it was."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way of writing int8. ``runs``: by mode, the function that does it, in a child process. ``calibrations``: the
    ways it has of finding a range."""

    runs: dict[str, str]
    calibrations: tuple[str, ...] = CALIBRATIONS
    extra: str | None = None
    module: str = "onnxruntime"


# What each target wants (measured; the wrong one costs up to four times):
# ort-cpu: uint8 activations with a zero point, int8 weights, QDQ around everything between two convolutions; or
#     dynamic: activations are quantized as they come, without calibration.
# openvino: NNCF's choice of where to quantize, which is made for OpenVINO's kernels.
# tensorrt: int8 on both sides without zero points, before weight products only: the products of attention have to stay
#     as they are to be fused, and a bias or an output in int32 or int8 is refused or never fused. Cast to fp16 after
#     this stage, not before: the cast gives the scales the type that the engine's layers have.
FORMS = {
    "ort-cpu": Form(
        runs={
            "static": "accel.converters.quantize_ort:run_static",
            "dynamic": "accel.converters.quantize_ort:run_dynamic",
            "int8-weights": "accel.converters.quantize_weights:run_nbits",
            "int4-weights": "accel.converters.quantize_weights:run_nbits",
        }
    ),
    "openvino": Form(
        runs={
            "static": "accel.converters.quantize_nncf:run_nncf",
            "int8-weights": "accel.converters.quantize_weights:run_compressed",
            "int4-weights": "accel.converters.quantize_weights:run_compressed",
        },
        calibrations=("minmax", "percentile"),
        extra="openvino",
        module="nncf",
    ),
    "tensorrt": Form(
        runs={
            "static": "accel.converters.quantize_ort:run_symmetric",
            "fp8": "accel.converters.quantize_fp8:run_fp8",
            "int8-weights": "accel.converters.quantize_blocks:run_blocks",
            "int4-weights": "accel.converters.quantize_blocks:run_blocks",
        }
    ),
}


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(StageConfig):
    """``form``: ort-cpu, openvino or tensorrt. ``mode``: static; dynamic (ort-cpu); fp8 (tensorrt: 8-bit floats, E4M3,
    calibrated by minmax or percentile); or int8-weights or int4-weights, where only the weights of large products
    change: those of ``smallest`` numbers and more, with one scale for ``block_size`` of them (8 bits in the openvino
    form: one a channel). ``data``: what to calibrate on, ``samples`` of it at most. ``calibration``:
    minmax, percentile (``percentile`` of the values are inside), entropy or mse, see ``histogram.value_range`` (the
    openvino form has the first two). ``smooth``: how much of the activations' outliers moves into the weights of a
    transformer (0 none, 1 all; the openvino form has its own, fp8 needs none). ``ops``: quantize these operators only.
    ``keep``: nodes to leave in float32, by name or operator, with * and ?."""

    form: str = "ort-cpu"
    mode: str = "static"
    data: Path | None = None
    samples: int = 128
    calibration: str = "minmax"
    percentile: float = 99.999
    per_channel: bool = True
    smooth: float = 0.85  # MiniLM's error by it: 0 0.18, 0.5 0.37, 0.7 0.10, 0.85 0.07, tensorrt form
    ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    block_size: int = 32
    smallest: int = 1 << 16
    # The ort-cpu form, weights in 7 bits: for CPUs whose sums of 8-bit products saturate. None: if this CPU is one.
    reduce_range: bool | None = None

    def __post_init__(self) -> None:
        if self.reduce_range is None:  # settled here: it is an option of the result, recorded and keyed like any other
            products = self.form == "ort-cpu" and self.mode in ("static", "dynamic")
            object.__setattr__(self, "reduce_range", products and int8_saturates())


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the child process gets: files, the choices of the config, and what was seen in the graph."""

    path: Path
    out: Path
    signature: Signature
    config: QuantizeConfig
    excluded: tuple[str, ...]
    transformer: bool
    unfinished: Path | None = None  # a folder for what a killed calibration has found, see ``collect``
    base: str = "fp32"  # what the layers compute in that aren't int8, for ``measure``


def quantize(src: Artifact, config: QuantizeConfig, out: Path) -> Artifact:
    """8 bits as ``config.form`` writes them. Names, dtypes, dynamic dims, opset and IR stay. Without ``data`` a static
    form is calibrated on random inputs, and ``notes["warning"]`` says so.

    Raises ``QuantizeFailed``; ``UnknownName`` for a form, mode, calibration or pattern that is none;
    ``UnsupportedHere`` for a model that is not float32 or older than opset 13 (fp8: 19); ``MissingExtra``; ``BadData``.
    """
    from accel.converters.onnx_write import onnx_artifact
    from accel.sources.onnx_file import read_proto
    from accel.sources.onnx_weights import read_detached

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
        _restore_header(read_proto(src.path), made)
        notes |= _counts(made)
        if not notes["quantized_weights"]:
            raise QuantizeFailed(f"nothing in the model could be quantized for {config.form}; use fp32 or fp16 instead")
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
        raise UnknownName(f"fp8 has no calibration {config.calibration!r}; use {' or '.join(FP8_CALIBRATIONS)}")
    form = FORMS[config.form]
    if form.extra and importlib.util.find_spec(form.module) is None:
        raise MissingExtra(form.module, form.extra)
    return form


def make_task(src: Artifact, config: QuantizeConfig, model: onnx.ModelProto, folder: Path) -> Task:
    """What the child process needs to work on ``model`` in ``folder``. Names the nodes of ``model`` that have none."""
    inside = folder.absolute()  # the child stands elsewhere
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
    """The opset that what ``config`` writes needs."""
    if config.mode == "fp8":
        return FP8_OPSET
    return BLOCK_OPSET if config.form == "tensorrt" and config.mode.endswith("-weights") else _MIN_OPSET


def check_source(src: Artifact, model: onnx.ModelProto, config: QuantizeConfig) -> None:
    """``UnsupportedHere`` where ``src`` can't be quantized."""
    from accel.sources.onnx_file import describe_model, opset_of

    precision = describe_model(model)[1]["precision"]
    if precision in ("int8", "int4", "fp8"):
        raise UnsupportedHere(f"{src.path} is quantized already; start from its float32 form")
    if precision != "fp32":
        raise UnsupportedHere(f"{src.path} is {precision}; quantize the float32 model, then cast that to {precision}")
    least = least_opset(config)
    if opset_of(model) < least:
        what = "int8" if least == _MIN_OPSET else config.mode
        have = opset_of(model)
        raise UnsupportedHere(f"{what} needs opset >= {least}, {src.path} has {have}; pass --opset {max(20, least)}")


def _calibration_notes(src: Artifact, config: QuantizeConfig) -> dict[str, Any]:
    from accel.verify.stream import SampleStream

    found: dict[str, Any] = {"calibration": config.calibration}
    if config.data is None:
        found["warning"] = "calibrated on random inputs: the ranges are not those of real data; pass --data"
        return found
    stream = SampleStream(config.data, src.signature)
    for _ in stream.batches(_CHECKED_AT_ONCE, config.samples):  # what doesn't fit is found before any work
        pass
    return found | {"samples": min(len(stream), config.samples)}


def _prepare(model: onnx.ModelProto, config: QuantizeConfig) -> tuple[str, ...]:
    """Give every node a name, make initializers of constant nodes; the names of the nodes to leave alone."""
    from onnx import AttributeProto

    from accel.converters.onnx_names import nodes_matching

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
    for pattern in config.keep:
        kept += [nodes[index].name for index in nodes_matching(nodes, pattern)]
    return tuple(dict.fromkeys(kept))


def is_transformer(model: onnx.ModelProto) -> bool:
    """Whether products of two activations feed a softmax, or come out of one."""
    constants = {t.name for t in model.graph.initializer}
    ops = {node.op_type for node in model.graph.node}
    products = (n for n in model.graph.node if n.op_type == "MatMul" and not constants & set(n.input))
    return "Attention" in ops or ("Softmax" in ops and any(True for _ in products))


# How NNCF says that the ends of a range are not equal to themselves, that is NaN.
_NO_RANGE = "only support input_high == output_high"


def run_task(function: str, task: Task, model: onnx.ModelProto) -> Any:
    """Call ``function`` in a child process whose temporary files all go into the folder of the task. ``model`` is
    written there, and spent."""
    from accel.converters.onnx_write import write_onnx

    write_onnx(model, task.path)
    environment = {"TMPDIR": str(task.path.parent), "NNCF_CI": "1"}  # NNCF_CI: no telemetry
    try:
        # ONNX Runtime's shape inference leaves files where it stands.
        with Child(env=environment, folder=task.path.parent) as child:
            return child.call(function, task=task)
    except ChildCrashed as error:
        if _NO_RANGE in str(error):
            raise QuantizeFailed(
                f"a tensor inside the model is NaN on the data that calibrates the form {task.config.form}: no "
                "range to quantize it in; mend what makes it in the model, leave such samples out, or keep the nodes "
                "behind it in float with --quantize keep=NODE"
            ) from error
        raise QuantizeFailed(f"quantization for {task.config.form} failed ({error}); try another form") from error
    except OSError as error:
        raise CannotWrite(f"can't write the form {task.config.form} ({error}); free some space") from error


def _restore_header(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """What the libraries change in passing: the IR, unused operator sets, metadata, the producer."""
    after.ir_version = before.ir_version
    after.producer_name, after.producer_version = before.producer_name, before.producer_version
    used = {node.domain for node in after.graph.node} | {entry.domain for entry in before.opset_import}
    imports = [entry for entry in after.opset_import if entry.domain in used or entry.domain in ("", "ai.onnx")]
    del after.opset_import[:]
    after.opset_import.extend(imports)
    del after.metadata_props[:]
    after.metadata_props.extend(before.metadata_props)


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
    """What to calibrate on, ``size`` samples at a time, without the first ``skip`` batches: the data, read as it goes,
    else random inputs at each shape of the signature."""
    from accel.verify.stream import SampleStream

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
        raise AccelError(f"{config.data} holds less than one batch of this model's fixed size; add samples")
    for done, feeds in enumerate(batches, skip):
        report(f"calibrating, batch {done + 1} of {total}", done / total)
        yield feeds


def calibration_batches(task: Task, size: int) -> int:
    """How many batches of ``size`` samples there are to calibrate on."""
    from accel.verify.stream import SampleStream

    if task.config.data is None:
        return len(task.signature.cases(largest_batch=size)) * _RANDOM_FEEDS
    return SampleStream(task.config.data, task.signature).batch_count(size, task.config.samples)
