"""Loads bare graphs, which don't name their inputs and outputs: frozen graphs and TF1 checkpoints.

This module is imported only in the TensorFlow process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from accel.errors import BadSource, InvalidModel, one_line
from accel.spelling import arguments

from .folding import as_imported, folded, training_ops
from .graph import freeze_session_graph, operation, strip_dropout
from .loaded import Frozen, Loaded, dtype_name, plain_name, shape_of
from .placeholders import left_out, with_placeholders
from .source import TensorFlowSpec

if TYPE_CHECKING:
    import numpy as np


def _read_graph(path: str) -> Any:
    graph = tf.compat.v1.GraphDef()
    data = Path(path).read_bytes()
    try:
        graph.ParseFromString(data)
    except Exception as error:
        if b"serve" in data[:4096]:
            raise InvalidModel(f"the file {path} belongs to a SavedModel; give the folder of the SavedModel") from error
        raise InvalidModel(f"the file {path} is not a TensorFlow graph; give a frozen GraphDef") from error
    if not graph.node or not all(node.op and node.name for node in graph.node):
        raise InvalidModel(f"the file {path} is not a TensorFlow graph; give a frozen GraphDef")
    return graph


def load_graph(spec: TensorFlowSpec) -> Loaded:
    graph = _read_graph(spec.path)
    if any(node.op in ("VariableV2", "VarHandleOp", "RefVariable") for node in graph.node):
        raise BadSource(
            f"the graph {spec.path} isn't frozen, so its weights are in a checkpoint; give the checkpoint's .meta file "
            "instead"
        )
    return _from_graph(graph, spec)


def load_checkpoint(spec: TensorFlowSpec) -> Loaded:
    path = Path(spec.path)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        saver = tf.compat.v1.train.import_meta_graph(str(path), clear_devices=True)
        if saver is None:
            raise BadSource(
                f"the checkpoint {path} lists no variables to restore; save it again with tf.compat.v1.train.Saver"
            )
        graph = session.graph.as_graph_def()
        _check_tensors(graph, spec)
        saver.restore(session, str(path.with_suffix("")))
        frozen = freeze_session_graph(session, spec.outputs)
    return _from_graph(frozen, spec)


def _from_graph(graph: Any, spec: TensorFlowSpec) -> Loaded:
    _check_tensors(graph, spec)
    whole, graph = graph, tf.compat.v1.graph_util.extract_sub_graph(graph, [operation(name) for name in spec.outputs])
    _check_connected(whole, graph, spec)
    inputs, outputs = ({plain_name(name): name for name in names} for names in (spec.inputs, spec.outputs))
    return _from_frozen(Frozen(graph=graph, inputs=inputs, outputs=outputs), spec)


def load_signature(spec: TensorFlowSpec) -> Loaded:
    """Loads one signature of a TF1 SavedModel. The inputs of the signature may be only some of the graph's
    placeholders. ``tf.saved_model.load`` refuses a signature with missing placeholders.

    Raises ``KeyError`` if the SavedModel has no signature of this name.
    """
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = tf.compat.v1.saved_model.load(session, ["serve"], spec.path).signature_def
        signature = found[spec.signature or "serving_default"]
        inputs, outputs = (
            {name: tensors[name].name for name in sorted(tensors)} for tensors in (signature.inputs, signature.outputs)
        )
        graph = freeze_session_graph(session, list(outputs.values()))
    return _from_frozen(Frozen(graph=graph, inputs=inputs, outputs=outputs), spec)


def _from_frozen(frozen: Frozen, spec: TensorFlowSpec) -> Loaded:
    said: dict[str, str] = {}
    whole = converted = frozen
    if spec.placeholders or left_out(frozen):
        # ``whole`` is the user's graph before folding, and computes the reference outputs for the conversion.
        whole, said = with_placeholders(replace(frozen, graph=as_imported(frozen.graph)), spec)
        converted = folded(whole)
    if spec.strip and training_ops(converted):
        whole = converted = replace(converted, graph=strip_dropout(converted.graph))
    try:
        call, tensors = run_graph(whole)
    except ValueError as error:
        raise BadSource(
            f"the graph {spec.path} can't be cut at {', '.join(frozen.inputs.values())} ({one_line(error)}); "
            f"{_other_tensors(frozen.graph)}"
        ) from error
    inputs = [(n, dtype_name(t.dtype), shape_of(t.shape)) for n, t in zip(frozen.inputs, tensors, strict=True)]
    return Loaded(call=call, inputs=inputs, outputs=list(frozen.outputs), freeze=lambda: converted, placeholders=said)


def _check_tensors(graph: Any, spec: TensorFlowSpec) -> None:
    """Raises ``BadSource`` if the spec has no inputs or outputs, or names a tensor that isn't in the graph. The error
    message suggests tensors to use."""
    nodes = {node.name: node for node in graph.node}
    if not spec.inputs or not spec.outputs:
        raise BadSource(f"the graph {spec.path} doesn't name its inputs and outputs; {_other_tensors(graph)}")
    for name in (*spec.inputs, *spec.outputs):
        node, _, index = name.partition(":")
        if node not in nodes or not _has_output(nodes[node], index or "0"):
            raise BadSource(f"the graph {spec.path} has no tensor {name}; {_other_tensors(graph)}")


def _has_output(node: Any, index: str) -> bool:
    """Tells whether a node has the output ``index``. The number of outputs of some operators, such as a call of a
    function, is unknown here, so any number is accepted for them."""
    known = op_def_registry.get(node.op)
    if not index.isdecimal():
        return False
    if known is None or any(out.number_attr or out.type_list_attr for out in known.output_arg):
        return True
    return int(index) < len(known.output_arg)


def _check_connected(whole: Any, graph: Any, spec: TensorFlowSpec) -> None:
    """Raises ``BadSource`` if an input isn't in ``graph``, the part of ``whole`` that computes the outputs."""
    used = {node.name for node in graph.node}
    for name in spec.inputs:
        if operation(name) not in used:
            rest = [other for other in spec.inputs if operation(other) in used]
            said = f"the outputs {', '.join(spec.outputs)} of the graph {spec.path} don't depend on the input {name}"
            fix = f"leave it out: {arguments(graph_inputs=rest, graph_outputs=spec.outputs)}, or " if rest else ""
            raise BadSource(f"{said}; {fix}{_other_tensors(whole)}")


