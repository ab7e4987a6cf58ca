"""Freezes TensorFlow graphs, finds random ops, removes dropout and counts nodes.

Only the child process that runs TensorFlow imports this module.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from accel.errors import BadSource, RandomOps
from accel.spelling import option

from .loaded import Frozen

RANDOM = frozenset(
    {
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal",
        "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "Multinomial",
        "StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal", "StatelessRandomNormalV2",
        "StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "StatelessMultinomial", "StatefulUniform",
        "StatefulStandardNormal", "StatefulStandardNormalV2", "StatefulTruncatedNormal",
    }
)  # fmt: skip

# The operators that turn random numbers into a mask of zeros and ones. TF1 computes floor(keep probability + random
# number), and TF2 compares the random number with the dropout rate.
_MASK = frozenset(
    {"Add", "AddV2", "Sub", "Mul", "Floor", "GreaterEqual", "Greater", "Less", "LessEqual", "Cast", "Identity"}
)
_ASSIGN = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_SCALE = frozenset({"RealDiv", "Div", "Mul"})
_SAME = frozenset({"Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "SelectV2"})
_NO_WORK = frozenset({"Const", "NoOp", "Placeholder", "PlaceholderWithDefault", "Identity"})
# A constant with at most this many elements may be a shape. A constant with more elements is a weight.
_FEW = 1000
_GATHER = {"GatherV2": 0, "Gather": 0, "ResourceGather": 0}


def freeze_function(function: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Frozen:
    """Freezes a concrete function of the tensors ``inputs``: variables become constants and calls are inlined.

    Raises ``BadSource`` if the function has state that can't be frozen, or changes its variables.
    """
    frozen = _with_constants(function)
    taken = [t.name for t in frozen.inputs if t.dtype != tf.resource]
    if len(taken) != len(inputs):
        raise BadSource(
            f"the model holds {len(frozen.inputs) - len(inputs)} resources that can't be frozen, such as lookup "
            "tables; export only the part of the model without these resources"
        )
    return Frozen(
        graph=_without_assignments(_with_values(frozen.graph.as_graph_def(add_shapes=True))),
        inputs=dict(zip(inputs, taken, strict=True)),
        outputs=dict(zip(outputs, (t.name for t in frozen.outputs), strict=True)),
    )


def _with_constants(function: Any) -> Any:
    """Returns ``function`` with its variables as constants. Removes assignments to integer variables, because Keras'
    dropout stores the state of its random generator in such variables.

    Raises ``BadSource`` if the model assigns to a variable that holds no integers.
    """
    from tensorflow.python.framework import convert_to_constants

    how = {"lower_control_flow": False, "aggressive_inlining": True}
    try:
        return convert_to_constants.convert_variables_to_constants_v2(function, **how)
    except ValueError as error:  # raised if the function assigns to a variable that became a constant
        if "VariableOp" not in str(error):
            raise
    data = convert_to_constants._FunctionConverterDataInEager(func=function, **how)
    graph, replaced = convert_to_constants._replace_variables_by_constants(converter_data=data)
    for node in graph.node:
        if node.op not in _ASSIGN:
            continue
        if not tf.as_dtype(node.attr["dtype"].type).is_integer:
            raise BadSource(
                f"the model was saved for training and changes its variables when it is called ({node.name}), as batch "
                "normalization does; save it for inference, with training=False"
            )
        _make_no_op(node)
    return convert_to_constants._construct_concrete_function(function, graph, replaced)


def _make_no_op(node: Any) -> None:
    """Turns an assignment into a ``NoOp`` with the same control inputs, so the order of execution stays the same."""
    node.op = "NoOp"
    node.input[:] = [name for name in node.input if name.startswith("^")]
    node.attr.clear()


def _without_assignments(graph: Any) -> Any:
    """Removes assignments from the functions of ``graph``, such as the training branch of a batch normalization. The
    variables are constants already, so an assignment has no effect on later reads."""
    for function in graph.library.function:
        for node in function.node_def:
            if node.op in _ASSIGN:
                _make_no_op(node)
    return graph


def _with_values(graph: Any) -> Any:
    """Turns the variables in the ``graph`` of a TF1 file into constants with the variables' current values."""
    handles = {node.name: node for node in graph.node if node.op == "VarHandleOp"}
    if not handles:
        return graph
    values: dict[str, Any] = {}
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if node.op != "ReadVariableOp":
            continue
        name = operation(node.input[0])
        while name not in handles and nodes[name].op == "Identity":
            name = operation(nodes[name].input[0])
        if name not in handles:
            continue
        handle = handles[name]
        kind = tf.as_dtype(handle.attr["dtype"].type)
        if handle.name not in values:
            resource = tf.raw_ops.VarHandleOp(
                dtype=kind,
                shape=tf.TensorShape(handle.attr["shape"].shape),
                container=handle.attr["container"].s.decode(),
                shared_name=(handle.attr["shared_name"].s or handle.name.encode()).decode(),
            )
            values[handle.name] = tf.make_tensor_proto(tf.raw_ops.ReadVariableOp(resource=resource, dtype=kind).numpy())
        node.op = "Const"
        del node.input[:]
        node.attr.clear()
        node.attr["dtype"].type = kind.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(values[handle.name])
    return graph


