"""Computes a digest of a metric's code. A cached judgement is reused only if the digest is unchanged."""

from __future__ import annotations

import inspect
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from accel.artifact import file_sha256, text_sha256


def metric_digest(metric: Callable[..., Any]) -> str:
    """Returns a sha256 of the code and data of ``metric``. The digest covers the function, its file and the files
    imported from the same folder. The digest also covers the arrays and numbers of the function's module, such as
    labels that are loaded on import. A closure or a callable object gets a new digest at each call, so its judgements
    are never taken from the cache.
    """
    if not isinstance(metric, FunctionType) or metric.__closure__:
        return text_sha256(uuid.uuid4().hex)
    try:
        parts = [metric.__qualname__, inspect.getsource(metric)]
        file = Path(inspect.getfile(metric)).resolve()
    except (OSError, TypeError):
        return text_sha256(uuid.uuid4().hex)
    parts.append(repr(metric.__defaults__) + repr(metric.__kwdefaults__))
    parts += sorted({file_sha256(path) for path in _neighbours(file)})
    parts += [f"{name} {text}" for name, value in sorted(metric.__globals__.items()) if (text := _plain(value))]
    return text_sha256("\n".join(parts))


def _neighbours(file: Path) -> list[Path]:
    """Returns ``file`` and the files of imported modules in the same folder. Leaves out ``file`` if it doesn't exist,
    because the code of a notebook's cell is in no file."""
    found = [file] if file.is_file() else []
    for module in list(sys.modules.values()):
        where = getattr(module, "__file__", None)
        if isinstance(where, str) and where.endswith(".py"):
            path = Path(where).resolve()
            if path.parent == file.parent and path.is_file():
                found.append(path)
    return found


def _plain(value: object) -> str:
    """Returns a text that identifies a number or an array, and an empty text for any other value."""
    import numpy as np

    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} " + text_sha256(value.tobytes().hex())
    return repr(value) if isinstance(value, int | float | complex | bool) else ""
