"""Traces modules to torch.fx graphs. Rejects a module if its graph may compute wrong outputs."""

from __future__ import annotations

import copy
import dis
import inspect
import operator
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

IN_PLACE: tuple[Any, ...] = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem,
)  # fmt: skip


def trace(module: nn.Module, example_inputs: Sequence[Any] | None) -> fx.GraphModule | None:
    """Returns the torch.fx graph of a module, or None if torch.fx can't trace it.

    Without ``example_inputs``, also returns None for a module with operators such as ``x += y``, because the graph may
    compute wrong outputs.
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        module = nn.Sequential(module).eval()
    # A trace is valid only for calls with the same optional inputs as the traced call.
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    if example_inputs is None and adds_in_place(module):
        return None
    try:
        traced = fx.symbolic_trace(module)
        if example_inputs is None:
            return traced
        with torch.no_grad():
            ShapeProp(traced).propagate(*copy.deepcopy(tuple(example_inputs)))
    except Exception:  # fx can't trace control flow, optional inputs or leaf functions
        return None
    return traced


def adds_in_place(module: nn.Module) -> bool:
    """Tells whether the code of a submodule has operators such as ``x += y``. Also checks the functions that the
    submodule calls in the same file.

    torch.fx records ``x += y`` as ``x + y``, which doesn't change x. After ``x += y``, later nodes of the traced graph
    would read the old value of x.
    """
    return any(map(_kind_adds_in_place, {type(part) for part in module.modules()}))


def _kind_adds_in_place(kind: type[nn.Module]) -> bool:
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    waiting: list[Any] = [value for base in own for value in vars(base).values() if isinstance(value, FunctionType)]
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if any(step.opname == "BINARY_OP" and step.argrepr.endswith("=") for step in dis.get_instructions(function)):
            return True
        near = (function.__globals__.get(name) for name in function.__code__.co_names)
        waiting += [one for one in near if isinstance(one, FunctionType) and one.__module__ == function.__module__]
    return False


def writes_between(taken: list[fx.Node], modules: dict[str, nn.Module]) -> bool:
    """Tells whether a node that runs between the nodes of ``taken`` may write to a tensor."""
    node = taken[0]
    while node is not taken[-1]:
        node = node.next
        if node in taken:
            continue
        target = str(getattr(node.target, "__name__", node.target))
        if node.op in ("call_method", "call_function") and (
            target.endswith("_") or node.target in IN_PLACE or node.kwargs.get("inplace") or "out" in node.kwargs
        ):
            return True
        if node.op == "call_module" and getattr(modules.get(str(node.target)), "inplace", False):
            return True
    return False
