"""Runs stateful models. The requests of a sequence run in order, and the server keeps the sequence's state.

The inner executor gets at most one request of a sequence at a time, and batches requests of different sequences. A
failed or canceled request leaves the state unchanged. If the first request of a sequence fails, the sequence stays
without a state. If a request fails, the waiting requests of the sequence fail too (FAILED_PRECONDITION), up to the next
request with START. The waiting requests fail because the caller sent them before learning of the failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..protocol.inference import (
    Answer,
    Code,
    Durations,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
    Ticket,
)
from .instances import QueuedExecutor
from .options import Scheduling, SequenceBatching
from .queue import Result, queue_full, request_bytes
from .sequence_state import ServerInputs
from .statistics import Recorder, merged, ns

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Signature

_LOG = logging.getLogger(__name__)


class _Step:
    """One request of a sequence. ``submit`` returns the step as the request's ``Ticket``."""

    __slots__ = ("answer", "arrived", "cancelled", "durations", "executor", "nbytes", "request", "sequence", "ticket")

    def __init__(self, executor: SequenceExecutor, request: InferenceRequest, answer: Answer, arrived: float) -> None:
        self.executor = executor
        self.request = request
        self.answer = answer
        self.arrived = arrived
        self.durations = Durations()
        self.nbytes = request_bytes(request.inputs)
        self.sequence: _Sequence | None = None
        self.ticket: Ticket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.executor.cancel(self)


class _Sequence:
    """One open sequence. ``running`` is the step in the inner executor. ``pumped`` is True while a thread submits steps
    of the sequence to the inner executor."""

    __slots__ = ("id", "last_used", "open", "pumped", "running", "states", "waiting")

    def __init__(self, sequence_id: int | str) -> None:
        self.id = sequence_id
        self.states: dict[str, np.ndarray] | None = None  # None until the sequence's first answer
        self.waiting: deque[_Step] = deque()
        self.running: _Step | None = None
        self.pumped = False
        self.open = False  # True if the last accepted request doesn't end the sequence
        self.last_used = 0.0