def _other_tensors(graph: Any) -> str:
    """Returns the advice to pass inputs and outputs of ``graph``."""
    starts, ends = _ends(graph)
    return f"pass tensors of the graph, e.g. {arguments(graph_inputs=starts[:4] or ['x:0'], graph_outputs=ends[:4])}"


def _ends(graph: Any) -> tuple[list[str], list[str]]:
    """Returns the likely inputs (placeholders) and the likely outputs of a graph. Tensors that depend on the inputs and
    are read by no other node are likely outputs."""
    kinds = ("Placeholder", "PlaceholderWithDefault")
    starts = [node.name for node in graph.node if node.op in kinds and not node.name.startswith("save/")]
    reads = {node.name: [name.lstrip("^").partition(":")[0] for name in node.input] for node in graph.node}
    used = {name for names in reads.values() for name in names}
    users: dict[str, list[str]] = {}
    for name, names in reads.items():
        for other in names:
            users.setdefault(other, []).append(name)
    reached, queue = set(starts), list(starts)
    while queue:
        for name in users.get(queue.pop(), ()):
            if name not in reached:
                reached.add(name)
                queue.append(name)
    quiet = ("Const", "NoOp", "Assert", "Assign", "AssignVariableOp", *kinds)
    ends = [n.name for n in graph.node if n.name in reached and n.name not in used and n.op not in quiet]
    return [f"{name}:0" for name in starts], [f"{name}:0" for name in ends]


def graph_ends(spec: TensorFlowSpec) -> tuple[list[str], list[str]]:
    """Returns the likely input and output tensors of a ``.pb`` or ``.meta`` file. Files of these formats don't name
    their inputs and outputs.

    Raises ``InvalidModel`` if the file can't be read.
    """
    if spec.form == "graph":
        return _ends(_read_graph(spec.path))
    try:
        with tf.Graph().as_default() as graph:
            tf.compat.v1.train.import_meta_graph(spec.path, clear_devices=True)
            return _ends(graph.as_graph_def())
    except Exception as error:
        raise InvalidModel(
            f"the file {spec.path} can't be read as a TF1 checkpoint ({one_line(error)}); save it again"
        ) from error


def run_graph(frozen: Frozen) -> tuple[Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]], list[Any]]:
    """Returns a function and the input tensors of a frozen graph. The function runs the graph on a dict of arrays.

    Raises ``ValueError`` if the outputs can't be computed from the inputs.
    """
    whole = tf.compat.v1.wrap_function(lambda: tf.compat.v1.import_graph_def(frozen.graph, name=""), [])
    function = whole.prune(list(frozen.inputs.values()), list(frozen.outputs.values()))

    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = function(*(tf.constant(feeds[name]) for name in frozen.inputs))
        return {name: value.numpy() for name, value in zip(frozen.outputs, found, strict=True)}

    return call, [whole.graph.get_tensor_by_name(name) for name in frozen.inputs.values()]
