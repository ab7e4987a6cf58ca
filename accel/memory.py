"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim() -> None:
    """Give back what the C library keeps of freed memory, where it can (glibc, malloc_trim(3)).

    Weights come in pieces below the size from which glibc maps memory apart: after a model is closed about its size
    stays with the process, and with the next model that lies elsewhere as much again.
    """
    if (function := _malloc_trim()) is not None:
        function(0)


@cache
def _malloc_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no such library; a system that has no "the program itself"
        return None
