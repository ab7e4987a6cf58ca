"""Decomposes only those operators of an exported program that have no translation to ONNX.

PyTorch's exporter traces the whole program again, to decompose operators and to remove writes to tensors. Most programs
write to no tensor, and nearly all of their operators have a translation. The trace takes a third of an export.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .replaced import Replaced
from .splits import parts_by_slices

# The threads that export now, with the programs that each of them has decomposed.
_running: list[tuple[int, list[Any]]] = []


@contextlib.contextmanager
def few_decompositions() -> Iterator[list[Any]]:
    """Makes PyTorch's exporter decompose single operators within the ``with`` block (see ``decomposed``). Yields the
    list of the programs that were decomposed in this way."""
    from torch.onnx._internal.exporter import _fx_passes

    exporting: tuple[int, list[Any]] = threading.get_ident(), []
    with _replaced.within(_fx_passes, "decompose_with_registry"):
        _running.append(exporting)
        try:
            yield exporting[1]
        finally:
            _running.remove(exporting)


def _decomposed_here(program: Any, registry: Any) -> Any:
    """Decomposes ``program`` as few operators as possible if this thread asked for it, and else as PyTorch does."""
    done = next((done for thread, done in _running if thread == threading.get_ident()), None)
    try:
        made = None if done is None else decomposed(program, registry)
    except (ImportError, AttributeError, TypeError):  # another version of torch has other functions
        made = None
    if made is None:
        return _replaced.own(program, registry)
    assert done is not None
    done.append(made)
    return made


_replaced = Replaced(_decomposed_here)


def decomposed(program: Any, registry: Any) -> Any | None:
    """Replaces the operators of ``program`` (a ``torch.export.ExportedProgram``) that ``registry`` can't translate to
    ONNX by other operators, and returns the program.

    Returns None and changes nothing if PyTorch has to trace the whole program: because the program writes to tensors,
    contains other graphs, or has an operator that can't be traced alone.
    """
    from torch.onnx._internal.exporter import _decomp

    if not _writes_nothing(program):
        return None
    known = set(_decomp.get_onnx_implemented_overloads(registry))
    graph = program.graph
    try:
        unknown = [node for node in graph.nodes if _is_unknown(node, known)]
        if not unknown:  # the table takes a twentieth of a second, which is much for a small model
            return program
        table: Mapping[Any, Callable[..., Any]] = _decomp.create_onnx_friendly_decomposition_table(known)
        # All traces come before the first change, so that the program is still whole if a trace fails.
        traces = [(node, _traced(node, table)) for node in unknown]
    except Exception:  # a decomposition may raise any type of error
        return None
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):  # renames outputs
        for node, traced in traces:
            _replace(graph, node, traced)
    program.graph_module.recompile()
    return program


def _writes_nothing(program: Any) -> bool:
    """Tells whether no operator of ``program`` writes to a tensor, and no operator takes a graph."""
    import torch

    written = program.graph_signature
    if written.buffers_to_mutate or written.user_inputs_to_mutate or len(list(program.graph_module.modules())) > 1:
        return False
    for node in program.graph.nodes:
        if node.op == "get_attr":
            return False
        if node.op == "call_function" and isinstance(node.target, torch._ops.OperatorBase):
            schema = getattr(node.target, "_schema", None)
            if schema is None or schema.is_mutable:
                return False
    return True


def _is_unknown(node: Any, known: set[Any]) -> bool:
    """Tells whether ``node`` is an operator without a translation, or one that PyTorch always decomposes: a view such
    as ``reshape``, or a layer such as ``dropout`` whose effect depends on its training mode. The exporter removes
    assertions, and translates the functions of Python that compute with sizes."""
    import torch
    from torch._export.utils import _check_valid_to_preserve, _is_cia_op

    operation = node.target
    if node.op != "call_function" or not isinstance(operation, torch._ops.OpOverload):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):  # a size, or an assertion
        return False
    if parts_by_slices(node) is not None:
        return True
    return operation not in known or (_is_cia_op(operation) and not _check_valid_to_preserve(operation))


def _leaves(node: Any) -> tuple[list[Any], Any]:
    """Returns the arguments of ``node`` in one list, and the structure that holds them."""
    from torch.utils import _pytree

    return _pytree.tree_flatten((node.args, node.kwargs))


def _traced(node: Any, table: Mapping[Any, Callable[..., Any]]) -> Any:
    """Returns the graph of the operators that ``node`` is made of. The inputs are the nodes in ``node``'s arguments."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx import Node
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree

    leaves, spec = _leaves(node)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    function = parts_by_slices(node) or table.get(node.target, node.target)

    def call(*values: Any) -> Any:
        whole = list(leaves)
        for index, value in zip(places, values, strict=True):
            whole[index] = value
        args, kwargs = _pytree.tree_unflatten(whole, spec)
        return function(*args, **kwargs)

    with enable_python_dispatcher():  # it knows that a batch norm only writes to its statistics in training mode
        traced = make_fx(call, decomposition_table=dict(table))(*(leaves[index].meta["val"] for index in places))
    traced.graph.eliminate_dead_code()
    if any(one.op == "get_attr" for one in traced.graph.nodes):
        raise ValueError(f"{node.target} has constants")
    if any(one.op == "call_function" and one.target is node.target for one in traced.graph.nodes):
        raise ValueError(f"{node.target} isn't decomposed")
    return traced.graph


def _replace(graph: Any, node: Any, traced: Any) -> None:
    """Replaces ``node`` by the nodes of the graph ``traced``."""
    from torch.fx import Node

    holders = [one for one in traced.nodes if one.op == "placeholder"]
    copies = dict(zip(holders, (leaf for leaf in _leaves(node)[0] if isinstance(leaf, Node)), strict=True))
    before = set(graph.nodes)
    with graph.inserting_before(node):
        found = graph.graph_copy(traced, copies)
    for made in set(graph.nodes) - before:
        made.meta = {**node.meta, "val": made.meta.get("val")}
    if isinstance(found, Node):
        node.replace_all_uses_with(found)
    else:
        for user in list(node.users):  # the parts of several results
            assert user.target is operator.getitem
            user.replace_all_uses_with(found[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
