"""How long work tells whoever watches how far it is. Stages report; the CLI decides what a person sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# (what is being done, fraction done or None where it can't be known)
Sink = Callable[[str, float | None], None]

_sink: ContextVar[Sink | None] = ContextVar("accel_progress_sink", default=None)


def report(message: str, fraction: float | None = None) -> None:
    """Tell the current watcher; costs nothing where nobody watches."""
    sink = _sink.get()
    if sink is not None:
        sink(message, fraction)


def watcher() -> Sink | None:
    """Who watches now; None where nobody does."""
    return _sink.get()


@contextmanager
def watched_by(sink: Sink) -> Iterator[None]:
    """Everything reported inside goes to ``sink``."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)
