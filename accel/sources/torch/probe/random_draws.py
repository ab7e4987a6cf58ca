"""Finds the lines at which a model draws random numbers, or calls an operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Packages whose frames on the call stack aren't the model's own code.
_LIBRARIES = ("torch", "accel")
# An error names at most this many lines.
_SHOWN = 3


def random_draws(run: Callable[[], object]) -> str:
    """Calls ``run``, and returns the lines that draw random numbers of PyTorch, such as ``net.py:12 and net.py:20``.
    Returns "" if there is none."""
    import torch
    from torch.utils._pytree import tree_leaves

    def draws(operator: Any, result: Any, again: Callable[[], Any]) -> bool:
        # A dropout or an attention draws nothing if its probability is 0.
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            return False
        first = [value.clone() for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        second = [value for value in tree_leaves(again()) if isinstance(value, torch.Tensor)]
        return not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    return _lines_where(draws, run)


def lines_with(operator: str, run: Callable[[], object]) -> str:
    """Calls ``run``, and returns the lines that call the operator of PyTorch named ``operator``, such as
    ``aten::hypot``. Returns "" if there is none."""
    return _lines_where(lambda called, *_: called._schema.name == operator, run)


def _lines_where(meant: Callable[[Any, Any, Callable[[], Any]], bool], run: Callable[[], object]) -> str:
    """Calls ``run``, and returns the lines whose calls of PyTorch's operators are ``meant``. ``meant`` gets the
    operator, its result, and a function that calls the operator again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, None] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def call() -> Any:
                return func(*args, **(kwargs or {}))

            result = call()
            if meant(func, result, call):
                found[_own_line()] = None
            return result

    with Watch():
        run()
    return " and ".join([line for line in found if line][:_SHOWN])


def _own_line() -> str:
    """Returns the innermost line on the call stack outside PyTorch, or ""."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES or name.startswith("accel.examples"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
