"""Finds the outputs that a module computes from integers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def integers_alone(run: Callable[[], Mapping[str, Any]]) -> frozenset[str]:
    """Calls ``run``, which returns tensors by name. Returns the names of the tensors that hold integers or bools, and
    that PyTorch computes without a float. No rounding changes these tensors.

    If the model turns a float tensor into a Python number, returns no names, because the number may be used anywhere.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakTensorKeyDictionary

    # The tensors of integers that depend on a float.
    rounded: Any = WeakTensorKeyDictionary()
    read: list[str] = []

    def is_rounded(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and (_holds_floats(value) or value in rounded)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if any(is_rounded(value) for value in tree_leaves((args, kwargs))):
                for value in tree_leaves(result):
                    if not isinstance(value, torch.Tensor):
                        read.append(str(func))
                    elif not _holds_floats(value):
                        rounded[value] = True
            return result

    with Watch():
        found = run()
    if read:
        return frozenset()
    return frozenset(name for name, value in found.items() if not is_rounded(value))


def _holds_floats(value: Any) -> bool:
    return bool(value.is_floating_point() or value.is_complex())
