"""ONNX to OpenVINO IR (``.xml`` with its ``.bin``), and what an IR file itself declares."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.child import run_in_child
from accel.converters.openvino_reductions import keep_reduced_dims
from accel.converters.openvino_softmax_guard import remove_softmax_guards
from accel.errors import BuildFailed, CannotWrite, ChildCrashed, InvalidModel, MissingExtra, one_line, shortened
from accel.progress import report
from accel.runtimes.openvino import reason
from accel.signature import Dim, Signature, TensorSpec
from accel.sources.onnx_file import describe as describe_onnx
from accel.sources.onnx_file import external_files, read_proto
from accel.stage import StageConfig

# Where the names of the tensors and of their dynamic dims are kept inside the IR: OpenVINO has none for a dim.
RT_INFO = ("accel", "signature")

_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "boolean": "bool", "string": "string",
}  # fmt: skip
_PRECISIONS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
_QUANTIZED = ("i8", "u8", "i4", "u4")
_WITH_GRAPH = re.compile(r"-- (Loop|Scan|If)-\d+ with a message: *(.*?)(?= -- | Summary: |$)")
_WEIGHTS = 16  # a constant with fewer 8-bit numbers than this is an axis or a flag, no weight


@dataclass(frozen=True, kw_only=True)
class OpenVinoFromOnnxConfig(StageConfig):
    """Nothing to choose: weights stay in the precision they have, the session picks what is computed in."""


class IrNotBuilt(BuildFailed):
    """OpenVINO could not convert the model, or died trying."""


def openvino_from_onnx(src: Artifact, config: OpenVinoFromOnnxConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Convert ``src`` (kind ``onnx``) to ``out`` (.xml) with its weights beside it (.bin), in a child process.

    ``properties``: precision. ``notes``: openvino (version), operations, softmax_guards_removed,
    reductions_rewritten. Raises ``MissingExtra``, ``InvalidModel`` for a file that is no ONNX, ``IrNotBuilt`` for one
    that OpenVINO can't convert.
    """
    _, declared = describe_onnx(src.path)
    external_files(read_proto(src.path))  # refuses weights outside the model's folder
    weights = out.with_suffix(".bin")
    report("openvino_from_onnx: converting")
    try:
        # In a folder of its own: the two files belong together, and the .xml that names the other comes last.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            inside = Path(folder) / out.name
            notes: dict[str, Any] = run_in_child(
                "accel.converters.openvino_from_onnx:convert",
                path=src.path,
                out=inside,
                names={"inputs": _names(src.signature.inputs), "outputs": _names(src.signature.outputs)},
            )
            inside.with_suffix(".bin").replace(weights)
            inside.replace(out)
    except ChildCrashed as error:
        raise IrNotBuilt(
            f"OpenVINO died while converting {src.path.name} ({error}); simplify the model or export it with "
            "another opset"
        ) from error
    except OSError as error:
        raise CannotWrite(f"can't write {out} ({error.strerror or error}); choose another -o") from error
    signature, found = describe(out)
    ranges = {dim: known for dim, known in src.signature.dims.items() if dim in signature.dims}
    return Artifact(
        path=out,
        kind="openvino",
        signature=signature.with_dims(ranges),
        properties={"precision": declared["precision"]} | found,
        notes=notes,
        companions=(weights.name,),
    )


