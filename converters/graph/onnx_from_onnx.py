"""Changes the opset, shapes and weights of an ONNX file from any exporter, so that the other stages accept the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, beside
from accel.child import run_in_child
from accel.errors import BadInputSpec, ChildCrashed, StageFailed, one_line
from accel.signature import DimRange, Signature, TensorSpec, merged_ranges, new_names, numpy_dtype, shapes_of
from accel.sources.onnx.file import all_nodes, opset_of
from accel.sources.onnx.functions import inlined
from accel.sources.onnx.refusal import plain_reason
from accel.sources.onnx.weights import read_detached, weight_array
from accel.sources.output_specs import output_specs, step_advice
from accel.spelling import option, options
from accel.stage import StageConfig

from .write import as_inputs, as_weights, check_file, onnx_artifact, write_onnx

if TYPE_CHECKING:
    import onnx

# A Constant node with fewer elements than this limit holds axes or sizes, not weights. Axes and sizes stay in Constant
# nodes, where shape inference reads them.
_WEIGHT_ELEMENTS = 32
_QDQ = ("QuantizeLinear", "DequantizeLinear")
# Maps the TensorProto name of each newer dtype to the IR version that introduced the dtype.
_DTYPE_IR = {"FLOAT4E2M1": 11, "FLOAT8E8M0": 12, "UINT2": 13, "INT2": 13, "FLOAT6E2M3": 14, "FLOAT6E3M2": 14}


@dataclass(frozen=True, kw_only=True)
class OnnxFromOnnxConfig(StageConfig):
    """``opset`` is the opset of the result (None: unchanged). ``inputs`` has new shapes for inputs whose declared
    shapes are wrong or too narrow. ``dims`` maps dynamic dims to ranges. ``max_ir`` is the newest IR version that
    the target reads (None: no limit)."""

    opset: int | None = None
    inputs: tuple[TensorSpec, ...] = ()
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    max_ir: int | None = None


class NotBroughtOver(StageFailed):
    """The opset or the shapes can't be changed as requested."""


def onnx_from_onnx(src: Artifact, config: OnnxFromOnnxConfig, out: Path) -> Artifact:
    """Changes the opset and shapes of ``src``. ``notes["repaired"]`` lists each repair with its reason.

    Inlines the model's own functions. Turns weights in Constant nodes into initializers, and removes initializers from
    the list of inputs. Runs the model at several sizes, and declares the measured output shapes. Quantized models keep
    all QuantizeLinear and DequantizeLinear nodes.

    Raises ``NotBroughtOver`` if onnx can't convert an operator, or if the model doesn't run with the given shapes. Also
    raises ``NotBroughtOver`` if the model's opset or one of its dtypes needs a newer IR than ``max_ir``.
    """
    try:
        notes: dict[str, Any] = run_in_child(
            "accel.converters.graph.onnx_from_onnx:run_conversion",
            path=src.path,
            signature=src.signature,
            config=config,
            out=out,
        )
    except ChildCrashed as error:
        raise NotBroughtOver(f"onnx died while converting {src.path} ({error}); export the model again") from error
    model = read_detached(out)
    made = onnx_artifact(src, model, out, notes)
    known = merged_ranges(src.signature.dims, config.dims)
    ranges = {d: r for d, r in known.items() if d in made.signature.dims}
    return replace(made, signature=made.signature.with_dims(ranges))


def run_conversion(path: Path, signature: Signature, config: OnnxFromOnnxConfig, out: Path) -> dict[str, Any]:
    """Does the work of ``onnx_from_onnx``. Runs in a child process, because onnx and ONNX Runtime are native code that
    may crash."""
    import onnx

    model = read_detached(path)
    repaired: list[str] = []
    if model.functions:
        repaired.append(f"{len(model.functions)} functions of the model are inlined, because few runtimes read them")
        model = inlined(model)
        # OpenVINO doesn't recognize a file that names several domains before its graph, as accel writes it.
        used = {node.domain for node in all_nodes(model.graph)}
        for entry in [entry for entry in model.opset_import if entry.domain not in ("", *used)]:
            model.opset_import.remove(entry)
    _lift_constants(model, repaired)
    _hide_initializers(model, repaired)
    inputs = _redeclared(model, signature.inputs, config.inputs, repaired)
    opset = config.opset or opset_of(model)
    before = _quantizers(model)
    if opset != opset_of(model):
        apart = as_inputs(model)
        model = _converted(model, opset, path)
        as_weights(model, apart)
    if _quantizers(model) != before:
        raise NotBroughtOver(f"{path} would lose quantized operators at opset {opset}; leave out {option('opset')}")
    least = int(onnx.helper.find_min_ir_version_for(list(model.opset_import), True))
    model.ir_version = max(int(model.ir_version), least)
    if config.max_ir is not None and model.ir_version > config.max_ir:
        least, why = max((least, f"opset {opset}"), *_newer_dtypes(model.graph))
        if least > config.max_ir:
            raise NotBroughtOver(
                f"{path} needs IR version {least} for {why}, but the target reads at most IR version {config.max_ir}; "
                f"export the model again without {why}"
            )
        repaired.append(f"it declared IR {model.ir_version}, which it doesn't need and which not every runtime reads")
        model.ir_version = config.max_ir
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    ranges = merged_ranges(signature.dims, config.dims)
    dims = {d: r for d, r in ranges.items() if any(d in spec.shape for spec in inputs)}
    write_onnx(model, out)  # ONNX Runtime loads a file of any size, but a model in memory only up to 2 GB
    _observe_outputs(model, out, Signature(inputs, (), dims), signature, path, repaired)
    with beside(out) as temporary:
        temporary.write_bytes(model.SerializeToString())
    if fault := check_file(out):
        raise NotBroughtOver(f"{path} fails the ONNX checker at opset {opset}: {fault}; pass another opset")
    return {"repaired": repaired}


