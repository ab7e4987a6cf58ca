"""Counts the FLOPs and weights of an OpenVINO IR. OpenVINO reads the IR in a child process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.child import run_in_child
from accel.errors import ChildCrashed, InvalidModel, MissingExtra, one_line
from accel.signature import Signature, TensorSpec

from .cost import Shape
from .foreign import ForeignGraph, Operation

_FREE = frozenset(
    {
        "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "VariadicSplit", "Gather", "GatherND",
        "GatherElements", "ShapeOf", "Convert", "ConvertLike", "StridedSlice", "Slice", "Broadcast", "Tile", "Pad",
        "Range", "ReadValue", "Assign",
    }
)  # fmt: skip
_ELEMENT = {"SoftMax": 5, "LogSoftmax": 6, "Gelu": 8, "Sigmoid": 4, "Tanh": 4, "Erf": 8, "MVN": 8, "Swish": 5}
# Maps an operation to a number of leading axes of its kernel, such as the axis of the output channels. ``_flops`` skips
# these axes, because it already counts them as axes of the operation's output or input.
_KERNEL = {
    "Convolution": 1, "GroupConvolution": 2, "ConvolutionBackpropData": 1, "GroupConvolutionBackpropData": 2,
}  # fmt: skip
_GATES = {"LSTMSequence": 4, "GRUSequence": 3, "RNNSequence": 1}
# The operations that may come between integer weights and the matrix product that uses these weights.
_BETWEEN = frozenset({"Convert", "Multiply", "Subtract", "Reshape", "Transpose"})
_INTEGERS = ("int8", "uint8", "int4", "uint4")


def read_ir(path: Path, signature: Signature, sizes: Mapping[str, int]) -> ForeignGraph:
    """Returns the operations of the IR in ``path`` at ``sizes``. Raises ``InvalidModel`` if OpenVINO can't read the
    file."""
    shapes = {spec.name: list(spec.resolve(sizes)) for spec in signature.inputs}
    try:
        found: dict[str, Any] = run_in_child(
            "accel.graph.openvino_ir:operations", path=path, shapes=shapes, timeout=300
        )
    except ChildCrashed as error:
        raise InvalidModel(f"OpenVINO can't read {path} ({error}); convert the model again") from error
    rows: list[dict[str, Any]] = found["rows"]
    maker = {name: row for row in rows for name in row["outputs"]}
    constants = {
        row["outputs"][0]: (str(row["dtype"]), tuple(row["shapes"][0] or ()))
        for row in rows
        if row["kind"] == "Constant"
    }
    weights = {name: value for name, value in constants.items() if _is_weight(*value)}
    bytes_by_dtype: Counter[str] = Counter()
    for dtype, shape in weights.values():
        bytes_by_dtype[dtype] += math.ceil(math.prod(shape) * _bits(dtype) / 8)
    operations = []
    for row in rows:
        if row["kind"] in ("Constant", "Parameter", "Result"):
            continue
        ins = [_shape_of(name, maker) for name in row["inputs"]]
        out = tuple(row["shapes"][0]) if row["shapes"] and row["shapes"][0] is not None else None
        product = row["kind"] in (*_KERNEL, *_GATES, "MatMul")
        operations.append(
            Operation(
                kind=row["kind"],
                name=row["name"],
                inputs=tuple(row["inputs"]),
                outputs=tuple(row["outputs"]),
                shape=out,
                flops=_flops(row, ins, out),
                parameters=sum(math.prod(weights[name][1]) for name in row["inputs"] if name in weights),
                product=product,
                quantized=product and all(_of_integers(name, maker) for name in row["inputs"][:2]),
                attributes=row["attributes"],
            )
        )
    return ForeignGraph(
        operations=tuple(operations),
        inputs=_ends(rows, "Parameter", "outputs", signature.inputs),
        outputs=_ends(rows, "Result", "inputs", signature.outputs),
        parameters=sum(math.prod(shape) for _, shape in weights.values()),
        constants=constants,
        weight_bytes=bytes_by_dtype,
        warnings=tuple(found["warnings"]),
    )


def operations(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Reads the file with OpenVINO, sets the inputs to ``shapes``, and returns each operation. Runs in a child
    process."""
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra("openvino", "openvino") from error
    warnings = []
    model = openvino.Core().read_model(str(path))
    try:
        model.reshape({name: list(shape) for name, shape in shapes.items()})
    except RuntimeError as error:
        warnings.append(f"OpenVINO can't fix its shapes: {one_line(error, 160)}")
    rows = []
    for op in model.get_ordered_ops():
        kind = op.get_type_name()
        outputs = [f"{op.get_friendly_name()}:{i}" for i in range(op.get_output_size())]
        inputs = [f"{v.get_node().get_friendly_name()}:{v.get_index()}" for v in op.input_values()]
        found = [op.get_output_partial_shape(i) for i in range(op.get_output_size())]
        attributes = {} if kind == "Constant" else {k: str(v)[:200] for k, v in op.get_attributes().items()}
        rows.append(
            {
                "kind": kind,
                "name": op.get_friendly_name(),
                "inputs": inputs,
                "outputs": outputs,
                "shapes": [[int(n) for n in s.to_shape()] if s.is_static else None for s in found],
                "dtype": _dtype(op.get_output_element_type(0).get_type_name()) if outputs else "",
                "known_as": sorted(n for i in range(op.get_output_size()) for n in op.output(i).get_names()),
                "attributes": attributes,
            }
        )
    return {"rows": rows, "warnings": warnings}


