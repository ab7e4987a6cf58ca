"""Defines a stop request, which a signal handler may make at any moment."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class StopRequest:
    """A request to the main thread to stop.

    A signal handler may run at any moment, even inside the main thread's ``wait``. A ``threading.Event`` could
    deadlock: the handler's ``set`` could wait for the lock that the interrupted ``wait`` holds. ``SimpleQueue.put`` is
    reentrant, so ``put`` never deadlocks.
    """

    def __init__(self) -> None:
        self.made = False
        self._woken: SimpleQueue[None] = SimpleQueue()

    def make(self) -> None:
        """Makes the stop request, and wakes ``wait``."""
        self.made = True
        self._woken.put(None)

    def wait(self, seconds: float) -> bool:
        """Waits at most ``seconds`` for the stop request. Returns True if the stop request was made."""
        if not self.made:
            try:
                self._woken.get(timeout=seconds)
            except Empty:
                return self.made
        return True
