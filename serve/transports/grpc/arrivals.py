"""Cancels a call if its message takes too long to arrive.

The synchronous server of grpcio assigns a thread to a call before the call's message has arrived. A client that never
finishes its message blocks a thread, and many such clients would block every thread. Slow calls are therefore canceled
once calls without a message hold more than half of the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Arrivals:
    """Tracks the calls that still wait for their message. ``threads`` is the size of the thread pool.

    ``sweep`` cancels every call that has waited more than ``longest`` seconds. If more than half of the threads wait
    for messages, ``sweep`` also cancels calls that have waited more than ``patience`` seconds. The oldest calls are
    canceled first, until at most half of the threads wait.
    """

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
        self._open = 0
        self._none_open = threading.Condition(self._lock)
        self._stop = threading.Event()

    def receive(self, messages: Iterator[bytes], context: Any) -> bytes | None:
        """Returns the message of a call, or None if the client ended the call without a message."""
        self.expect(context)
        try:
            return next(messages, None)
        finally:
            self.arrived(context)

    def expect(self, call: Any) -> None:
        """Begins to count the time until the message of ``call`` arrives. ``call`` has a method ``cancel``."""
        self._since[call] = self._clock()

    def arrived(self, call: Any) -> None:
        """Ends what ``expect`` began."""
        self._since.pop(call, None)

    def track(self, context: Any) -> None:
        """Counts the call as open until its answer is sent, or the call ends otherwise."""
        self.opened()
        if not context.add_callback(self.ended):
            self.ended()

    def opened(self) -> None:
        """Counts a call as open until ``ended`` is called for it."""
        with self._lock:
            self._open += 1

    def ended(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._none_open.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until no tracked call is open. Returns False if the wait exceeds ``timeout`` seconds."""
        with self._lock:
            return self._none_open.wait_for(lambda: not self._open, timeout)

    def sweep(self) -> int:
        """Cancels the calls that have waited too long for their message. Returns the number of canceled calls."""
        now = self._clock()
        waiting = list(self._since.items())  # in one step for other threads
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
        """Calls ``sweep`` every second until ``stop`` is called."""
        threading.Thread(target=self._watch, name="accel-arrivals", daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.sweep()

    def stop(self) -> None:
        self._stop.set()
