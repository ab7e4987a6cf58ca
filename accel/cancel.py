"""Cancels running work. The code that starts cancellable work sets a check function. If the check function raises an
error, the work ends with this error.

The check also ends work that reports no progress, because the check is called in three places:

- Long loops and all progress reports call ``check_cancelled``.
- ``interruptible`` runs a function that may never call a check, such as a stage. A separate thread calls the check.
- A ``Child`` that waits for an answer calls the check, and kills its process if the check raises an error
  (``accel.child``).
"""

from __future__ import annotations

import contextvars
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# A check returns None while the work may continue, and raises an error to end the work.
Check = Callable[[], None]

# The number of seconds between two calls of a check function. The calls come from the separate thread of
# ``interruptible``, or from a waiting ``Child``.
INTERVAL = 0.5
# The number of seconds until a function that still runs is interrupted again. The function's cleanup gets this time.
AGAIN = 5.0

# Ctrl-C sets this event, because the exporters of some libraries swallow KeyboardInterrupt.
_interrupted = threading.Event()


class _Shield(threading.local):
    """Holds a lock for each thread. A thread that owns its lock isn't interrupted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


_shield = _Shield()
_checks: contextvars.ContextVar[tuple[Check, ...]] = contextvars.ContextVar("accel_cancel_checks", default=())


class Interrupted(BaseException):
    """Ends a function that runs inside ``interruptible``. The class derives from ``BaseException``, so that no
    ``except Exception`` catches the error."""


@contextmanager
def cancelled_by(check: Check) -> Iterator[None]:
    """Ends the work inside the block with the error that ``check`` raises. The checks of outer blocks also apply."""
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


def check_cancelled() -> None:
    """Calls each check. A check raises an error to end the work. Without a check, does nothing."""
    for check in _checks.get():
        check()


class Terminated(KeyboardInterrupt):
    """Ends all work after a SIGTERM. After a Ctrl-C, ``accel optimize`` still publishes the best candidate so far."""


def on_interrupt(number: int = signal.SIGINT, *_: object) -> None:
    """Raises ``KeyboardInterrupt`` for SIGINT or ``Terminated`` for SIGTERM, and records the signal for
    ``check_interrupted``."""
    _interrupted.set()
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def forget_interrupt() -> None:
    """Clears the signal that ``on_interrupt`` recorded. Call this function after the signal was handled."""
    _interrupted.clear()


def check_interrupted() -> None:
    """Raises ``KeyboardInterrupt`` again if a library swallowed the ``KeyboardInterrupt`` of ``on_interrupt``."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def interrupts_recorded() -> Iterator[None]:
    """Inside the block, ``check_interrupted`` raises an error after a Ctrl-C that a library swallowed, as the command
    ``accel`` does. Changes nothing if the caller has a function of its own for SIGINT, or outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forget_interrupt()  # so that the next call doesn't end


def uninterrupted() -> threading.RLock:
    """Returns a context manager. ``interruptible`` interrupts this thread before or after its block, but not inside.

    Code that makes or removes something uses such a block, so that it leaves nothing half made.
    """
    return _shield.lock


def cancellable() -> bool:
    """Tells whether a check is set for the current work."""
    return bool(_checks.get())


def interruptible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns ``function(*arguments)``. If a check raises an error while the function runs, interrupts the function and
    raises this error.

    A separate thread calls the checks and raises ``Interrupted`` inside the function, between two Python instructions.
    A call of native code can't be interrupted, so the function ends only after this call. The function is interrupted
    again every ``AGAIN`` seconds, because code with a bare ``except:`` may swallow the error.
    """
    if not cancellable():
        return function(*arguments)
    done = threading.Event()
    caller = threading.get_ident()
    watch = threading.Thread(
        target=contextvars.copy_context().run,
        args=(_watch, caller, _shield.lock, done),
        name="accel-cancel",
        daemon=True,
    )
    try:
        try:
            watch.start()
            result = function(*arguments)
        finally:
            done.set()
            watch.join()
            _raise_inside(caller, None)  # cancels an interrupt that was not raised yet
    except (Exception, Interrupted):
        check_cancelled()  # raises the error of the check, which says more than the caught error
        raise
    check_cancelled()
    return result


def _watch(caller: int, lock: threading.RLock, done: threading.Event) -> None:
    pause = INTERVAL
    while not done.wait(pause):
        try:
            check_cancelled()
        except Exception:
            # Waiting for the lock would interrupt the caller right after its block, before it has stored what it made.
            if lock.acquire(blocking=False):
                try:
                    _raise_inside(caller, Interrupted)
                finally:
                    lock.release()
                pause = AGAIN


def _raise_inside(thread: int, error: type[BaseException] | None) -> None:
    """Raises ``error`` in another thread, at the thread's next Python instruction. If ``error`` is None, cancels an
    error that hasn't been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
