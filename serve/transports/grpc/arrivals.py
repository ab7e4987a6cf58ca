"""Calls whose message is still on its way.

grpcio's synchronous server gives a call its thread before the message is there, so a client that never finishes one
holds a thread, and enough of them hold all. Here the slow ones are cut off when they crowd the others out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Arrivals:
    """``threads``: of the pool. While more than half of them wait for messages, the calls that have waited longer than
    ``patience`` seconds are cancelled, the oldest first; after ``longest`` seconds any call is."""

    def __init__(
        self,
        threads: int,
        *,
        patience: float = 5.0,
        longest: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = max(1, threads // 2)
        self._patience, self._longest, self._clock = patience, longest, clock
        self._lock = threading.Lock()
        self._since: dict[Any, float] = {}  # by call, the oldest first
        self._stop = threading.Event()

    def receive(self, messages: Iterator[bytes], context: Any) -> bytes | None:
        """The one message of a call; None where the client ended its side without one."""
        with self._lock:
            self._since[context] = self._clock()
        try:
            return next(messages, None)
        finally:
            with self._lock:
                del self._since[context]

    def sweep(self) -> int:
        """Cancel the calls whose time is up; how many."""
        now = self._clock()
        with self._lock:
            waiting = list(self._since.items())
        crowd = len(waiting) - self._most
        late = [
            context
            for number, (context, since) in enumerate(waiting)
            if now - since > (self._patience if number < crowd else self._longest)
        ]
        for context in late:
            context.cancel()
        return len(late)

    def start(self) -> None:
        """Sweep from now on, until ``stop``."""
        threading.Thread(target=self._watch, name="accel-arrivals", daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.sweep()

    def stop(self) -> None:
        self._stop.set()
