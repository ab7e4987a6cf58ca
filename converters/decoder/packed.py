"""Packs the int4 and int8 weights of a decoder for accel's CPU kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.artifact import Artifact
from accel.errors import StageFailed
from accel.kernels.native.cpu.layout import BLOCKS, ZERO_POINTS, Packed, pack
from accel.kernels.onnx.packed import DOMAIN, GATED, MOST_PARTS, OF_PARTS, VERSION, packed_function, packed_node
from accel.sources.onnx.file import opset_of
from accel.sources.onnx.weights import read_detached, weight_array
from accel.stage import StageConfig

from ..graph.write import onnx_artifact
from .wires import Wires

_PRODUCT = "MatMulNBits"


@dataclass(frozen=True, kw_only=True)
class PackWeightsConfig(StageConfig):
    """The stage has no options."""


class NothingPacked(StageFailed):
    """The model has no product that the kernels support."""


def pack_weights(src: Artifact, config: PackWeightsConfig, out: Path) -> Artifact:  # noqa: ARG001 - no options
    """Replaces each MatMulNBits of ``src`` by a PackedProduct (see ``accel.kernels.onnx.packed``). A Split after the
    product becomes a part of it, and so does SiLU(gate) * up. The inputs and outputs stay the same.

    The scales are rounded to fp16. Products with zero points, a bias or another block stay as they are. Raises
    ``NothingPacked`` if no product can be packed.
    """
    model = read_detached(src.path)
    wires = Wires(model)
    made = Counter(name for node in wires.nodes if (name := _replace(wires, node)) is not None)
    if not made:
        raise NothingPacked(
            f"{src.path.name} has no {_PRODUCT} in blocks of {', '.join(map(str, BLOCKS))} without zero points; "
            "quantize it with mode int4-weights first"
        )
    wires.finish()
    model.functions.extend(packed_function(name, opset_of(model)) for name in made)
    if all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return onnx_artifact(src, model, out, {"packed": dict(sorted(made.items()))})


def _replace(wires: Wires, node: onnx.NodeProto) -> str | None:
    """Puts a packed product in the place of ``node``. Returns the name of its operator, or None if it stays."""
    if node.op_type != _PRODUCT or any(node.input[3:]):
        return None
    weights, scales = (wires.constants.get(name) for name in node.input[1:3])
    numbers = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    bits, block = numbers.get("bits", 4), numbers["block_size"]
    if weights is None or scales is None or bits not in ZERO_POINTS or block not in BLOCKS:
        return None
    if weights.data_type != onnx.TensorProto.UINT8 or scales.data_type != onnx.TensorProto.FLOAT:
        return None
    parts = _parts(wires, node, int(numbers["N"]))
    rows = np.concatenate([np.arange(begin, end) for begin, end in parts.rows])
    packed = pack(
        weight_array(weights).reshape(int(numbers["N"]), -1, block * bits // 8)[rows],
        weight_array(scales).reshape(int(numbers["N"]), -1)[rows],
        k=int(numbers["K"]),
        bits=bits,
        sizes=[end - begin for begin, end in parts.rows],
    )
    _place(wires, node, parts, packed)
    return parts.operator


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The operator, the rows of the weights of each of its matrices, and the values that it makes."""

    operator: str
    rows: list[tuple[int, int]]
    outputs: list[str]


def _parts(wires: Wires, node: onnx.NodeProto, size: int) -> _Parts:
    """Returns what the product ``node`` of ``size`` outputs becomes together with the nodes that read it."""
    alone = _Parts(operator=OF_PARTS[1], rows=[(0, size)], outputs=[node.output[0]])
    split = wires.only_reader(node.output[0])
    if split is None or split.op_type != "Split" or len(split.output) > MOST_PARTS or len(split.input) < 2:
        return alone
    sizes = wires.constants.get(split.input[1])
    axis = {a.name: a.i for a in split.attribute}.get("axis", 0)
    if sizes is None or axis != -1:
        return alone
    ends = np.cumsum(numpy_helper.to_array(sizes)).tolist()
    rows = list(zip([0, *ends[:-1]], ends, strict=True))
    if len(ends) == 2 and ends[1] == 2 * ends[0] and (gated := _gate(wires, list(split.output))) is not None:
        order, out = gated
        return _Parts(operator=GATED, rows=[rows[at] for at in order], outputs=[out])
    return _Parts(operator=OF_PARTS[len(ends)], rows=rows, outputs=list(split.output))


def _gate(wires: Wires, halves: list[str]) -> tuple[tuple[int, int], str] | None:
    """Returns the order (gate, up) of the two values and the result, if they are read by gate * sigmoid(gate) * up
    alone."""
    for at, (gate, up) in enumerate((halves, halves[::-1])):
        readers = {node.op_type: node for node in wires.readers[gate]}
        last = wires.only_reader(up)
        if len(wires.readers[gate]) != 2 or set(readers) != {"Sigmoid", "Mul"} or last is None or gate in wires.outputs:
            continue
        sigmoid, inner = readers["Sigmoid"], readers["Mul"]
        if wires.only_reader(sigmoid.output[0]) is not inner or {*inner.input} != {gate, sigmoid.output[0]}:
            continue
        if (
            wires.only_reader(inner.output[0]) is last
            and last.op_type == "Mul"
            and {*last.input} == {inner.output[0], up}
        ):
            return ((0, 1) if at == 0 else (1, 0)), str(last.output[0])
    return None


def _place(wires: Wires, node: onnx.NodeProto, parts: _Parts, packed: Packed) -> None:
    inputs = [
        node.input[0],
        wires.constant(packed.weights, "packed_weights"),
        wires.constant(packed.scales, "packed_scales"),
    ]
    made = packed_node(parts.operator, inputs, parts.outputs, packed)
    attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in made.attribute}
    wires.instead(node, made.op_type, inputs, parts.outputs, DOMAIN, **attributes)
