"""Reads the signature and the precision of an OpenVINO IR."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.errors import InvalidModel, MissingExtra, one_line
from accel.runtimes.openvino import reason
from accel.signature import Dim, Signature, TensorSpec

# The rt_info entry in which accel stores the names of tensors and dynamic dims. OpenVINO itself has no names for dims.
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
_WEIGHTS = 16  # a constant with fewer 8-bit numbers than this limit holds axes or flags, not weights


def describe(path: Path) -> tuple[Signature, dict[str, Any]]:
    """Returns the signature and the properties (``precision``) of the IR ``path``.

    The dtypes and shapes come from the model. The names of dynamic dims come from the ``accel`` entry of the rt_info.
    Without an ``accel`` entry, a dynamic dim is called ``<tensor>_<axis>``. Raises ``InvalidModel`` if the IR can't be
    read.
    """
    ov = load_openvino()
    for file in (path, path.with_suffix(".bin")):
        if not file.is_file():
            raise InvalidModel(f"{file} does not exist; an IR is an .xml and a .bin file, so put both in one folder")
    try:
        model = ov.Core().read_model(str(path))
        known = _recorded(model)
        inputs = tuple(_spec(port, known["inputs"]) for port in model.inputs)
        outputs = tuple(_spec(port, known["outputs"]) for port in model.outputs)
    except RuntimeError as error:
        raise InvalidModel(f"{path} can't be read as an OpenVINO IR ({reason(error)}); convert it again") from error
    return Signature(inputs, outputs), {"precision": _precision(model)}


def _recorded(model: Any) -> dict[str, dict[str, list[Dim]]]:
    """Returns the dims that accel recorded in the IR for each tensor. If the IR has no record, returns empty dicts."""
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
        raise InvalidModel(
            f"the tensor {name!r} has OpenVINO's type {kind}, which accel's sessions don't support; add a cast inside "
            "the model"
        )
    sizes = list(port.get_partial_shape())
    dims = known.get(name, [])
    shape: list[Dim] = []
    for axis, size in enumerate(sizes):
        if size.is_static:
            shape.append(int(size.get_length()))
            continue
        recorded = dims[axis] if len(dims) == len(sizes) else None
        # A size that is fixed in the ONNX file may be dynamic in OpenVINO. accel uses the size from the ONNX file if
        # this size is within OpenVINO's bounds.
        open_to_it = isinstance(recorded, int) and recorded in _bounds(size)
        shape.append(recorded if isinstance(recorded, str) or open_to_it else f"{name}_{axis}")  # type: ignore[arg-type]
    return TensorSpec(name, _DTYPES[kind], tuple(shape))


def _bounds(size: Any) -> range:
    low, high = int(size.get_min_length()), int(size.get_max_length())
    return range(low, high + 1 if high >= 0 else 1 << 62)


def _precision(model: Any) -> str:
    """Returns the precision of ``model``. The precision is ``int8`` if the model has a FakeQuantize. If the model has
    quantized weights, the precision is the dtype of the quantized weights (``int4`` or ``int8``). Otherwise, the
    precision is the dtype of most weights."""
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


def load_openvino() -> Any:
    """Returns the module ``openvino``. Raises ``MissingExtra`` if the package isn't installed."""
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra("openvino", "openvino") from error
    return openvino
