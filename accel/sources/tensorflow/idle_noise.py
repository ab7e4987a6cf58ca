"""Removes from a graph the random ops that have no effect, such as a dropout that keeps every element.

Only the child process that runs TensorFlow imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from .graph import constant, operation

_UNIFORM = frozenset({"RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"})
_NORMAL = frozenset(
    {
        "RandomStandardNormal", "TruncatedNormal", "StatelessRandomNormal", "StatelessRandomNormalV2",
        "StatelessTruncatedNormal", "StatelessTruncatedNormalV2",
    }
)  # fmt: skip
_ELEMENTWISE = frozenset(
    {
        "Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "Neg", "Floor", "Round", "Cast", "Identity", "Maximum",
        "Minimum", "GreaterEqual", "Greater", "Less", "LessEqual", "LogicalNot",
    }
)  # fmt: skip

# Maps each operator to its neutral operand. With a neutral operand, the operator returns its other operand unchanged.
_NEUTRAL = {"Mul": 1, "Add": 0, "AddV2": 0, "Sub": 0, "RealDiv": 1, "Div": 1}
_FROM_SECOND = frozenset({"Sub", "RealDiv", "Div"})
_SELECT = frozenset({"Select", "SelectV2"})


def without_idle_noise(graph: Any) -> Any:
    """Returns ``graph`` without the random ops that change no result: masks of ones, added zeros, and selections that
    always pick the same input. Also replaces a selection with a constant condition by the selected input."""
    nodes = {node.name: node for node in graph.node}
    idle: dict[str, np.ndarray] = {}
    for node in graph.node:
        if node.op in _UNIFORM or node.op in _NORMAL:
            idle |= _idle(node, graph, nodes)
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph)
    for node in made.node:
        order = [name for name in node.input if name[0] == "^"]
        if node.name in idle and idle[node.name].ndim == 0:  # for example, the condition of a branch
            _make_constant(node, idle[node.name])
        elif kept := _without_effect(node, idle, nodes):
            kind = node.attr["T"].type
            node.op = "Identity"
            node.input[:] = [kept, *order]
            node.attr.clear()
            node.attr["T"].type = kind
    return made


def _make_constant(node: Any, value: np.ndarray) -> None:
    proto = tf.make_tensor_proto(value)
    node.op = "Const"
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)


def _idle(noise: Any, graph: Any, nodes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Finds the tensors that depend on ``noise`` but always have the same value, and maps their names to this value.
    Only tensors that are computed from ``noise`` and constant numbers are considered. A value in the returned dict has
    rank 0 if ``noise`` is a single number, else rank 1.

    Computes the tensors from 1001 values that span the range of the noise.
    """
    spread: dict[str, Any] = {noise.name: noise}
    numbers: dict[str, Any] = {}
    grown = True
    while grown:
        grown = False
        for node in graph.node:
            if node.name in spread or node.op not in _ELEMENTWISE:
                continue
            names = [operation(name) for name in node.input if name[0] != "^"]
            fixed = {name: nodes[name] for name in names if _is_number(name, nodes)}
            if len(fixed) < len(names) and all(name in spread or name in fixed for name in names):
                spread[node.name] = node
                numbers |= fixed
                grown = True
    if len(spread) == 1:
        return {}
    small = tf.compat.v1.GraphDef()
    for node in (*spread.values(), *numbers.values()):
        copy = small.node.add()
        copy.CopyFrom(node)
        copy.ClearField("device")
        copy.input[:] = [name for name in node.input if name[0] != "^"]
    small.versions.CopyFrom(graph.versions)
    _make_constant(small.node[0], _values(noise))
    with tf.Graph().as_default() as whole, tf.compat.v1.Session(graph=whole) as session:
        tf.import_graph_def(small, name="")
        found = session.run({name: f"{name}:0" for name in spread})
    shape = constant(noise.input[0], nodes)
    single = shape is not None and shape.size == 0
    return {
        name: value[0] if single else value[:1]
        for name, value in found.items()
        if name != noise.name and (value == value[0]).all()
    }


def _values(noise: Any) -> np.ndarray:
    kind = tf.as_dtype(noise.attr["dtype"].type)
    if noise.op in _NORMAL:
        return np.linspace(-100, 100, 1001).astype(kind.as_numpy_dtype)
    # Uniform noise is at most 1 - eps, because TensorFlow fills only the bits of the mantissa at random.
    end = 1 - float(np.asarray(tf.experimental.numpy.finfo(kind.as_numpy_dtype).eps))
    return np.linspace(0, end, 1001).astype(kind.as_numpy_dtype)


def _is_number(name: str, nodes: Mapping[str, Any]) -> bool:
    """Tells whether the tensor is a constant of rank 0."""
    node = nodes.get(name)
    return node is not None and node.op == "Const" and not node.attr["value"].tensor.tensor_shape.dim


def _without_effect(node: Any, idle: Mapping[str, np.ndarray], nodes: Mapping[str, Any]) -> str:
    """Returns the name of the input that ``node`` passes on unchanged, or "" if there is no such input."""
    names = [name for name in node.input if name[0] != "^"]
    if node.op in _SELECT:
        value = idle.get(operation(names[0]))
        if value is None:
            value = constant(names[0], nodes)
        if value is None or value.size != 1:
            return ""
        chosen = str(names[1] if value.reshape(-1)[0] else names[2])
        # Keeps a node that always selects a constant number, because the node may be a dropout that drops every
        # element.
        return "" if _is_number(operation(chosen), nodes) else chosen
    if node.op not in _NEUTRAL or node.name in idle:
        return ""
    for place in (1,) if node.op in _FROM_SECOND else (0, 1):
        value = idle.get(operation(names[place]))
        if value is not None and value.reshape(-1)[0] == _NEUTRAL[node.op]:
            return str(names[1 - place])
    return ""
