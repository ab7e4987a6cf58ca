"""Runs the requests that arrived together in the thread that reads them, and lets another thread go on reading while a
request takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..protocol.gathering import Gathering

_STUCK = 0.05  # seconds after which another thread reads
_QUIET = 1.0  # seconds


class Taken(Protocol):
    """A call whose message has arrived."""

    def take(self, message: Any, gathering: Gathering) -> None:
        """Passes the message to the server."""
        ...

    def watch(self) -> None:
        """Waits for the end of the call, if the call has no answer yet."""
        ...


class Turns:
    """Calls ``read`` again and again, and runs the calls that it returns with their messages. One thread at a time does
    so. The names of the threads begin with ``name``."""

    def __init__(self, name: str, read: Callable[[], list[tuple[Any, Any]]]) -> None:
        self._name, self._read = name, read
        self._taken: Sequence[Taken] = []  # the calls of the requests that are run now
        self._gathering: Gathering | None = None
        self._since = 0.0  # when the thread began to run the gathering
        self._turn = 0  # changes when another thread takes over
        self._passing = threading.Lock()  # guards the change of the turn
        self._busy = threading.Event()
        self.ended = False

    def start(self) -> None:
        self._start_thread(self._run, 0)
        threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()

    def _start_thread(self, target: Any, turn: int, *more: Any) -> None:
        threading.Thread(target=target, args=(turn, *more), name=f"{self._name}-{turn}", daemon=True).start()

    def _run(self, turn: int) -> None:
        while self._turn == turn and not self.ended:
            arrived = self._read()
            if arrived:
                self._answer(turn, arrived)
                del arrived

    def _answer(self, turn: int, arrived: list[tuple[Taken, Any]]) -> None:
        gathering = Gathering(alone=len(arrived) == 1)
        taken = [call for call, _ in arrived]
        self._taken, self._gathering, self._since = taken, gathering, time.monotonic()
        if not self._busy.is_set():
            self._busy.set()
        arrived.reverse()
        while arrived:
            call, message = arrived.pop()
            call.take(message, gathering)
            del call, message  # while the requests run, they may be freed
        self._run_gathered(turn, gathering, taken)

    def _run_gathered(self, turn: int, gathering: Gathering, taken: Sequence[Taken]) -> None:
        gathering.run()
        with self._passing:
            if self._turn == turn:
                self._taken, self._gathering = [], None
        for call in taken:
            call.watch()

    def _watch(self) -> None:
        """Lets another thread read if a request keeps the thread for long. The requests that are known to take long run
        elsewhere, so this happens only if a model hangs or becomes slow."""
        while not self.ended:
            self._busy.clear()
            if self._gathering is not None or self._busy.wait(_QUIET):
                time.sleep(_STUCK)
                self._take_over()

    def _take_over(self) -> None:
        with self._passing:
            gathering, taken = self._gathering, self._taken
            if gathering is None or time.monotonic() - self._since < _STUCK:
                return
            gathering.leave()
            self._turn += 1
            self._since = time.monotonic()
            self._start_thread(self._go_on, self._turn, gathering, taken)

    def _go_on(self, turn: int, gathering: Gathering, taken: Sequence[Taken]) -> None:
        for call in taken:
            call.watch()
        self._run_gathered(turn, gathering, taken)
        self._run(turn)