def freeze_session_graph(session: Any, outputs: Sequence[str]) -> Any:
    """Returns the part of a TF1 session's graph that computes ``outputs``, with its variables as constants."""
    nodes = [name.partition(":")[0] for name in outputs]
    return tf.compat.v1.graph_util.convert_variables_to_constants(session, session.graph.as_graph_def(), nodes)


def graph_sha256(frozen: Frozen) -> str:
    """Returns the sha256 of a frozen graph's operators, edges, attributes and weights.

    The hash leaves out the names of the nodes, because Keras numbers the nodes in the order of their creation.
    """
    places = {node.name: str(place) for place, node in enumerate(frozen.graph.node)}
    digest = hashlib.sha256(repr([*frozen.inputs, *frozen.outputs]).encode())
    for name in (*frozen.inputs.values(), *frozen.outputs.values()):
        digest.update(places[operation(name)].encode() + name.partition(":")[2].encode())
    for node in frozen.graph.node:
        digest.update(node.op.encode())
        for name in node.input:
            digest.update(f" {name[:1] == '^'} {places.get(operation(name))} {name.partition(':')[2]}".encode())
        for key in sorted(node.attr):
            if not key.startswith("_"):
                digest.update(key.encode() + node.attr[key].SerializeToString(deterministic=True))
    for function in frozen.graph.library.function:
        digest.update(function.SerializeToString(deterministic=True))
    return digest.hexdigest()


def refuse_random(frozen: Frozen, where: str, *, stripped: bool = False) -> None:
    """Raises ``RandomOps`` if the outputs depend on random ops. If ``stripped`` is True, dropout was removed already,
    and the error is a plain ``BadSource``."""
    found = [f"{node.name} ({node.op})" for node in leading_to_outputs(frozen) if node.op in RANDOM]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        what = f"{where} still holds random ops, so its outputs differ from run to run: {', '.join(found[:3])}{more}"
        strip = option("strip_training_ops", True)
        if stripped:
            raise BadSource(
                f"{what}; {strip} found no dropout in these ops: leave placeholders for training out of the inputs, or "
                "save the model for inference"
            )
        raise RandomOps(f"{what}; pass {strip} to remove dropout, or save the model for inference")


def without_weights(frozen: Frozen) -> Frozen:
    """Replaces the large constants of ``frozen`` by placeholders. The result is small but keeps all shapes."""
    graph = tf.compat.v1.GraphDef(versions=frozen.graph.versions, library=frozen.graph.library)
    for node in frozen.graph.node:
        shape = node.attr["value"].tensor.tensor_shape if node.op == "Const" else None
        if shape is None or math.prod(dim.size for dim in shape.dim) <= _FEW:
            graph.node.append(node)
            continue
        opened = graph.node.add(name=node.name, op="Placeholder", input=[name for name in node.input if name[0] == "^"])
        opened.attr["dtype"].CopyFrom(node.attr["dtype"])
        opened.attr["shape"].shape.CopyFrom(shape)
    return replace(frozen, graph=graph)


