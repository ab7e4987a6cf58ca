"""Sends progress reports of long-running work to a watcher, which displays them."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from accel.cancel import check_cancelled

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


def shows_progress(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorates a public function so that a notebook or an interactive Python shows the function's progress. The
    progress is a line on stderr that vanishes at the end. The function shows no progress in a script, or if the caller
    already watches the progress.
    """

    @functools.wraps(function)
    def shown(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if _sink.get() is not None or not _is_interactive():
            return function(*args, **kwargs)

        def show(message: str, fraction: float | None) -> None:
            done = "" if fraction is None else f" {fraction:.0%}"
            sys.stderr.write("\r" + f"accel: {message}{done}"[:_LINE].ljust(_LINE))
            sys.stderr.flush()

        with watched_by(show):
            try:
                return function(*args, **kwargs)
            finally:
                sys.stderr.write("\r" + " " * _LINE + "\r")
                sys.stderr.flush()

    return shown


def _is_interactive() -> bool:
    """Tells whether this process is a notebook or an interactive Python."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
