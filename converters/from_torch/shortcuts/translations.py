"""Keeps PyTorch's table of translations to ONNX between exports.

For each export, PyTorch's exporter reads the source code of some 500 functions, to list the translations of its
operators. The list takes half a second, which is most of the time that a small model's export takes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

# Each table with the operators that PyTorch had when the table was made, the number of exports that run now, and the
# method of torch.
_tables: dict[tuple[Any, ...], tuple[frozenset[str], Any]] = {}
_running = 0
_replacing = threading.Lock()
_torchs: Any = None


@contextlib.contextmanager
def kept_translations() -> Iterator[None]:
    """Makes PyTorch's exporter list its translations only once in this process within the ``with`` block. Several
    threads may export at the same time: the last one restores PyTorch's own method."""
    global _running, _torchs
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with _replacing:
        if not _running:
            _torchs = vars(ONNXRegistry)["from_torchlib"]
            ONNXRegistry.from_torchlib = classmethod(_table)  # type: ignore[method-assign,assignment]
        _running += 1
    try:
        yield
    finally:
        with _replacing:
            _running -= 1
            if not _running:
                ONNXRegistry.from_torchlib = _torchs  # type: ignore[method-assign]


def _table(kind: type, *arguments: Any, **named: Any) -> Any:
    """Returns a table for one export, which may add translations to it. Lists the translations again if a library has
    added operators to PyTorch, because the table leaves out operators that don't exist."""
    import torch

    key = (kind, arguments, *sorted(named.items()))
    operators = frozenset(torch._C._dispatch_get_all_op_names())
    with _replacing:
        own, found = _torchs, _tables.get(key)
    if found is not None and found[0] == operators:
        kept = found[1]
    else:
        kept = own.__get__(None, kind)(*arguments, **named)
        with _replacing:
            _tables[key] = frozenset(torch._C._dispatch_get_all_op_names()), kept
    made: Any = kind()
    vars(made).update(vars(kept))
    made.functions = {operator: list(every) for operator, every in kept.functions.items()}
    return made