def refuse_windows_beyond(frozen: Frozen, feeds: Mapping[str, np.ndarray]) -> None:
    """Raises TensorFlow's ``ValueError`` if a convolution or pooling window of the graph is too large for inputs shaped
    like ``feeds``. With a window that is too large, oneDNN's convolutions return uninitialized memory and raise no
    error.
    """
    with tf.Graph().as_default():
        fixed = {
            tensor: tf.compat.v1.placeholder(tf.as_dtype(feeds[name].dtype), feeds[name].shape)
            for name, tensor in frozen.inputs.items()
        }
        tf.import_graph_def(frozen.graph, input_map=fixed, name="")


def leading_to_outputs(frozen: Frozen) -> list[Any]:
    """Returns the nodes that the outputs are computed from, including the nodes of called functions."""
    ends = [name.partition(":")[0] for name in frozen.outputs.values()]
    graph = tf.compat.v1.graph_util.extract_sub_graph(frozen.graph, ends)
    # The function library still contains functions that were inlined. No node calls these functions.
    called = {
        f for node in graph.node for a in node.attr.values() for f in (a.func.name, *(x.name for x in a.list.func)) if f
    }
    nodes = list(graph.node)
    functions = {f.signature.name: f for f in frozen.graph.library.function}
    seen: set[str] = set()
    while called - seen:
        name = next(iter(called - seen))
        seen.add(name)
        if name in functions:
            nodes += list(functions[name].node_def)
            called |= {a.func.name for n in functions[name].node_def for a in n.attr.values() if a.func.name}
    return nodes


def strip_dropout(graph: Any) -> Any:
    """Returns ``graph`` with every dropout replaced by its input, because dropout is the identity at inference. A
    dropout turns random numbers into a mask of zeros and ones, and divides its input by the keep probability. Then the
    dropout multiplies the divided input by the mask, or uses the mask to select elements. Random ops outside a dropout
    stay in the graph, and ``refuse_random`` reports them.
    """
    nodes = {node.name: node for node in graph.node}
    users: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(operation(name), []).append(node.name)
    replaced: dict[str, str] = {}
    for node in graph.node:
        if node.op not in RANDOM:
            continue
        masks = {node.name}
        for _ in range(8):
            grown = masks | {
                user
                for mask in masks
                for user in users.get(mask, ())
                if nodes[user].op in _MASK and _is_mask(nodes[user], masks, nodes)
            }
            if grown == masks:
                break
            masks = grown
        for mask in masks:
            for user in users.get(mask, ()):
                data = _dropped(nodes[user], masks, nodes)
                if data:
                    replaced[user] = data
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph)
    for node in made.node:
        if node.name in replaced:
            kind = node.attr["T"].type
            node.op = "Identity"
            del node.input[:]
            node.input.append(replaced[node.name])
            node.attr.clear()
            node.attr["T"].type = kind
    return made


def _is_mask(node: Any, masks: set[str], nodes: Mapping[str, Any]) -> bool:
    """Tells whether ``node`` combines only masks and scalars."""
    return all(operation(name) in masks or _is_scalar(name, nodes) for name in node.input)


def _dropped(node: Any, masks: set[str], nodes: Mapping[str, Any]) -> str:
    """Returns the input tensor of a dropout if ``node`` is the dropout's last node, else ""."""
    others = [name for name in node.input if operation(name) not in masks]
    if node.op == "Mul" and len(others) == 1:
        return _unscaled(others[0], nodes)
    if node.op in ("Select", "SelectV2") and len(others) == 2 and operation(node.input[0]) in masks:
        return _unscaled(others[0], nodes)
    return ""


