"""Raises an error for offsets of embedding bags on which PyTorch may end the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATOR = "embedding_bag"
# The place of the argument ``include_last_offset`` of the operator: the last offset is then the end of the last bag.
_HAS_END = 7
_with_bags: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def checked_bags(module: torch.nn.Module) -> AbstractContextManager[object]:
    """Returns a context manager in which ``module`` raises ``ValueError`` for wrong offsets of embedding bags, instead
    of reading beyond their end. PyTorch does so for no bags and a ``padding_idx``. Does nothing for a module without
    embedding bags, because the checks take time."""
    if module not in _with_bags:
        _with_bags[module] = _has_bags(module)
    return _Checked() if _with_bags[module] else nullcontext()


class _Checked(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _OPERATOR in func.name() and len(args) > 2:
            _check(args[1], args[2], has_end=len(args) > _HAS_END and args[_HAS_END])
        return func(*args, **(kwargs or {}))


def _check(indices: torch.Tensor, offsets: torch.Tensor, *, has_end: bool) -> None:
    if len(offsets) <= has_end:
        raise ValueError(f"the {len(offsets)} offsets of an embedding bag make no bag; give at least {1 + has_end}")
    if not (int(offsets[0]) >= 0 and bool((offsets.diff() >= 0).all()) and int(offsets[-1]) <= len(indices)):
        raise ValueError(
            f"the offsets of an embedding bag have to be sorted, from 0 to the number of its indices {len(indices)}"
        )


def _has_bags(module: torch.nn.Module) -> bool:
    for part in module.modules():
        if isinstance(part, torch.nn.EmbeddingBag):
            return True
        if isinstance(part, torch.jit.ScriptModule | torch.fx.GraphModule):
            if _OPERATOR in str(getattr(part, "code", "")):  # a TorchScript module without forward has no code
                return True
        elif any(_OPERATOR in _names(function.__code__) for function in _functions(part)):
            return True
    return False


def _functions(part: torch.nn.Module) -> Iterator[FunctionType]:
    """Yields the methods of a module, the functions in its attributes, and the functions beside them in their files."""
    places: list[Mapping[str, Any]] = [vars(part)]
    for kind in type(part).__mro__:
        if not kind.__module__.startswith(("torch.", "builtins")):
            places += [vars(kind), vars(sys.modules.get(kind.__module__, kind))]
    for place in places:
        yield from (one for one in [*place.values()] if isinstance(one, FunctionType))


def _names(code: CodeType) -> set[str]:
    """Returns the names that ``code`` and the functions in it use."""
    return {*code.co_names}.union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
