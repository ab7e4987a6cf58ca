"""Runs TensorFlow in a child process. The child's log doesn't appear on the terminal. If the child crashes, the parent
process raises an error."""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path
from typing import Any

from accel.child import Child
from accel.errors import ChildCrashed, MissingExtra

# TensorFlow computes the reference outputs on the CPU, because TF32 rounding on a GPU would look like an error of the
# conversion.
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}

_process: Child | None = None


def in_tensorflow(target: str, /, **arguments: Any) -> Any:
    """Calls ``target(**arguments)`` in the TensorFlow process and returns the result.

    The first call starts the process. Later calls use the same process, because importing TensorFlow takes seconds. The
    call runs in the caller's current folder, because a factory may read files there. Raises ``MissingExtra`` if
    TensorFlow is not installed. Raises ``ChildCrashed`` with the last line of the process' log if the process dies.
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
    """Raises ``MissingExtra`` if TensorFlow or one of ``others`` is not installed. Imports nothing."""
    for name in ("tensorflow", *others):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, "tensorflow")


def close() -> None:
    """Ends the TensorFlow process. The next call of ``in_tensorflow`` starts a new process."""
    global _process
    if _process is not None:
        process, _process = _process, None
        process.kill()
        process.close()
        atexit.unregister(close)