def _unscaled(name: str, nodes: Mapping[str, Any]) -> str:
    """If ``name`` is the result of dividing a tensor by the keep probability, returns the divided tensor, else "".

    TF1 divides by the keep probability, and TF2 multiplies by the inverse of the keep probability.
    """
    node = nodes.get(operation(name))
    if node is None or node.op not in _SCALE:
        return ""
    first, second = node.input[:2]
    if _is_scalar(second, nodes):
        return str(first)
    return str(second) if node.op == "Mul" and _is_scalar(first, nodes) else ""


def _is_scalar(name: str, nodes: Mapping[str, Any]) -> bool:
    """Tells whether the tensor is a scalar constant, a placeholder with a default, or the result of arithmetic on such
    tensors."""
    node = nodes.get(operation(name))
    if node is None:
        return False
    if node.op == "Const":
        return not list(node.attr["value"].tensor.tensor_shape.dim) or all(
            d.size == 1 for d in node.attr["value"].tensor.tensor_shape.dim
        )
    if node.op == "PlaceholderWithDefault":
        return True
    if node.op in ("Sub", "RealDiv", "Div", "Identity", "Cast", "Mul", "Add", "AddV2"):
        return all(_is_scalar(inner, nodes) for inner in node.input)
    return False


def count_graph(frozen: Frozen) -> dict[str, Any]:
    """Counts nodes, operators, parameters and bytes of a frozen graph for ``model.count``. Counts the float constants
    as weights."""
    nodes = leading_to_outputs(frozen)
    operators = Counter(node.op for node in nodes if node.op not in _NO_WORK)
    parameters, weights = 0, Counter[str]()
    for node in nodes:
        if node.op != "Const":
            continue
        kind = tf.as_dtype(node.attr["dtype"].type)
        number = math.prod(dim.size for dim in node.attr["value"].tensor.tensor_shape.dim)
        if kind.is_floating and number > 1:
            parameters += number
            weights[kind.name] += number * kind.size
    return {
        "nodes": sum(operators.values()),
        "parameters": parameters,
        "operators": dict(operators.most_common()),
        "weight_bytes": dict(weights.most_common()),
    }


def index_bounds(frozen: Frozen) -> dict[str, tuple[int, int]]:
    """Returns the smallest and largest index for each integer input that selects rows of a constant table, such as an
    embedding."""
    nodes = {node.name: node for node in frozen.graph.node}
    origin = {operation(tensor): name for name, tensor in frozen.inputs.items()}
    bounds: dict[str, tuple[int, int]] = {}
    for node in frozen.graph.node:
        if node.op not in _GATHER:
            continue
        rows = _rows(node.input[0], nodes)
        name = operation(node.input[1])
        while name not in origin and name in nodes and nodes[name].op in _SAME:
            # Keras implements negative indices, which count from the end, as Select(ids < 0, ids + rows, ids).
            name = operation(nodes[name].input[2 if nodes[name].op == "SelectV2" else 0])
        if rows and name in origin:
            last = min(rows - 1, bounds.get(origin[name], (0, rows))[1])
            bounds[origin[name]] = (0, last)
    return bounds


def _rows(name: str, nodes: Mapping[str, Any]) -> int:
    node = nodes.get(operation(name))
    while node is not None and node.op in ("Identity", "ReadVariableOp"):
        node = nodes.get(operation(node.input[0]))
    if node is None or node.op != "Const":
        return 0
    dims = node.attr["value"].tensor.tensor_shape.dim
    return int(dims[0].size) if dims else 0


def constant(name: str, nodes: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the value of a constant tensor, or None if the tensor is not constant."""
    node = nodes.get(operation(name))
    while node is not None and node.op == "Identity":
        node = nodes.get(operation(node.input[0]))
    if node is None or node.op != "Const":
        return None
    value: np.ndarray = tf.make_ndarray(node.attr["value"].tensor)
    return value


def operation(name: str) -> str:
    """Returns the name of the operation that computes the tensor ``name``."""
    return name.lstrip("^").partition(":")[0]
