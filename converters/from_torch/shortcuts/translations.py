"""Keeps PyTorch's table of translations to ONNX between exports.

For each export, PyTorch's exporter reads the source code of some 500 functions, to list the translations of its
operators. The list takes half a second, which is most of the time that a small model's export takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .replaced import Replaced

# Each table with the operators that PyTorch had when the table was made.
_tables: dict[tuple[Any, ...], tuple[frozenset[str], Any]] = {}


@contextlib.contextmanager
def kept_translations() -> Iterator[None]:
    """Makes PyTorch's exporter list its translations only once in this process within the ``with`` block."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with _replaced.within(ONNXRegistry, "from_torchlib"):
        yield


def _table(kind: type, *arguments: Any, **named: Any) -> Any:
    """Returns a table for one export, which may add translations to it. Lists the translations again if a library has
    added operators to PyTorch, because the table leaves out operators that don't exist."""
    import torch

    key = (kind, arguments, *sorted(named.items()))
    operators = frozenset(torch._C._dispatch_get_all_op_names())
    found = _tables.get(key)
    if found is not None and found[0] == operators:
        kept = found[1]
    else:
        kept = _replaced.own.__get__(None, kind)(*arguments, **named)
        _tables[key] = frozenset(torch._C._dispatch_get_all_op_names()), kept
    made: Any = kind()
    vars(made).update(vars(kept))
    made.functions = {operator: list(every) for operator, every in kept.functions.items()}
    return made


_replaced = Replaced(classmethod(_table))
