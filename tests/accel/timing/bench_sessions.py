"""Defines the sessions that the tests of the benchmark open in child processes. The ``options`` of a session define its
behavior."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from accel.runtimes.base import BaseSession, SessionOptions
from accel.timing import blocks
from accel.timing.blocks import Candidate
from accel.timing.disturbance import Reading


class Scripted(BaseSession):
    """Computes ``y = 2 x`` in ``ms`` milliseconds of this thread's CPU time. The options other than ``ms`` change the
    outputs or plant a fault."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.artifact, SessionOptions())
        self.script = dict(candidate.options)
        self.runs = 0
        if "fail_to_open" in self.script:
            raise RuntimeError("no such kernel")
        if "spins" in self.script:  # busy-waits like the thread pools of inference runtimes
            threading.Thread(target=_spin_forever, daemon=True).start()

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        script = self.script
        self.runs += 1
        if self.runs == script.get("crash_at"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.runs == script.get("hang_at"):
            time.sleep(600)
        if "siblings_log" in script:
            _log_running_siblings(Path(script["siblings_log"]), script["not_siblings"])
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
    """Opens a session that is timed by its thread's CPU time, because other load on the machine doesn't affect the CPU
    time."""
    blocks.time.perf_counter_ns = time.thread_time_ns
    return Scripted(candidate)


class Clock:
    """Simulates a clock and the kernel's counters. They advance only when a ``Simulated`` session runs."""

    def __init__(self) -> None:
        self.now = self.cpu = self.waited = 0

    def __call__(self) -> int:
        return self.now

    def reading(self) -> Reading:
        """Returns the simulated counters of the process."""
        return Reading(cpu=self.cpu / 1e9, waited=self.waited / 1e9)


class Simulated(Scripted):
    """Computes ``y = 2 x``. Each run takes about ``ms`` on the session's own clock. The noise and the rare spikes of
    this clock depend only on ``seed``. After ``slow_after`` runs, each run takes ``slow_by`` times as long. With
    ``stalls``, a file in which each process adds a line, phases of about 8 runs take 100 times as long. The phases of
    each process are different ones. With ``processes``, such a file too, the noise of each process is different. With
    ``beside``, other work takes most of the core: each run waits for up to ``beside`` times its own time, more in some
    blocks than in others. With ``spoiled``, other work takes the core from 30 runs after the given numbers of runs.
    ``cores`` is the number of threads that run or wait. With ``gpu``, a GPU is open."""

    def __init__(self, candidate: Candidate, clock: Clock) -> None:
        super().__init__(candidate)
        self.clock = clock
        self.random = np.random.default_rng(self.script.get("seed", 0))
        self.stalled = False
        self.share = 1.0
        if path := self.script.get("stalls") or self.script.get("processes"):
            with Path(path).open("a+") as file:
                file.write("a process\n")
                file.seek(0)
                self.random = np.random.default_rng(len(file.readlines()))

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        factor = float(np.exp(abs(self.random.normal(0, 0.02))))
        if self.random.uniform() < 0.03:
            factor *= 1 + float(self.random.pareto(1.5))
        if "stalls" in self.script and self.random.uniform() < (0.12 if self.stalled else 0.06):
            self.stalled = not self.stalled
        factor *= 100 if self.stalled else 1
        self.runs += 1
        if self.runs > self.script.get("slow_after", self.runs):
            factor *= self.script["slow_by"]
        took = int(self.script["ms"] * 1e6 * factor)
        waited = 0
        if beside := self.script.get("beside"):
            if self.runs % 20 == 1:
                self.share = float(self.random.uniform(0.2, 1))
            waited = int(took * beside * self.share * self.random.uniform(0.8, 1))
        if any(first < self.runs <= first + 30 for first in self.script.get("spoiled", ())):
            waited = 5 * took
        cores = self.script.get("cores", 2 if "stalls" in self.script else 1)
        self.clock.now += took + waited
        self.clock.cpu += cores * took
        self.clock.waited += cores * waited
        return {"y": feeds["x"] * 2}


def simulated(candidate: Candidate) -> Simulated:
    """Opens a session that is timed by a simulated clock. This clock gives the same figures on every machine, idle or
    busy."""
    clock = Clock()
    blocks.time.perf_counter_ns = clock
    blocks.Counters.read = lambda _: clock.reading()
    blocks.Counters.uses_gpu = lambda _: "gpu" in candidate.options
    return Simulated(candidate, clock)


class Delayed:
    """Wraps a real session and makes each run longer by the fraction ``share`` of its time."""

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
    """Opens the candidate's session on one thread and times it by this thread's CPU time. The session is slower by the
    fraction ``options["share"]``."""
    from accel.runtimes.base import open_session

    blocks.time.perf_counter_ns = time.thread_time_ns
    return Delayed(open_session(candidate.artifact, "onnxruntime", {"threads": 1}), candidate.options["share"])


def _spin_forever() -> None:
    data = bytes(1 << 22)
    while True:
        hashlib.sha256(data)  # releases the GIL like a busy-waiting native thread


def _log_running_siblings(log: Path, others: Sequence[int]) -> None:
    """Logs the states of the benchmark's other child processes. The benchmark must have paused these processes. Leaves
    out the process ids in ``others``, because these processes don't belong to the benchmark."""
    me, parent = os.getpid(), os.getppid()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == me:
            continue
        try:
            state, its_parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_child = b"accel.child" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(its_parent) == parent and is_child and int(folder.name) not in others:
            with log.open("a") as stream:
                stream.write(f"{state}\n")


class Meeting(BaseSession):
    """Makes each run wait until all sessions of this process are in a run. Logs the number of threads of each
    session."""

    barrier: threading.Barrier | None = None
    open_sessions = 0

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.artifact, SessionOptions())
        with Path(candidate.options["log"]).open("a") as stream:
            stream.write(f"{candidate.options['threads']}\n")
        Meeting.open_sessions += 1
        Meeting.barrier = threading.Barrier(Meeting.open_sessions)
        self.met = 0

    def _run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.met += 1
        if self.met > 1 or threading.current_thread() is not threading.main_thread():
            assert Meeting.barrier is not None
            Meeting.barrier.wait(60)
            time.sleep(0.001)
        return {"y": feeds["x"]}


def meeting(candidate: Candidate) -> Meeting:
    return Meeting(candidate)
