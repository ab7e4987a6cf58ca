"""Sends progress reports of long-running work to a watcher, which displays them."""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from accel.cancel import check_cancelled, interrupts_recorded

# A function that takes a message and the fraction of the work that is done (None if unknown).
Sink = Callable[[str, float | None], None]

_sink: ContextVar[Sink | None] = ContextVar("accel_progress_sink", default=None)


def report(message: str, fraction: float | None = None) -> None:
    """Reports progress to the current watcher, if there is one. Raises the error of ``check_cancelled`` if the work was
    cancelled."""
    sink = _sink.get()
    if sink is not None:
        sink(message, fraction)
    check_cancelled()


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Inside the ``with`` block, ``sink`` receives every progress report."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
# The width of a progress line in characters. The width fits every notebook and terminal.
_LINE = 78
# If this environment variable is set, Python functions show no progress and print no warnings.
QUIET = "ACCEL_QUIET"
_NO_DIGITS = str.maketrans("", "", "0123456789")


class PlainLines:
    """Prints progress to stderr for a log. Prints one line for each new step, and no lines for percentages, batches or
    rounds."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, message: str, fraction: float | None) -> None:  # noqa: ARG002 - part of the interface
        kind = message.translate(_NO_DIGITS)
        if kind != self._last:
            self._last = kind
            print(f"accel: {message}", file=sys.stderr, flush=True)


class VanishingLine:
    """Shows progress as one line on stderr, for a notebook and an interactive Python."""

    def __call__(self, message: str, fraction: float | None) -> None:
        done = "" if fraction is None else f" {fraction:.0%}"
        sys.stderr.write("\r" + f"accel: {message}{done}"[:_LINE].ljust(_LINE))
        sys.stderr.flush()

    def erase(self) -> None:
        """Removes the line."""
        sys.stderr.write("\r" + " " * _LINE + "\r")
        sys.stderr.flush()


def silent(message: str, fraction: float | None) -> None:
    """Shows no progress."""


def shows_progress(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorates a public function so that Python users see its progress and the ``warnings`` of its result on stderr.

    A notebook and an interactive Python show a line that vanishes at the end. A script prints a line for each step. The
    function prints nothing if the caller already watches the progress, or if the environment variable ``ACCEL_QUIET``
    is set.
    """

    @functools.wraps(function)
    def shown(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if _sink.get() is not None:
            return function(*args, **kwargs)
        if os.environ.get(QUIET):
            with interrupts_recorded():
                return function(*args, **kwargs)
        line = VanishingLine() if _is_interactive() else None
        try:
            with watched_by(line or PlainLines()), interrupts_recorded():
                result = function(*args, **kwargs)
        finally:
            if line is not None:
                line.erase()
        for warning in getattr(result, "warnings", ()):
            print(f"accel: warning: {warning}", file=sys.stderr, flush=True)
        return result

    return shown


def _is_interactive() -> bool:
    """Tells whether this process is a notebook or an interactive Python."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
