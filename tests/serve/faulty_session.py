"""Provides a session in the server's own process that raises an error or hangs if the input requests a fault.

``faulty_sessions`` makes sessions in a server's child processes fail.
"""

from __future__ import annotations

import threading
from typing import Any


class Faulty:
    """A session that raises an error if x[0, 0] is 1, hangs until ``released`` if x[0, 0] is 2, and otherwise runs."""

    def __init__(self, session: Any, released: threading.Event, running: threading.Semaphore) -> None:
        self._session, self._released, self._running = session, released, running
        self.sizes: list[int] = []
        self.marks: list[float] = []
        self.signature = session.signature

    def run(self, feeds: Any) -> Any:
        mark = feeds["x"].flat[0]
        self.sizes.append(len(feeds["x"]))
        self.marks.append(float(mark))
        if mark == 1:
            raise RuntimeError("the runtime gave up")
        if mark == 2:
            self._running.release()
            self._released.wait(300)
        return self._session.run(feeds)

    def example_inputs(self, **sizes: int) -> Any:
        return self._session.example_inputs(**sizes)

    def close(self) -> None:
        self._session.close()
