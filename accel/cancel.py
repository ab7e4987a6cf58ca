"""Ends work that is under way. The caller that starts the work sets a check. An error that the check raises ends the
work.

Work that reports no progress ends too, because the check is called in three places:

- Long loops and all progress reports call ``check_cancelled``.
- ``interruptible`` runs a function that may never call a check, such as a stage. A watching thread calls the check.
- A ``Child`` that waits for an answer calls the check, and kills its process if the check raises (``accel.child``).
"""

from __future__ import annotations

import contextvars
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# A check returns as long as the work may go on, and raises an error to end the work.
Check = Callable[[], None]

# A watching thread or a waiting child calls the check at intervals of this many seconds.
INTERVAL = 0.5

# Set by Ctrl-C, because the exporters of some libraries swallow KeyboardInterrupt.
_interrupted = threading.Event()

_checks: contextvars.ContextVar[tuple[Check, ...]] = contextvars.ContextVar("accel_cancel_checks", default=())


class Interrupted(BaseException):
    """Ends a function inside ``interruptible``. Derives from ``BaseException``, so that no ``except Exception`` catches
    it."""


@contextmanager
def cancelled_by(check: Check) -> Iterator[None]:
    """Ends the work inside the block with the error that ``check`` raises. The checks of outer blocks also apply."""
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


def check_cancelled() -> None:
    """Calls each check. A check raises an error to end the work. Returns at once if no check is set."""
    for check in _checks.get():
        check()


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, which ends all work. Ctrl-C lets ``accel optimize`` publish the best candidate so far."""


def on_interrupt(number: int = signal.SIGINT, *_: object) -> None:
    """Handles SIGINT and SIGTERM: raises ``KeyboardInterrupt`` or ``Terminated``, and remembers the signal for
    ``check_interrupted``."""
    _interrupted.set()
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def forget_interrupt() -> None:
    """Forgets the signal that ``on_interrupt`` remembered, because the caller has handled it."""
    _interrupted.clear()


def check_interrupted() -> None:
    """Raises ``KeyboardInterrupt`` again if a library swallowed the ``KeyboardInterrupt`` of ``on_interrupt``."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def cancellable() -> bool:
    """Tells whether a check is set for the current work."""
    return bool(_checks.get())


def interruptible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns ``function(*arguments)``, or raises the error of a check while the function still runs.

    A separate thread calls the checks and raises ``Interrupted`` inside the function, between two Python instructions.
    A call of native code can't be interrupted and runs to its end first.
    """
    if not cancellable():
        return function(*arguments)
    done = threading.Event()
    caller = threading.get_ident()
    watch = threading.Thread(
        target=contextvars.copy_context().run, args=(_watch, caller, done), name="accel-cancel", daemon=True
    )
    try:
        try:
            watch.start()
            result = function(*arguments)
        finally:
            done.set()
            watch.join()
            _raise_inside(caller, None)  # drops an interrupt that has not arrived yet
    except (Exception, Interrupted):
        check_cancelled()  # the check's error says more than the interrupted function's error
        raise
    check_cancelled()
    return result


def _watch(caller: int, done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        try:
            check_cancelled()
        except Exception:
            _raise_inside(caller, Interrupted)
            return


def _raise_inside(thread: int, error: type[BaseException] | None) -> None:
    """Raises ``error`` in another thread at its next Python instruction. An ``error`` of None cancels the pending
    error."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
