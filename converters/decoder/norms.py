"""Fuses RMS norms, and the additions before them, into ONNX Runtime's SkipSimplifiedLayerNormalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .wires import MICROSOFT, Wires


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """An RMS norm of ``value``, whose last node is ``end``. ``scale`` is the constant of one scale for each column, or
    empty for scales of 1."""

    value: str
    epsilon: float
    end: onnx.NodeProto
    scale: str


def fuse_norms(wires: Wires) -> int:
    """Fuses every addition ``a + b`` whose sum goes into an RMS norm. Returns the number of fused norms."""
    count = 0
    for node in wires.nodes:
        norm = _norm(wires, node)
        added = wires.maker(norm.value, "Add") if norm is not None else None
        if norm is None or added is None or any(name in wires.constants for name in added.input):
            continue
        size = wires.last_dim(norm.value)
        shapes = [wires.shape(name) for name in added.input]
        if size is None or shapes[0] is None or len(shapes[0]) != 3 or shapes[0] != shapes[1]:
            continue
        scale = norm.scale or wires.constant(np.ones(size, np.float32), "ones")
        wires.instead(
            added,
            "SkipSimplifiedLayerNormalization",
            [*added.input, scale],
            [norm.end.output[0], "", "", norm.value],
            MICROSOFT,
            epsilon=norm.epsilon,
        )
        count += 1
    return count


def _norm(wires: Wires, root: onnx.NodeProto) -> _Norm | None:
    """Returns the RMS norm whose square root is ``root``: ``x / sqrt(mean(x²) + epsilon)``, and perhaps a scale."""
    if root.op_type != "Sqrt":
        return None
    added = wires.maker(root.input[0], "Add")
    if added is None:
        return None
    numbers = [wires.scalar(name) for name in added.input]
    epsilon = next((number for number in numbers if number is not None), None)
    mean = next((node for name in added.input if (node := wires.maker(name, "ReduceMean"))), None)
    square = wires.maker(mean.input[0], "Pow", "Mul") if mean is not None else None
    if epsilon is None or square is None or not _of_last_dim(wires, mean):
        return None
    value = square.input[0]
    if square.input[1] != value if square.op_type == "Mul" else wires.scalar(square.input[1]) != 2:
        return None
    end = wires.only_reader(root.output[0])
    if end is not None and (end.op_type == "Reciprocal" or (end.op_type == "Div" and wires.scalar(end.input[0]) == 1)):
        end = wires.only_reader(end.output[0])
        if end is None or end.op_type != "Mul" or value not in end.input:
            return None
    elif end is None or end.op_type != "Div" or end.input[0] != value:
        return None
    return _scaled(wires, _Norm(value=value, epsilon=epsilon, end=end, scale=""))


def _of_last_dim(wires: Wires, mean: onnx.NodeProto | None) -> bool:
    """Tells whether the mean is over the last dim alone, which it keeps."""
    if mean is None or any(a.name == "keepdims" and not a.i for a in mean.attribute):
        return False
    axes = [list(a.ints) for a in mean.attribute if a.name == "axes"]
    found = axes[0] if axes else [wires.scalar(mean.input[1])] if len(mean.input) > 1 else []
    shape = wires.shape(mean.input[0])
    return found == [-1] or (shape is not None and found == [len(shape) - 1])


def _scaled(wires: Wires, norm: _Norm) -> _Norm:
    """Returns the norm together with the product with a constant row that follows it, if there is one."""
    after = wires.only_reader(norm.end.output[0])
    if after is None or after.op_type != "Mul":
        return norm
    scale = next((name for name in after.input if name in wires.constants), None)
    if scale is None or list(wires.constants[scale].dims) != [wires.last_dim(norm.value)]:
        return norm
    return _Norm(value=norm.value, epsilon=norm.epsilon, end=after, scale=scale)
