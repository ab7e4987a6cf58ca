"""Chooses the nodes that have to stay float32 for any input data. The rules read the graph and its constants, and don't
run the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from onnx import numpy_helper

from accel.sources.onnx.weights import weight_array

from ..graph.names import nodes_matching
from .source import FLOAT, Source, largest, to_low

# In these operators, a constant beyond the 16-bit format's range is a mask or a bound. A mask or a bound may be
# clamped, because it only has to be very low or very high.
MASKING = frozenset(
    {
        "Add", "Clip", "Concat", "ConstantOfShape", "Expand", "Max", "Min", "Mul", "Pad", "Reshape", "ScatterElements",
        "ScatterND", "Sub", "Tile", "Unsqueeze", "Where",
    }
)  # fmt: skip

# Operators that a mask can pass through before the mask is applied.
MASK_FLOW = MASKING | frozenset(
    {"Cast", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Slice", "Split", "Squeeze", "Transpose"}
)

# A model may add an epsilon to a value, apply these operators, and divide by the result.
_EPSILON_FLOW = frozenset(
    {"Cast", "Expand", "Identity", "Log", "Pow", "Reciprocal", "Reshape", "Sqrt", "Squeeze", "Transpose", "Unsqueeze"}
)
_EPSILON_ENDS = frozenset({"Div", "Mul"})

# Operators of index arithmetic, which computes sizes and positions. Index arithmetic has to be exact if its result
# becomes an integer.
_INDEX_FLOW = frozenset(
    {
        "Abs", "Add", "Cast", "Ceil", "Clip", "Concat", "Div", "Expand", "Floor", "Gather", "Identity", "Max", "Min",
        "Mod", "Mul", "Neg", "Pow", "Range", "Reciprocal", "Reshape", "Round", "Slice", "Split", "Sqrt", "Squeeze",
        "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})

_INTEGERS = frozenset({2, 3, 4, 5, 6, 7, 12, 13})  # TensorProto's codes of uint8 to int64, uint32 and uint64


def fixed_in_float32(source: Source, patterns: Sequence[str]) -> dict[int, str]:
    """Returns the nodes that stay float32, as a dict from a node's index to the reason.

    ``patterns`` are shell patterns for names of nodes or operators. Raises ``UnknownName`` if a pattern matches
    nothing.
    """
    kept: dict[int, str] = {}
    for pattern in patterns:
        kept |= dict.fromkeys(nodes_matching(source.nodes, pattern), f"the pattern {pattern!r} names it")
    for rule in (_index_arithmetic, _constants):
        for index, reason in rule(source):
            kept.setdefault(index, reason)
    return {index: reason for index, reason in kept.items() if source.castable(index)}


def _index_arithmetic(source: Source) -> Iterator[tuple[int, str]]:
    """Yields the nodes that cast floats to integers, and the nodes that compute sizes or positions (index arithmetic).
    In 16 bits, rounding could change a large size or position.

    Index arithmetic is arithmetic whose result becomes one of these inputs:

    - the input of a Cast to integers
    - an input of a Range or TopK
    - an input of a Resize that can't be cast to 16 bits
    - an input that stays float32 at a node that is cast to 16 bits, such as the scales of a Resize
    """
    ends: list[int] = []
    for index, node in enumerate(source.nodes):
        if node.op_type == "Cast" and source.is_float(node.input[0]):
            if source.types.get(node.output[0]) in _INTEGERS:
                ends.append(index)
                yield index, "it makes integers"
        elif source.castable(index) and FLOAT in source.typing(index).inputs.values():
            for position, kind in source.typing(index).inputs.items():
                if kind == FLOAT and node.input[position] in source.producer:
                    ends.append(source.producer[node.input[position]])
        elif node.op_type in ("Range", "TopK") or (node.op_type == "Resize" and not source.castable(index)):
            ends += [source.producer[n] for n in node.input if source.is_float(n) and n in source.producer]
    seen: set[int] = set()
    while ends:
        index = ends.pop()
        if index in seen or source.nodes[index].op_type not in _INDEX_FLOW:
            continue
        seen.add(index)
        yield index, "arithmetic on sizes or positions"
        ends += [source.producer[n] for n in source.nodes[index].input if source.is_float(n) and n in source.producer]


def _constants(source: Source) -> Iterator[tuple[int, str]]:
    top = largest(source.low)
    for name, tensor in source.constants.items():
        users = source.consumers.get(name, [])
        if not users:
            continue
        value = weight_array(tensor)
        finite = value[np.isfinite(value)]
        if finite.size == 0:
            continue
        if float(np.abs(finite).max()) > top:
            for index in users:
                if source.nodes[index].op_type not in MASKING:
                    yield index, f"its constant {name!r} exceeds {top:g}"
        fault = _lost(finite, source.low)
        if not fault:
            continue
        for index in users:
            if source.nodes[index].op_type in _QUANTIZERS and fault < _SCALE_ERROR:
                continue
            yield index, f"its constant {name!r} is too small for the format"
            for end in _towards_division(source, index):
                yield end, f"it divides by a value that the constant {name!r} keeps from zero"


# The largest accepted relative error of a quantization scale. An error below this limit doesn't matter, because the
# rounding of the values to int8 causes an error of similar size.
_SCALE_ERROR = 2**-6


def _lost(finite: np.ndarray, low: int) -> float:
    """Returns the relative l2 error of a constant in the 16-bit format. Returns 0 if the error is at most the usual
    rounding error of the format."""
    import ml_dtypes

    inside = finite[np.abs(finite) <= largest(low)].astype(np.float64)
    norm = float(np.linalg.norm(inside))
    if norm == 0:
        return 0.0
    rounded = to_low(inside.astype(np.float32), low)
    info = ml_dtypes.finfo(rounded.dtype)
    error = float(np.linalg.norm(rounded.astype(np.float64) - inside)) / norm
    if inside.size == 1 and abs(float(inside[0])) < float(info.smallest_normal):
        return max(error, float(info.eps))
    return error if error > float(info.eps) else 0.0


def _towards_division(source: Source, start: int) -> Iterator[int]:
    """Yields the nodes that the result of ``start`` flows into, up to and including the next Div or Mul. The node
    ``start`` adds an epsilon. Leaves out ``start``."""
    if source.nodes[start].op_type not in ("Add", "Clip", "Max", "Sub", "Where"):
        return
    queue, seen = [start], {start}
    while queue:
        for name in source.nodes[queue.pop()].output:
            for user in source.consumers.get(name, []):
                op = source.nodes[user].op_type
                if user in seen or op not in _EPSILON_FLOW | _EPSILON_ENDS:
                    continue
                seen.add(user)
                yield user
                if op in _EPSILON_FLOW:
                    queue.append(user)


def masked_tensors(source: Source) -> set[str]:
    """Returns the tensors that a clamped constant flows into. If a tensor depends on a clamped constant, very large
    values of the tensor may be mask values instead of overflows."""
    top = largest(source.low)
    tainted = {n for n, t in source.constants.items() if largest_value(weight_array(t)) > top}
    for node in source.nodes:
        filled = node.op_type == "ConstantOfShape" and any(
            largest_value(numpy_helper.to_array(a.t)) > top for a in node.attribute if a.t.data_type == FLOAT
        )
        if filled or (node.op_type in MASK_FLOW and not tainted.isdisjoint(node.input)):
            tainted.update(name for name in node.output if name)
    return tainted


def largest_value(value: np.ndarray) -> float:
    """Returns the largest finite absolute value, or 0 if no value is finite."""
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
