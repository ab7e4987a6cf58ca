"""Folds the constants of a frozen graph, and removes branches that are never taken and random ops without effect.

Only the child process that runs TensorFlow imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from .graph import RANDOM, constant, leading_to_outputs, operation, without_weights
from .idle_noise import without_idle_noise
from .loaded import Frozen

# The maximum number of folding rounds. Branches may be nested, so one round may not be enough.
_ROUNDS = 20
_CHOICES = {"If": ("else_branch", "then_branch"), "StatelessIf": ("else_branch", "then_branch")}
_CASES = frozenset({"Case", "StatelessCase"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


def folded(frozen: Frozen) -> Frozen:
    """Returns ``frozen`` without branches that are never taken and without random ops that have no effect. Function
    calls are inlined. A copy of the graph without its weights is folded, so folding is quick for a model of any
    size."""
    small = without_weights(frozen)
    before = {node.name: node for node in frozen.graph.node}
    weights = {n.name: before[n.name] for n in small.graph.node if n.op != before[n.name].op}
    graph = _pruned(replace(small, graph=_with_functional_branches(small.graph)))
    for _ in range(_ROUNDS):
        last = graph.SerializeToString(deterministic=True)
        graph = _simplified(replace(small, graph=_with_taken_branches(graph)))
        graph = _pruned(replace(small, graph=without_idle_noise(graph)))
        if graph.SerializeToString(deterministic=True) == last:
            break
    for node in graph.node:
        if node.name in weights:
            node.CopyFrom(weights[node.name])
    return replace(frozen, graph=graph)


def training_ops(frozen: Frozen) -> int:
    """Counts the training ops that the outputs depend on: random ops, batch normalizations in training mode, and
    variances over the batch."""
    nodes = leading_to_outputs(frozen)
    squared = {node.name for node in nodes if node.op in ("SquaredDifference", "Square")}
    axes = {node.name: node for node in nodes if node.op == "Const"}
    found = 0
    for node in nodes:
        if node.op in RANDOM or (node.op.startswith("FusedBatchNorm") and node.attr["is_training"].b):
            found += 1
        elif node.op == "Mean" and operation(node.input[0]) in squared and operation(node.input[1]) in axes:
            over = tf.make_ndarray(axes[operation(node.input[1])].attr["value"].tensor)
            found += 0 in over.reshape(-1)
    return found


def as_imported(graph: Any) -> Any:
    """Returns ``graph`` in a form that TensorFlow can import, with the outputs of frozen variables renamed. Freezing
    replaces the operator that reads a variable, but keeps the name of the operator's output (``X:value:0``)."""
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph)
    for function in made.library.function:
        ops = {node.name: node.op for node in function.node_def}
        for node in function.node_def:
            for place, name in enumerate(node.input):
                start, _, rest = name.partition(":")
                if rest.startswith("value:") and ops.get(start) in ("Identity", "Const"):
                    node.input[place] = f"{start}:output:{rest.partition(':')[2]}"
    return made


def _pruned(frozen: Frozen) -> Any:
    """Returns the graph with only its inputs and the nodes that its outputs depend on."""
    known = {node.name for node in frozen.graph.node}
    ends = dict.fromkeys(operation(name) for name in (*frozen.outputs.values(), *frozen.inputs.values()))
    return tf.compat.v1.graph_util.extract_sub_graph(frozen.graph, [name for name in ends if name in known])


def _with_functional_branches(graph: Any) -> Any:
    """Keeps TensorFlow from rewriting each ``If`` as ``Switch`` and ``Merge`` when it inlines a function."""
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph)
    for node in (*made.node, *(node for function in made.library.function for node in function.node_def)):
        if "_lower_using_switch_merge" in node.attr and (node.op in _CHOICES or node.op in _CASES):
            del node.attr["_lower_using_switch_merge"]
    return made


def _with_taken_branches(graph: Any) -> Any:
    """Replaces each ``If`` and ``Case`` that has a constant condition by a call of the chosen branch. The call gets a
    new name, because TensorFlow aborts if the name of an inlined call is also the name of a scope. A new ``IdentityN``
    node gets the old name."""
    nodes = {node.name: node for node in graph.node}
    made = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        chosen, call = _chosen(node, nodes), made.node.add()
        call.CopyFrom(node)
        kinds = call.attr["Tout"].list.type if chosen is not None or node.op in _CALLS else ()
        if not kinds:
            continue
        call.name = f"{node.name}__call"
        same = made.node.add(name=node.name, op="IdentityN")
        same.input.extend(f"{call.name}:{place}" for place in range(len(kinds)))
        same.attr["T"].list.type.extend(kinds)
        if chosen is not None:
            call.op = "StatefulPartitionedCall"
            del call.input[0]
            call.attr.clear()
            for name in ("Tin", "Tout"):
                call.attr[name].CopyFrom(node.attr[name])
            call.attr["f"].func.CopyFrom(chosen)
    return made


def _chosen(node: Any, nodes: Mapping[str, Any]) -> Any:
    """Returns the branch function that ``node`` runs, or None if the condition of ``node`` is not a constant."""
    if node.op not in _CHOICES and node.op not in _CASES:
        return None
    value = constant(node.input[0], nodes)
    if value is None or value.ndim:
        return None
    if node.op in _CHOICES:
        return node.attr[_CHOICES[node.op][bool(value)]].func
    branches = node.attr["branches"].list.func
    return branches[int(value) if 0 <= value < len(branches) else len(branches) - 1]


def _simplified(frozen: Frozen) -> Any:
    """Returns the graph after TensorFlow has inlined calls, folded constants and removed untaken branches."""
    from tensorflow.python.grappler import tf_optimizer

    with tf.Graph().as_default():
        tf.import_graph_def(frozen.graph, name="")
        whole = tf.compat.v1.train.export_meta_graph(graph_def=frozen.graph)
    ends = [*frozen.inputs.values(), *frozen.outputs.values()]
    whole.collection_def["train_op"].node_list.value.extend(ends)
    config = tf.compat.v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.optimizers.extend(["function", "constfold", "loop"])
    rewrite.function_optimization = type(rewrite).AGGRESSIVE
    return _without_copies(tf_optimizer.OptimizeGraph(config, whole))


def _without_copies(graph: Any) -> Any:
    """Connects the readers of each ``IdentityN`` directly to the inputs of the ``IdentityN``, because TensorFlow
    doesn't fold constants through this op. Removes the control inputs of every node that has data inputs, because
    control inputs keep untaken branches in the graph."""
    copies = {node.name: node for node in graph.node if node.op == "IdentityN"}
    for node in graph.node:
        for place, name in enumerate(node.input):
            source = name
            while source[0] != "^" and operation(source) in copies:
                source = copies[operation(source)].input[int(source.partition(":")[2] or 0)]
            node.input[place] = source
        if node.input and node.input[0][0] != "^":
            node.input[:] = [name for name in node.input if name[0] != "^"]
    return graph
