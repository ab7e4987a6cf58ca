"""The simplest executor: each request runs alone, at once, on the thread that brought it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING

from accel.serve.inference import (
    Answer,
    Code,
    Durations,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
)

if TYPE_CHECKING:
    from accel.runtimes.base import Session


class _Ticket:
    def __init__(self) -> None:
        self.durations = Durations()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class DirectExecutor:
    """``instances`` sessions; a request waits for a free one and runs inline. Nothing is batched."""

    def __init__(self, open_session: Callable[[], Session], *, name: str, version: str, instances: int = 1) -> None:
        self._name, self._version = name, version
        self._sessions = [open_session() for _ in range(instances)]
        self._free: queue.SimpleQueue[Session] = queue.SimpleQueue()
        for session in self._sessions:
            self._free.put(session)
        self._lock = threading.Condition()
        self._pending = 0
        self._closed = False
        self._statistics = ModelStatistics()

    def submit(self, request: InferenceRequest, answer: Answer) -> _Ticket:
        """Run ``request`` and answer it before this returns."""
        with self._lock:
            if self._closed:
                raise ServeError(Code.UNAVAILABLE, f"model '{self._name}' is being unloaded")
            self._pending += 1
            self._statistics.received += 1
        ticket = _Ticket()
        started = time.monotonic_ns()
        session = self._free.get()
        running = time.monotonic_ns()
        found: InferenceResponse | ServeError
        try:
            found = self._run(session, request)
        finally:
            self._free.put(session)
        ended = time.monotonic_ns()
        ticket.durations = Durations(queue=running - started, compute_infer=ended - running, total=ended - started)
        self._count(found, ticket.durations)
        answer(found)
        return ticket

    def _run(self, session: Session, request: InferenceRequest) -> InferenceResponse | ServeError:
        if request.deadline is not None and time.monotonic() >= request.deadline:
            return ServeError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        try:
            outputs = session.run(request.inputs)
        except Exception as error:
            return ServeError(Code.INTERNAL, f"model '{self._name}' failed: {' '.join(str(error).split())[:300]}")
        names = request.outputs if request.outputs is not None else tuple(outputs)
        return InferenceResponse(
            model=self._name, version=self._version, id=request.id, outputs={name: outputs[name] for name in names}
        )

    def _count(self, found: InferenceResponse | ServeError, spent: Durations) -> None:
        with self._lock:
            self._pending -= 1
            statistics = self._statistics
            if isinstance(found, ServeError):
                statistics.fail.add(spent.total)
            else:
                statistics.inference_count += 1
                statistics.execution_count += 1
                statistics.last_inference_ms = int(time.time() * 1000)
                statistics.success.add(spent.total)
                statistics.queue.add(spent.queue)
                statistics.compute_infer.add(spent.compute_infer)
                statistics.compute_input.add(0)
                statistics.compute_output.add(0)
            self._lock.notify_all()

    def statistics(self) -> ModelStatistics:
        with self._lock:
            return deepcopy(self._statistics)

    def pending(self) -> int:
        return self._pending

    def close(self, timeout: float) -> None:
        """Let what is running end for at most ``timeout`` seconds, then release the sessions."""
        with self._lock:
            self._closed = True
            idle = self._lock.wait_for(lambda: not self._pending, timeout)
        if idle:
            for session in self._sessions:
                session.close()
