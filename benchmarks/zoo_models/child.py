"""Runs a try in a child process, within a time limit and a memory limit."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Limits:
    """The limits of one try: the time in seconds, and the memory in MiB."""

    def __init__(self, seconds: float, memory: float) -> None:
        self.seconds = seconds
        self.memory = memory


class Child:
    """A child process that runs ``target(*words, out)``, and writes its result to the file ``out``."""

    def __init__(self, context: Any, target: Callable[..., None], words: Sequence[Any], limits: Limits) -> None:
        self.words, self.limits = words, limits
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-")
        self._out = Path(self._folder.name, "result.json")
        self._started, self._peak = time.monotonic(), 0.0
        self.process = context.Process(target=target, args=(*words, str(self._out)))
        self.process.start()

    def result(self) -> dict[str, Any] | None:
        """Returns the result that the child wrote, or None while the child runs.

        Kills a child that exceeds its limits. If the child was killed or wrote no result, returns a result of the class
        ``crashed`` with the reason.
        """
        reason, seconds = "", time.monotonic() - self._started
        if self.process.is_alive():
            self._peak = max(self._peak, tree_mib(self.process.pid))
            if seconds > self.limits.seconds:
                reason = f"no end after {self.limits.seconds:g} s"
            elif self._peak > self.limits.memory:
                reason = f"more than {self.limits.memory:g} MiB of memory"
            else:
                return None
            end(self.process.pid)
        self.process.join()
        facts = {"wall": round(seconds, 1), "peak_mib": round(self._peak)}
        with self._folder:
            if not reason and self._out.is_file():
                return {**json.loads(self._out.read_text(encoding="utf-8")), **facts}
        code = self.process.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return {"class": "crashed", "message": reason or f"the process ended with {died}", **facts}


def descendants(pid: int) -> list[int]:
    """Returns the process ids of ``pid`` and all its descendants."""
    found, queue = [], [pid]
    while queue:
        here = queue.pop()
        found.append(here)
        try:
            text = Path(f"/proc/{here}/task/{here}/children").read_text(encoding="utf-8")
        except OSError:
            continue
        queue += [int(word) for word in text.split()]
    return found


def tree_mib(pid: int) -> float:
    """Returns the resident memory of a process and its descendants in MiB, without memory-mapped files."""
    total = 0.0
    for here in descendants(pid):
        try:
            lines = Path(f"/proc/{here}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
    return total


def end(pid: int) -> None:
    """Kills a process and all its descendants."""
    for here in reversed(descendants(pid)):
        try:
            os.kill(here, signal.SIGKILL)
        except OSError:
            continue
