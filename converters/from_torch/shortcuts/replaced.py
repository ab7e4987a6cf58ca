"""Replaces a function of a library while at least one export runs."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any


class Replaced:
    """Puts ``replacement`` in the place of a library's function. Several threads may export at the same time: the last
    one restores the library's ``own`` function."""

    def __init__(self, replacement: Any) -> None:
        self.own: Any = None
        self._replacement = replacement
        self._running = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def within(self, owner: Any, name: str) -> Iterator[None]:
        """Replaces the attribute ``name`` of ``owner``, which is a module or a class, within the ``with`` block."""
        with self._lock:
            if not self._running:
                self.own = inspect.getattr_static(owner, name)
                setattr(owner, name, self._replacement)
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    setattr(owner, name, self.own)