def _dtype(name: str) -> str:
    """Returns the dtype for OpenVINO's name of a type, such as ``float32`` for ``f32`` and ``int8`` for ``i8``."""
    prefix = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    letters = name.rstrip("0123456789")
    return prefix[letters] + name[len(letters) :] if letters in prefix and letters != name else name


def _bits(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())
    return int(digits) if digits else 8


def _is_weight(dtype: str, shape: Shape) -> bool:
    """Tells whether a constant is a weight and not an axis, a size or a single number."""
    return math.prod(shape) > 1 and dtype not in ("int64", "int32", "boolean", "string")


def _ends(
    rows: Sequence[Mapping[str, Any]], kind: str, side: str, specs: Sequence[TensorSpec]
) -> dict[str, TensorSpec]:
    """Returns a dict that maps the names of the graph's inputs or outputs to ``specs``. If the name of a spec is not in
    the IR, the spec is matched by its position."""
    ends = [row for row in rows if row["kind"] == kind]
    names = [row[side][0] for row in ends]
    known = {name: row[side][0] for row in ends for name in row["known_as"]}
    return {known.get(spec.name, names[i] if i < len(names) else spec.name): spec for i, spec in enumerate(specs)}


def _shape_of(name: str, maker: Mapping[str, Mapping[str, Any]]) -> Shape | None:
    row = maker.get(name)
    if row is None:
        return None
    found = row["shapes"][row["outputs"].index(name)]
    return None if found is None else tuple(found)


def _of_integers(name: str, maker: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tells whether a value comes from a FakeQuantize or from integer weights."""
    row = maker.get(name)
    while row is not None and row["kind"] in _BETWEEN and row["inputs"]:
        row = maker.get(row["inputs"][0])
    return row is not None and (row["kind"] == "FakeQuantize" or row["dtype"] in _INTEGERS)


def _flops(row: Mapping[str, Any], ins: Sequence[Shape | None], out: Shape | None) -> int | None:
    """Returns the FLOPs, counted as in ``accel.graph.cost``, or None if a shape isn't known."""
    kind, attributes = row["kind"], row["attributes"]
    if kind in _FREE or out is None:
        return 0 if kind in _FREE else None
    if kind in _KERNEL:
        x, kernel = ins[:2]
        positions = x if kind.endswith("BackpropData") else out
        return (
            None
            if positions is None or kernel is None
            else 2 * math.prod(positions) * math.prod(kernel[_KERNEL[kind] :])
        )
    if kind == "MatMul":
        left = ins[0]
        if not left:
            return None
        turned = attributes.get("transpose_a") in ("True", "true") and len(left) > 1
        return 2 * math.prod(out) * left[-2 if turned else -1]
    if kind in _GATES:
        x = ins[0]
        weight = ins[4 if kind == "LSTMSequence" else 3]
        if x is None or weight is None:
            return None
        hidden = weight[1] // _GATES[kind]
        return 2 * x[0] * x[1] * weight[0] * weight[1] * (x[2] + hidden)
    if kind.startswith("Reduce"):
        return None if ins[0] is None else math.prod(ins[0])
    if kind in ("MaxPool", "AvgPool"):
        window = [int(n) for n in "".join(c if c.isdigit() else " " for c in attributes.get("kernel", "")).split()]
        return math.prod(out) * math.prod(window)
    return math.prod(out) * _ELEMENT.get(kind, 1)
