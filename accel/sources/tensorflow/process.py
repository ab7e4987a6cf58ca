"""The one process that TensorFlow lives in: never this one, its log never on the terminal, a crash only an error."""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path
from typing import Any

from accel.child import Child
from accel.errors import ChildCrashed, MissingExtra

# The reference is computed on the CPU: a GPU's TF32 would be taken for an error of the conversion.
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}

_process: Child | None = None


def in_tensorflow(target: str, /, **arguments: Any) -> Any:
    """``target(**arguments)`` in the TensorFlow process, which is started for the first call and kept for the next:
    importing TensorFlow takes seconds. It stands where this process stands now: a factory may read what lies there.

    Raises ``MissingExtra`` without TensorFlow, ``ChildCrashed`` with the last line it wrote where the process died.
    """
    global _process
    require_tensorflow()
    if _process is None:
        _process = Child(env=_ENV)
        atexit.register(close)
    try:
        _process.call("os:chdir", path=str(Path.cwd()))
        return _process.call(target, **arguments)
    except (ChildCrashed, KeyboardInterrupt):
        close()
        raise


def require_tensorflow(*others: str) -> None:
    """``MissingExtra`` where TensorFlow (or one of ``others``) is not installed; nothing is imported."""
    for name in ("tensorflow", *others):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, "tensorflow")


def close() -> None:
    """End the process; the next call starts another."""
    global _process
    if _process is not None:
        process, _process = _process, None
        process.kill()
        process.close()
        atexit.unregister(close)
