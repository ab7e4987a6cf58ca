"""Progress reports of long work, which a watcher displays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from accel.cancel import check_cancelled

# Takes a message and the fraction that is done (None if unknown).
Sink = Callable[[str, float | None], None]

_sink: ContextVar[Sink | None] = ContextVar("accel_progress_sink", default=None)


def report(message: str, fraction: float | None = None) -> None:
    """Reports progress to the current watcher, if there is one. Raises the error of ``check_cancelled`` if the work has
    to end."""
    sink = _sink.get()
    if sink is not None:
        sink(message, fraction)
    check_cancelled()


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Sends every report made in the block to ``sink``."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)