def _lift_constants(model: onnx.ModelProto, repaired: list[str]) -> None:
    import math

    gone = []
    for node in model.graph.node:
        value = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        if node.op_type == "Constant" and value is not None and math.prod(value.dims) >= _WEIGHT_ELEMENTS:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
            gone.append(node)
    for node in gone:
        model.graph.node.remove(node)
    if gone:
        repaired.append(f"{len(gone)} weights were Constant nodes; they are initializers now")


def _hide_initializers(model: onnx.ModelProto, repaired: list[str]) -> None:
    constants = {tensor.name for tensor in model.graph.initializer}
    listed = [value for value in model.graph.input if value.name in constants]
    for value in listed:
        model.graph.input.remove(value)
    if listed:
        # Before IR 4 every weight had to be listed as an input. A runtime can't fold weights that are inputs.
        model.ir_version = max(int(model.ir_version), 4)
        repaired.append(f"{len(listed)} weights were listed as inputs, which a caller can replace; they no longer are")


def _redeclared(
    model: onnx.ModelProto, declared: Sequence[TensorSpec], given: Sequence[TensorSpec], repaired: list[str]
) -> tuple[TensorSpec, ...]:
    """Declares the inputs of ``model`` with the given shapes, and returns the new specs of the inputs.

    Raises ``BadInputSpec`` if the model has no input of a given name, or if the input has another dtype or rank.
    """
    import onnx

    wanted = {spec.name: spec for spec in given}
    if unknown := set(wanted) - {spec.name for spec in declared}:
        names = ", ".join(spec.name for spec in declared)
        raise BadInputSpec(f"the model has no input {sorted(unknown)[0]!r}; its inputs are: {names}")
    found: list[TensorSpec] = []
    for spec in declared:
        new = wanted.get(spec.name, spec)
        if new.dtype != spec.dtype or (spec.shape and len(new.shape) != len(spec.shape)):
            raise BadInputSpec(
                f"the model has the input {spec}, but {new} was given; only the sizes may differ, so correct "
                f"{option('inputs')}"
            )
        if new.shape != spec.shape:
            repaired.append(
                f"the input was declared {spec} and is {new} now: the user said so, and the model runs at those sizes"
            )
        found.append(TensorSpec(spec.name, spec.dtype, new.shape, new.values))
    renamed = new_names(declared, found)
    pairs = zip(found, declared, strict=True)
    found = [replace(new, values=new.values or old.with_dims(renamed).values) for new, old in pairs]
    for value, spec in zip(model.graph.input, found, strict=True):
        kind = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(spec.dtype))
        value.CopyFrom(onnx.helper.make_tensor_value_info(spec.name, kind, list(spec.shape)))
    return tuple(found)


def _converted(model: onnx.ModelProto, opset: int, path: Path) -> onnx.ModelProto:
    from onnx import version_converter

    before = opset_of(model)
    try:
        made = version_converter.convert_version(model, opset)
    except Exception as error:
        if opset > before:
            raise NotBroughtOver(
                f"{path} can't be converted from opset {before} to opset {opset} ({one_line(error)}); leave out "
                f"{option('opset')}"
            ) from error
        made = _stepped_down(model, opset)
    if opset < before:
        _drop_newer_attributes(made.graph, before, opset)
    return made


