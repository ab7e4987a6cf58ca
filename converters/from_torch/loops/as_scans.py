"""Replaces the code of a module's functions, so that loops over a dynamic length become scans."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from .rewritten import rewritten

if TYPE_CHECKING:
    import torch

# The functions whose code is replaced: their own code, and the number of exports that replace it. Several threads may
# export at the same time, and the last one restores the code.
_replaced: dict[FunctionType, tuple[CodeType, int]] = {}
_replacing = threading.Lock()
_LIBRARIES = ("torch", "builtins", "accel")


@contextlib.contextmanager
def loops_as_scans(module: torch.nn.Module) -> Iterator[None]:
    """Within the ``with`` block, loops over a symbolic length in the code of ``module`` run as scans. A loop over a
    number runs as before.

    The code of ``module`` are the methods of its classes and of the classes of its submodules, and the functions of the
    files that define these classes.
    """
    functions = _functions(module)
    with _replacing:
        changed = [function for function in functions if function in _replaced or _replace(function)]
        for function in changed:
            code, count = _replaced[function]
            _replaced[function] = code, count + 1
    try:
        yield
    finally:
        with _replacing:
            for function in changed:
                code, count = _replaced.pop(function)
                if count > 1:
                    _replaced[function] = code, count - 1
                else:
                    function.__code__ = code


def _replace(function: FunctionType) -> bool:
    """Replaces the code of ``function``, and tells whether ``function`` has a loop."""
    code = rewritten(function)
    if code is None:
        return False
    _replaced[function] = function.__code__, 0
    function.__code__ = code
    return True


def _functions(module: torch.nn.Module) -> list[FunctionType]:
    kinds = {kind for part in module.modules() for kind in type(part).__mro__ if _is_users(kind.__module__)}
    values: list[Any] = [value for kind in kinds for value in vars(kind).values()]
    for name in {kind.__module__ for kind in kinds}:
        space = vars(sys.modules[name]) if name in sys.modules else {}
        values += [value for value in space.values() if getattr(value, "__module__", None) == name]
    found = (inspect.unwrap(getattr(value, "__func__", value)) for value in values)
    return list({id(one): one for one in found if isinstance(one, FunctionType)}.values())


def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in _LIBRARIES or module.startswith("accel.examples")
