"""Sessions for the tests of the benchmark, opened in child processes: the ``options`` say what they do."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from accel.bench import blocks
from accel.bench.blocks import Candidate
from accel.runtimes.base import BaseSession, SessionOptions


class Scripted(BaseSession):
    """``y = 2 x`` after ``ms`` milliseconds of this thread's time; see the tests for the options."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.artifact, SessionOptions())
        self.script = dict(candidate.options)
        self.runs = 0
        if "fail_to_open" in self.script:
            raise RuntimeError("no such kernel")
        if "spins" in self.script:  # as the thread pools of inference runtimes do
            threading.Thread(target=_spin_forever, daemon=True).start()

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        script = self.script
        self.runs += 1
        if self.runs == script.get("crash_at"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.runs == script.get("hang_at"):
            time.sleep(600)
        if "siblings_log" in script:
            _log_running_siblings(Path(script["siblings_log"]))
        end = time.thread_time_ns() + int(script.get("ms", 0.2) * 1e6)
        while time.thread_time_ns() < end:
            pass
        x = feeds["x"]
        y = x * x.dtype.type(2)
        if script.get("nan"):
            y = y * np.nan
        if script.get("shape"):
            y = y[:, :1]
        outputs = {script.get("output", "y"): y + y.dtype.type(script.get("off", 0))}
        if "second_off" in script:
            outputs["z"] = y + y.dtype.type(script["second_off"])
        return outputs


def scripted(candidate: Candidate) -> Scripted:
    return Scripted(candidate)


def on_thread_time(candidate: Candidate) -> Scripted:
    """Timed by the time this thread ran: what else runs on the machine leaves no trace in it."""
    blocks.time.perf_counter_ns = time.thread_time_ns
    return Scripted(candidate)


class Delayed:
    """A real session, each run of which takes ``share`` longer."""

    def __init__(self, session: Any, share: float) -> None:
        self.session, self.share = session, share
        self.signature = session.signature

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        start = time.thread_time_ns()
        outputs: dict[str, np.ndarray] = self.session.run(feeds)
        now = time.thread_time_ns()
        end = now + int((now - start) * self.share)
        while time.thread_time_ns() < end:
            pass
        return outputs

    def __enter__(self) -> Delayed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()


def delayed(candidate: Candidate) -> Delayed:
    """The candidate's own session on one thread, slower by ``options["share"]``; timed by this thread's time."""
    from accel.runtimes.base import open_session

    blocks.time.perf_counter_ns = time.thread_time_ns
    return Delayed(open_session(candidate.artifact, "onnxruntime", {"threads": 1}), candidate.options["share"])


def _spin_forever() -> None:
    data = bytes(1 << 22)
    while True:
        hashlib.sha256(data)  # without the interpreter's lock, as native threads spin


def _log_running_siblings(log: Path) -> None:
    """Write down each other child of our parent that is not stopped right now."""
    me, parent = os.getpid(), os.getppid()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == me:
            continue
        try:
            state, its_parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_child = b"accel.child" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(its_parent) == parent and is_child:
            with log.open("a") as stream:
                stream.write(f"{state}\n")