def _stepped_down(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Lowers the opset of ``model`` one version at a time, and returns the result.

    The version converter of onnx fails at many operators whose newer version only adds dtypes. If the converter fails,
    this function lowers only the declared opset. Attributes that the lower opset doesn't have are dropped. Mistakes are
    found after the conversion: the checker refuses an invalid model, and the output gate refuses changed outputs.
    """
    from onnx import version_converter

    for version in range(opset_of(model) - 1, opset - 1, -1):
        try:
            model = version_converter.convert_version(model, version)
        except Exception:
            for entry in model.opset_import:
                if entry.domain in ("", "ai.onnx"):
                    entry.version = version
        _drop_newer_attributes(model.graph, version + 1, version)
    return model


def _without_zeros(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of the int64 initializers that contain no zero."""
    import onnx

    found = (t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64)
    return {t.name for t in found if weight_array(t).all()}


def _drop_newer_attributes(graph: onnx.GraphProto, before: int, opset: int) -> None:
    """Removes attributes that don't exist at ``opset``, because onnx's converter doesn't remove them.

    Removes an attribute only if its value is the default. Also removes a Reshape's ``allowzero`` if none of the sizes
    is 0. The checker later refuses the model if other newer attributes remain.
    """
    import onnx

    harmless = {("Reshape", "allowzero"): _without_zeros(graph)}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _drop_newer_attributes(inner, before, opset)
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            continue
        known = onnx.defs.get_schema(node.op_type, opset).attributes
        newer = onnx.defs.get_schema(node.op_type, before).attributes
        usual = {name: onnx.helper.get_attribute_value(a.default_value) for name, a in newer.items() if not a.required}
        for attribute in list(node.attribute):
            if attribute.name in known or attribute.name not in usual:
                continue
            sizes = harmless.get((node.op_type, attribute.name), set())
            if onnx.helper.get_attribute_value(attribute) == usual[attribute.name] or sizes & {*node.input[1:]}:
                node.attribute.remove(attribute)


def _refused(path: Path) -> str | None:
    """Returns the reason why ONNX Runtime lacks a kernel for the file ``path``, or None if it doesn't."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as error:
        return plain_reason(error)
    except Exception:
        return None
    return None


def _newer_dtypes(graph: onnx.GraphProto) -> list[tuple[int, str]]:
    """Returns a list of pairs (IR version, dtype name), with one pair for each newer dtype in ``graph``. The list
    begins with the pair (0, "")."""
    import onnx

    kinds = {t.data_type for t in graph.initializer}
    kinds |= {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    inner = [(0, "")]
    for node in graph.node:
        for a in node.attribute:
            kinds |= {a.t.data_type, *([a.i] if node.op_type == "Cast" and a.name == "to" else [])}
            inner += [found for g in (a.g, *a.graphs) for found in _newer_dtypes(g)]
    names = [onnx.TensorProto.DataType.Name(kind) for kind in kinds]
    return [*inner, *((_DTYPE_IR[name], f"the dtype {name}") for name in names if name in _DTYPE_IR)]


def _quantizers(model: onnx.ModelProto) -> list[int]:
    return [sum(node.op_type == kind for node in model.graph.node) for kind in _QDQ]


def _observe_outputs(
    model: onnx.ModelProto,
    written: Path,
    signature: Signature,
    before: Signature,
    path: Path,
    repaired: list[str],
) -> None:
    """Runs the file ``written`` at several sizes, and declares the resulting output shapes in ``model``. ``before`` is
    the signature that the source declares.

    Raises ``NotBroughtOver`` if ONNX Runtime can't load ``written`` or can't run it at one of the sizes.
    """
    import onnx
    import onnxruntime

    names = [value.name for value in model.graph.output]
    others = [old for old, new in zip(before.inputs, signature.inputs, strict=True) if old.shape != new.shape]
    own = f"; the file itself has {option('inputs', list(map(str, others)))}" if others else ""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(written), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = plain_reason(error)
        if (unconverted := _refused(path)) is not None:
            raise NotBroughtOver(
                f"ONNX Runtime on the CPU can't load {path}, converted or not: {unconverted}; convert it with "
                f"{option('to', 'openvino')} or {option('to', 'torch')}, or export the model again in float32"
            ) from error
        raise NotBroughtOver(f"ONNX Runtime can't load {path} after its conversion: {reason}{own}") from error
    # Runs the model only at sizes that the user gave: at the default sizes, and for each dim also at the largest or
    # smallest size. Many models accept only multiples of a step, such as 32, and would refuse other sizes in the range.
    cases: list[dict[str, int]] = [signature.sizes()]
    for dim, bounds in signature.dims.items():
        if bounds.min != bounds.max:
            cases.append(signature.sizes(**{dim: bounds.max if bounds.max != bounds.opt else bounds.min}))
    runs = []
    for sizes in cases:
        feeds = signature.example_inputs(**sizes)
        try:
            runs.append(dict(zip(names, session.run(names, feeds), strict=True)))
        except Exception as error:
            shapes = shapes_of(feeds)
            fix = step_advice(signature, partial(session.run, names))
            fix = fix or own or f"; correct {options('inputs', 'dims')}"
            raise NotBroughtOver(
                f"{path} doesn't run on inputs of the shapes {shapes} ({plain_reason(error)}){fix}"
            ) from error
    was = {spec.name: spec for spec in before.outputs}
    for value, spec in zip(model.graph.output, output_specs(signature, cases, runs, str(path)), strict=True):
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(onnx.helper.make_tensor_value_info(spec.name, kind, list(spec.shape)))
        old = was[spec.name].shape
        fixed = [(a, b) for a, b in zip(old, spec.shape, strict=False) if isinstance(a, int) and a != b]
        if len(old) != len(spec.shape) or fixed:
            repaired.append(f"the output {spec.name} was declared [{','.join(map(str, old))}], it gives {spec}")