class SequenceExecutor:
    """An ``Executor`` that adds states and controls to the requests of sequences and passes the requests to
    ``inner``."""

    def __init__(
        self,
        inner: QueuedExecutor,
        signature: Signature,
        scheduling: Scheduling,
        options: SequenceBatching,
        *,
        name: str,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self.inner = inner
        self.name = name
        self.version = version
        self._options = options
        self._scheduling = scheduling
        self._states = ServerInputs(signature, scheduling, options)
        self._clock = clock
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._sequences: OrderedDict[int | str, _Sequence] = OrderedDict()  # least recently used first
        self._recorder = Recorder()
        self._waiting = 0
        self._waiting_bytes = 0
        self._closing = False

    # Taking requests

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Accepts the next request of a sequence, or raises ``ServeError``."""
        step = _Step(self, request, answer, self._clock())
        with self._lock:
            try:
                sequence = self._place(step)
            except ServeError as error:
                self._recorder.received()
                self._recorder.failed(error, ns(self._clock() - step.arrived))
                raise
        self._pump(sequence)
        return step

    def _place(self, step: _Step) -> _Sequence:
        """Puts ``step`` behind the waiting steps of its sequence. Called with the lock held."""
        request, now = step.request, step.arrived
        self._check(request)
        self._end_idle(now)
        sequence = self._sequences.get(request.sequence_id)
        if not request.sequence_start and (sequence is None or not sequence.open):
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"inference request for sequence {request.sequence_id} to model '{self.name}' must specify the START "
                "flag on the first request of the sequence",
            )
        limits = self._scheduling
        if (limits.queue_rows and self._waiting >= limits.queue_rows) or (
            limits.queue_bytes and self._waiting_bytes + step.nbytes > limits.queue_bytes
        ):
            raise queue_full()
        if sequence is None:
            if len(self._sequences) >= self._options.max_sequences:
                raise ServeError(
                    Code.UNAVAILABLE,
                    f"model '{self.name}' has {self._options.max_sequences} sequences, which is the maximum; end a "
                    "sequence first",
                )
            sequence = self._sequences[request.sequence_id] = _Sequence(request.sequence_id)
        sequence.open = not request.sequence_end
        self._used(sequence, now)
        step.sequence = sequence
        sequence.waiting.append(step)
        self._waiting += 1
        self._waiting_bytes += step.nbytes
        return sequence

    def _check(self, request: InferenceRequest) -> None:
        def refused(what: str) -> ServeError:
            return ServeError(Code.INVALID_ARGUMENT, f"inference request to model '{self.name}' must {what}")

        if self._closing:
            raise ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} is being unloaded")
        if not request.sequence_id:
            raise refused("specify a non-zero or non-empty correlation ID")
        if self._scheduling.max_batch_size:
            for value in request.inputs.values():
                if not value.ndim or value.shape[0] != 1:
                    raise refused("specify batch-size 1 due to requirements of sequence batcher")
        for name in self._scheduling.server_inputs:
            if name in request.inputs:
                raise refused(f"not send the input '{name}', which the server keeps")
        if (unfit := self._states.unfit(request.sequence_id)) is not None:
            raise refused(f"specify a correlation ID that fits '{unfit}'")

    def _used(self, sequence: _Sequence, now: float) -> None:
        sequence.last_used = now
        self._sequences.move_to_end(sequence.id)

    def _end_idle(self, now: float) -> None:
        """Ends the sequences that got no request for ``max_idle_us``. Called with the lock held."""
        oldest = now - self._options.max_idle_us / 1e6
        while self._sequences:
            sequence = next(iter(self._sequences.values()))
            if sequence.last_used >= oldest:
                return
            if sequence.running is not None or sequence.waiting:
                self._used(sequence, now)  # requests of the sequence are still waiting or running
            else:
                del self._sequences[sequence.id]

    # Submitting steps to the inner executor

    def _pump(self, sequence: _Sequence) -> None:
        """Submits the waiting steps of ``sequence`` to the inner executor, one after the other.

        Only one thread at a time submits the steps of a sequence. A step may be answered before the step's ``submit``
        returns. ``_pump`` still waits for the return and then submits the next step, so that calls of ``submit`` don't
        nest.
        """
        while True:
            with self._lock:
                if sequence.pumped or sequence.running is not None:
                    return
                if not sequence.waiting:
                    if not sequence.open and self._sequences.get(sequence.id) is sequence:
                        del self._sequences[sequence.id]
                    self._settled.notify_all()
                    return
                step = self._unqueue(sequence, 0)
                sequence.running = step
                sequence.pumped = True
                if step.request.sequence_start:
                    sequence.states = None
            try:
                ticket = self.inner.submit(
                    self._states.added(step.request, sequence.states),
                    partial(self._answered, sequence, step),
                    arrived=step.arrived,
                )
                step.durations = ticket.durations
                with self._lock:
                    step.ticket = ticket
                    cancelled = step.cancelled
                if cancelled:
                    ticket.cancel()
            except ServeError as error:
                self._answered(sequence, step, error)
            finally:
                with self._lock:
                    sequence.pumped = False

    def _unqueue(self, sequence: _Sequence, index: int) -> _Step:
        step = sequence.waiting[index]
        del sequence.waiting[index]
        self._waiting -= 1
        self._waiting_bytes -= step.nbytes
        return step

    # Answering requests

    def _answered(self, sequence: _Sequence, step: _Step, result: Result) -> None:
        failed: list[_Step] = []
        with self._lock:
            sequence.running = None
            if sequence.id in self._sequences:
                self._used(sequence, self._clock())
            if isinstance(result, InferenceResponse):
                sequence.states = self._states.kept(result)
                result = self._states.without(result, step.request)
            else:
                failed = self._fail_behind(sequence, step, 0)
        self._give(step, result)
        self._refuse(failed, step)
        self._pump(sequence)

    def _give(self, step: _Step, result: Result) -> None:
        try:
            step.answer(result)
        except Exception:
            _LOG.exception("model %s: an answer could not be delivered", self.name)

    def _fail_behind(self, sequence: _Sequence, step: _Step, index: int) -> list[_Step]:
        """Removes and returns the steps that have to fail because ``step`` failed: the waiting steps from ``index`` up
        to the next step with START. Called with the lock held."""
        failed = []
        while len(sequence.waiting) > index and not sequence.waiting[index].request.sequence_start:
            failed.append(self._unqueue(sequence, index))
        if len(sequence.waiting) == index:
            ended = any(one.request.sequence_end for one in (step, *failed))
            begun = sequence.states is not None or sequence.running is not None or bool(sequence.waiting)
            sequence.open = begun and not step.request.sequence_start and not ended
        return failed

    def _refuse(self, failed: Sequence[_Step], first: _Step) -> None:
        error = ServeError(
            Code.FAILED_PRECONDITION,
            f"an earlier request of sequence {first.request.sequence_id} to model '{self.name}' failed",
        )
        self._fail(failed, error)

    def _fail(self, steps: Sequence[_Step], error: ServeError) -> None:
        """Answers ``steps`` with ``error``. ``steps`` never reached the inner executor."""
        for step in steps:
            with self._lock:
                self._recorder.received()
                step.durations.total = ns(self._clock() - step.arrived)
                self._recorder.failed(error, step.durations.total)
            self._give(step, error)

    def cancel(self, step: _Step) -> None:
        """Cancels ``step``. A waiting step is answered with CANCELLED and never runs. The inner executor cancels a
        running step."""
        sequence = step.sequence
        assert sequence is not None
        with self._lock:
            step.cancelled = True
            ticket = step.ticket
            waits = step in sequence.waiting
            failed: list[_Step] = []
            if waits:
                index = sequence.waiting.index(step)
                self._unqueue(sequence, index)
                failed = self._fail_behind(sequence, step, index)
        if waits:
            self._fail([step], ServeError(Code.CANCELLED, "Request was cancelled"))
            self._refuse(failed, step)
            self._pump(sequence)
        elif ticket is not None:
            ticket.cancel()

    # Statistics and closing

    def statistics(self) -> ModelStatistics:
        """Returns the inner executor's statistics, plus the requests that never reached the inner executor."""
        with self._lock:
            return merged(self.inner.statistics(), self._recorder.copy(self._waiting))

    def pending(self) -> int:
        with self._lock:
            return self.inner.pending() + self._waiting

    def sequences(self) -> int:
        """Counts the open sequences."""
        with self._lock:
            self._end_idle(self._clock())
            return len(self._sequences)

    def poll(self) -> bool:
        """Does one step of the inner executor, which has no threads."""
        return self.inner.poll()

    def close(self, timeout: float) -> None:
        """Refuses new requests, waits at most ``timeout`` seconds for accepted requests, and fails the rest."""
        end = time.monotonic() + timeout
        with self._lock:
            self._closing = True
        while not self.inner.threaded and self.poll():
            pass
        with self._lock:
            self._settled.wait_for(lambda: not self._waiting, timeout)
            left = [step for sequence in self._sequences.values() for step in sequence.waiting]
            for sequence in self._sequences.values():
                while sequence.waiting:
                    self._unqueue(sequence, 0)
        self._fail(left, ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} was unloaded"))
        self.inner.close(max(0.0, end - time.monotonic()))
        with self._lock:
            self._sequences.clear()