def _names(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dims": list(spec.shape)} for spec in specs]


def convert(path: Path, out: Path, names: Mapping[str, Any]) -> dict[str, str | int]:
    """Runs in the child process: read ``path``, write ``names`` into the IR, save it."""
    ov = _openvino()
    try:
        model = ov.Core().read_model(str(path))
    except RuntimeError as error:
        raise IrNotBuilt(_refusal(path.name, reason(error, 4000))) from error
    guards = remove_softmax_guards(model)
    reductions = keep_reduced_dims(model)
    model.set_rt_info(json.dumps(names), list(RT_INFO))
    try:
        ov.save_model(model, str(out), compress_to_fp16=False)
    except RuntimeError as error:
        raise CannotWrite(f"OpenVINO can't write {out.name} ({reason(error)}); free some space") from error
    return {
        "openvino": str(ov.__version__),
        "operations": len(model.get_ops()),
        "softmax_guards_removed": guards,
        "reductions_rewritten": reductions,
    }


def _refusal(name: str, said: str) -> str:
    """What to say of a model that OpenVINO reads no further than ``said``. Of an operator with a graph inside, a loop
    of Keras' masked recurrent layers, it takes less than ONNX allows, whatever the opset."""
    found = _WITH_GRAPH.search(said)
    if found is None:
        return f"OpenVINO can't convert {name}: {shortened(said)}; export it with another opset"
    return (
        f"OpenVINO can't convert the operator {found[1]} of {name} ({shortened(found[2])}); another opset doesn't "
        "help: keep it as ONNX, which ONNX Runtime runs (the target ort-cpu)"
    )


def describe(path: Path) -> tuple[Signature, dict[str, Any]]:
    """What the IR itself declares: its signature and its precision.

    dtypes and shapes are the model's own; names of dynamic dims come from the ``accel`` entry of its rt_info, and are
    ``<tensor>_<axis>`` in an IR that has none.
    """
    ov = _openvino()
    for file in (path, path.with_suffix(".bin")):
        if not file.is_file():
            raise InvalidModel(f"{file} does not exist; an IR is two files, put both in one folder")
    try:
        model = ov.Core().read_model(str(path))
        known = _recorded(model)
        inputs = tuple(_spec(port, known["inputs"]) for port in model.inputs)
        outputs = tuple(_spec(port, known["outputs"]) for port in model.outputs)
    except RuntimeError as error:
        raise InvalidModel(f"{path} is no OpenVINO IR that can be read ({reason(error)}); convert it again") from error
    return Signature(inputs, outputs), {"precision": _precision(model)}


def _recorded(model: Any) -> dict[str, dict[str, list[Dim]]]:
    """Dims by tensor, as they were when the IR was made; empty where that is not known."""
    empty: dict[str, dict[str, list[Dim]]] = {"inputs": {}, "outputs": {}}
    if not model.has_rt_info(list(RT_INFO)):
        return empty
    try:
        body = json.loads(model.get_rt_info(list(RT_INFO)).astype(str))
        return {role: {str(row["name"]): list(row["dims"]) for row in body[role]} for role in empty}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"the IR's accel entry is damaged ({one_line(error)}); convert it again") from error


def _spec(port: Any, known: Mapping[str, list[Dim]]) -> TensorSpec:
    names = sorted(port.get_names())
    if not names:
        raise InvalidModel("the IR has an input or output without a name; convert it again from ONNX")
    name = next((n for n in names if n in known), names[0])
    kind = port.get_element_type().get_type_name()
    if kind not in _DTYPES:
        raise InvalidModel(f"{name!r} has OpenVINO's type {kind}, which no session takes; cast it inside the model")
    sizes = list(port.get_partial_shape())
    dims = known.get(name, [])
    shape: list[Dim] = []
    for axis, size in enumerate(sizes):
        if size.is_static:
            shape.append(int(size.get_length()))
            continue
        recorded = dims[axis] if len(dims) == len(sizes) else None
        # OpenVINO may leave a size open that ONNX declared; one that it rules out is not taken from the record.
        open_to_it = isinstance(recorded, int) and recorded in _bounds(size)
        shape.append(recorded if isinstance(recorded, str) or open_to_it else f"{name}_{axis}")  # type: ignore[arg-type]
    return TensorSpec(name, _DTYPES[kind], tuple(shape))


def _bounds(size: Any) -> range:
    low, high = int(size.get_min_length()), int(size.get_max_length())
    return range(low, high + 1 if high >= 0 else 1 << 62)


def _precision(model: Any) -> str:
    """``int4`` or ``int8`` where it holds such weights, ``int8`` where it holds quantization, else what most of its
    float weights are."""
    counts: dict[str, int] = {}
    for op in model.get_ops():
        kind = op.get_type_name()
        if kind == "FakeQuantize":
            return "int8"
        if kind == "Constant":
            dtype, size = op.get_output_element_type(0).get_type_name(), 1
            for dim in op.get_output_shape(0):
                size *= int(dim)
            if dtype in _QUANTIZED and size >= _WEIGHTS:
                return "int4" if dtype in ("i4", "u4") else "int8"
            if dtype in _PRECISIONS:
                counts[dtype] = counts.get(dtype, 0) + size
    return _PRECISIONS[max(counts, key=lambda name: counts[name], default="f32")]


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra("openvino", "openvino") from error
    return openvino
