"""Lets the requests that arrived together run in one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gathering:
    """The requests that a thread of a transport submits one after the other, before it lets them run.

    An executor that gets such a request doesn't wake a thread. The executor adds the function that starts its waiting
    requests, and the transport calls ``run`` once all requests are submitted. ``alone`` is True if there is only one
    request, which then needn't wait for others. Only the thread that made the object adds functions, so a request that
    another thread submits on behalf of a gathered request, such as a step of an ensemble, starts at once.
    """

    __slots__ = ("_closed", "_starts", "_thread", "alone")

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self._starts: dict[Callable[[], None], None] = {}
        self._thread = threading.get_ident()
        self._closed = False

    def add(self, start: Callable[[], None]) -> bool:
        """Adds ``start``, which ``run`` calls once. Returns False if ``run`` won't call it, and the executor has to
        start the request itself."""
        if self._closed or threading.get_ident() != self._thread:
            return False
        self._starts[start] = None
        return True

    def run(self) -> None:
        """Starts the requests, and the requests that these submit in turn. Does nothing if there are none left."""
        while self._starts:
            try:
                start = next(iter(self._starts))
                del self._starts[start]
            except (KeyError, RuntimeError, StopIteration):  # another thread, after ``leave``, has taken it
                continue
            start()

    def leave(self) -> None:
        """Accepts no further functions, because a started request takes too long. Another thread then calls ``run`` for
        the functions that are left."""
        self._closed = True
