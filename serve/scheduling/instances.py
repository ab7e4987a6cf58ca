"""Runs the requests of a model on its sessions, either in threads of the executor or in the callers' threads.

``RequestQueue`` and ``Batching`` make all scheduling decisions. The decisions depend only on the queue and the time.
``QueuedExecutor`` carries the decisions out. If the queue is empty and an instance is idle, the caller's thread runs
the request itself. For a small model, a run takes less time than passing the request to another thread and back. While
all instances are busy, requests gather in the queue, and an instance's thread takes several requests as a batch.
``_lock`` guards all state. No session is run and no answer is given while ``_lock`` is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..protocol.inference import (
    Answer,
    Code,
    Durations,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
)
from .batcher import Batching
from .options import Scheduling
from .queue import NEVER, AnswerOrder, Entry, RequestQueue, Result, Settled, run_error, too_late
from .rate_limit import Gate, RateLimiter
from .statistics import Recorder, ns

if TYPE_CHECKING:
    import numpy as np

    from accel.runtimes.base import Session

_LOG = logging.getLogger(__name__)

# Passing a request to another thread takes some 60 us. Runs of more than _BRIEF seconds are passed on, so that other
# models don't wait. Only several long runs in a row count, because other work of the machine may interrupt one.
_BRIEF = 500e-6


class _Step(NamedTuple):
    """The next step of an instance's thread: answer ``expired`` requests, run ``batch`` on ``session``, or wait until
    ``wake``. ``withdrawn`` is True if this model no longer waits for shared resources, so that other models may take
    the resources."""

    session: Session | None
    batch: list[Entry]
    expired: Settled
    wake: float
    withdrawn: bool = False

    @property
    def nothing(self) -> bool:
        return not (self.batch or self.expired or self.withdrawn)


class QueuedExecutor:
    """An ``Executor`` that runs requests on ``sessions``, owns the sessions and closes them.

    With ``start=False``, no thread is started. Without threads, each call of ``poll`` does one step of an instance's
    thread, at the time that ``clock`` returns.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        batching: Batching,
        scheduling: Scheduling,
        *,
        name: str,
        version: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        start: bool = True,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._batching = batching
        self._eager = scheduling.eager
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # wakes the threads of the instances
        self._timer = threading.Condition(self._lock)  # wakes the thread that answers expired requests
        self._drained = threading.Condition(self._lock)
        self._queue = RequestQueue(scheduling)
        self._recorder = Recorder(wall)
        self._idle = list(sessions)
        self._outstanding: dict[Entry, None] = {}  # the entries whose answer isn't delivered
        self._in_order = AnswerOrder() if scheduling.preserve_ordering else None
        self._usual = NEVER  # seconds of a run, smoothed over some ten runs
        self._brief = False
        self._closing = False
        self._closed = False
        self.threaded = start
        self._timed = False
        self._start_at_once = partial(self._start_waiting, hurry=True)
        self._gate: Gate | None = None
        if limiter is not None and scheduling.resources:
            self._gate = limiter.gate(scheduling.resources, scheduling.resource_priority, self._wake, name=name)
        if start:
            for number in range(len(sessions)):
                self._start(self._serve, f"{name}-{version}-{number}")

    @staticmethod
    def _start(target: Callable[[], None], name: str) -> None:
        # The thread is a daemon, so that the process can end even if a session hangs.
        threading.Thread(target=target, name=name, daemon=True).start()

    # Taking requests

    def submit(self, request: InferenceRequest, answer: Answer, *, arrived: float | None = None) -> Entry:
        """Accepts the request, which reached the server at ``arrived``, by default now. Raises ``ServeError``
        (INVALID_ARGUMENT, UNAVAILABLE, DEADLINE_EXCEEDED)."""
        now = self._clock()
        try:
            rows = self._batching.admit(request)
            entry = Entry(request, answer, rows=rows, arrived=now if arrived is None else arrived, owner=self._cancel)
            if entry.deadline <= now:
                raise too_late()
            with self._lock:
                session = self._take(entry)
                self._recorder.received()
        except ServeError as error:
            with self._lock:
                self._recorder.received()
                self._recorder.failed(error, ns(self._clock() - now))
            raise
        if session is not None:
            self._execute(session, [entry])
        return entry

    def _take(self, entry: Entry) -> Session | None:
        """Queues ``entry`` and returns None, or returns an idle session on which the caller then runs ``entry``."""
        if self._closing:
            raise ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} is being unloaded")
        session = None
        gathering = entry.request.gathering
        inline = entry.request.inline if gathering is None else gathering.alone and self._brief
        if self._eager and inline and self._idle and not self._queue and self._may_run():
            session = self._idle.pop()
        else:
            self._batching.describe(entry)
            start = self._start_waiting if self._queue else self._start_at_once
            self._queue.put(entry)
            if self._idle and (gathering is None or not gathering.add(start)):
                self._work.notify()
            instant = min(entry.expires, entry.deadline)
            if self.threaded and instant < NEVER:
                if not self._timed:
                    self._timed = True
                    self._start(self._watch, f"{self.name}-{self.version}-timeouts")
                elif instant <= self._queue.next_instant():  # the entry expires before the thread wakes
                    self._timer.notify()
        self._outstanding[entry] = None
        if self._in_order is not None:
            self._in_order.add(entry)
        return session

    def _cancel(self, entry: Entry) -> None:
        with self._lock:
            if entry in self._queue:
                self._queue.remove(entry)
        self._deliver(self._settle([(entry, ServeError(Code.CANCELLED, "Request was cancelled"))]))

    # Running requests

    def _may_run(self) -> bool:
        return self._gate is None or self._gate.enter()

    def _wake(self) -> None:
        """Wakes an instance's thread, because shared resources may be free now."""
        with self._lock:
            self._work.notify()

    def _start_waiting(self, *, hurry: bool = False) -> None:
        """Runs the waiting requests in the calling thread, which has submitted all requests that arrived together. If
        runs aren't brief or requests have to wait, leaves them to an instance's thread. With ``hurry``, the requests
        found the queue empty and don't wait for further requests."""
        while True:
            with self._lock:
                if not (self._eager and self._brief and self._idle and self._queue):
                    break
                step = self._next(self._clock(), hurry=hurry)
            self._carry_out(step)
            if not step.batch:
                break
        with self._lock:
            if self._idle and self._queue:
                self._work.notify()

    def _next(self, now: float, *, hurry: bool = False) -> _Step:
        """Chooses the next step and removes the step's requests from the queue. Called with the lock held."""
        expired: Settled = list(self._queue.expire(now))
        if not self._idle:
            return self._no_run(expired, NEVER)
        try:
            batch, wake = self._batching.choose(self._queue, now, hurry=hurry or self._closing)
        except Exception as error:  # an error here is a bug of the server, and every waiting request gets the error
            _LOG.exception("model %s: batching failed", self.name)
            batch, wake = [], NEVER
            for entry in list(self._queue):
                self._queue.remove(entry)
                expired.append((entry, self._error(error)))
        if not batch:
            return self._no_run(expired, wake)
        if not self._may_run():
            return _Step(None, [], expired, NEVER)
        for entry in batch:
            self._queue.remove(entry)
        session = self._idle.pop()
        if self._idle and self._queue:
            self._work.notify()
        return _Step(session, batch, expired, now)

    def _no_run(self, expired: Settled, wake: float) -> _Step:
        return _Step(None, [], expired, wake, self._gate is not None and self._gate.withdraw())

    def _carry_out(self, step: _Step) -> None:
        if step.withdrawn and self._gate is not None:
            self._gate.pass_on()
        self._deliver(self._settle(step.expired))
        if step.session is not None:
            self._execute(step.session, step.batch)

    def poll(self) -> bool:
        """Does an idle instance's next step in the calling thread. Returns False if there was nothing to do."""
        with self._lock:
            step = self._next(self._clock())
        self._carry_out(step)
        return bool(step.batch or step.expired)

    def _serve(self) -> None:
        """Runs the loop of an instance's thread."""
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        return
                    now = self._clock()
                    step = self._next(now)
                    if not step.nothing:
                        break
                    self._work.wait(None if step.wake == NEVER else max(step.wake - now, 0.0))
            try:
                self._carry_out(step)
            except Exception:
                _LOG.exception("model %s: an instance continues after a bug of the server", self.name)

    def _watch(self) -> None:
        """Runs the loop of the thread that answers expired requests even while sessions run."""
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        return
                    now = self._clock()
                    expired: Settled = list(self._queue.expire(now))
                    if expired:
                        break
                    instant = self._queue.next_instant()
                    self._timer.wait(None if instant == NEVER else max(instant - now, 0.0))
            self._deliver(self._settle(expired))

    def _execute(self, session: Session, entries: list[Entry]) -> None:
        settled: Settled = []
        try:
            settled = self._run(session, entries)
        finally:
            # The session is released before the answers are delivered, so that the client's next request finds the
            # instance idle.
            self._release(session)
            self._deliver(settled)

    def _release(self, session: Session) -> None:
        with self._lock:
            closed, more = self._closed, bool(self._queue)
            if not closed:
                self._idle.append(session)
                if more:
                    self._work.notify()
        if self._gate is not None:
            self._gate.leave(again=more and not closed)
        if closed:
            self._close_session(session)

    def _close_session(self, session: Session) -> None:
        try:
            session.close()
        except Exception:
            _LOG.exception("model %s: a session could not be closed", self.name)

    def _run(self, session: Session, entries: list[Entry]) -> Settled:
        """Runs the unanswered entries in one batch.

        If the batch fails, runs each half as a separate batch, so that one bad request doesn't fail the other requests.
        """
        started = self._clock()
        settled: Settled = []
        live = entries
        if len(entries) > 1 or entries[0].done or entries[0].deadline <= started:
            settled = self._settle([(entry, too_late()) for entry in entries if entry.deadline <= started])
            live = [entry for entry in entries if not entry.done]
            if not live:
                return settled
        try:
            found = self._run_live(session, live, started)
            return settled + found if settled else found
        except Exception as error:
            if len(live) > 1:
                _LOG.info("model %s: a batch of %d requests failed (%s); run in halves", self.name, len(live), error)
                half = len(live) // 2
                self._deliver(settled + self._run(session, live[:half]))
                return self._run(session, live[half:])
            return settled + self._settle([(live[0], self._error(error))])
        except BaseException as error:
            self._deliver(settled + self._settle([(entry, self._error(error)) for entry in live]))
            raise

    def _run_live(self, session: Session, live: list[Entry], started: float) -> Settled:
        feeds = self._batching.stack(live)
        stacked = self._clock()
        outputs = session.run(feeds)
        inferred = self._clock()
        took = inferred - stacked
        usual = self._usual
        self._usual = took if usual == NEVER else usual + (min(took, max(2 * usual, _BRIEF)) - usual) / 8
        self._brief = self._usual < _BRIEF
        parts = self._batching.split(outputs, live)
        results: Settled = [(e, self._response(e, part)) for e, part in zip(live, parts, strict=True)]
        end = self._clock()
        spent = Durations(
            compute_input=ns(stacked - started), compute_infer=ns(inferred - stacked), compute_output=ns(end - inferred)
        )
        for entry in live:
            entry.book(started, spent)
        return self._settle(results, spent)

    def _response(self, entry: Entry, outputs: Mapping[str, np.ndarray]) -> InferenceResponse:
        request = entry.request
        if request.outputs is not None:
            if missing := [name for name in request.outputs if name not in outputs]:
                raise ServeError(Code.INTERNAL, f"model '{self.name}' gave no output '{missing[0]}'")
            outputs = {name: outputs[name] for name in request.outputs}
        return InferenceResponse(
            model=self.name, version=self.version, id=request.id, outputs=outputs, durations=entry.durations
        )

    def _error(self, error: BaseException) -> ServeError:
        return run_error(self.name, error)

    # Answering requests

    def _settle(self, results: Settled, spent: Durations | None = None) -> Settled:
        """Makes ``results`` final and counts the answers. Returns the results that the caller has to deliver.

        An entry that already has a result keeps that result. ``spent`` holds the durations of the run that gave the
        results.
        """
        with self._lock:
            now = self._clock()
            settled: Settled = []
            for entry, result in results:
                if entry.done:
                    continue
                entry.done = True
                entry.durations.total = ns(now - entry.arrived)
                if isinstance(result, ServeError):
                    self._recorder.failed(result, entry.durations.total)
                else:
                    self._recorder.succeeded(entry.durations)
                settled.append((entry, result))
            if spent is not None:
                entries = [entry for entry, _ in results]
                self._recorder.executed(sum(e.rows for e in entries), spent, *self._batching.tokens(entries))
        return settled

    def _deliver(self, settled: Settled) -> None:
        if not settled:
            return
        if self._in_order is not None:
            self._deliver_in_order(self._in_order, settled)
            return
        for entry, result in settled:
            self._answer(entry, result)
            self._delivered(entry)

    def _deliver_in_order(self, in_order: AnswerOrder, settled: Settled) -> None:
        with self._lock:
            first = in_order.begin(settled)
        while first is not None:
            assert first.result is not None
            self._answer(first, first.result)
            self._delivered(first)
            with self._lock:
                first = in_order.next()

    def _answer(self, entry: Entry, result: Result) -> None:
        try:
            entry.answer(result)
        except Exception:
            _LOG.exception("model %s: an answer could not be delivered", self.name)

    def _delivered(self, entry: Entry) -> None:
        # Needs no lock: removing a key is one step, and ``close`` sets ``_closing`` before it reads ``_outstanding``.
        self._outstanding.pop(entry, None)
        if self._closing:
            with self._lock:
                self._drained.notify_all()

    # Statistics and closing

    def statistics(self) -> ModelStatistics:
        """Returns a consistent copy of the statistics."""
        with self._lock:
            return self._recorder.copy(len(self._queue))

    def pending(self) -> int:
        """Counts the accepted requests whose answer isn't delivered yet."""
        return len(self._outstanding)

    def close(self, timeout: float) -> None:
        """Refuses new requests, waits at most ``timeout`` seconds of real time for accepted requests, and fails the
        rest with UNAVAILABLE. A session that is still running is closed when the run ends."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        while not self.threaded and self.poll():
            pass
        with self._lock:
            self._drained.wait_for(lambda: not self._outstanding, timeout)
            left = [entry for entry in list(self._outstanding) if not entry.done]
            for entry in left:
                if entry in self._queue:
                    self._queue.remove(entry)
            self._closed = True
            self._work.notify_all()
            self._timer.notify_all()
            idle, self._idle = self._idle, []
        stopped = ServeError(Code.UNAVAILABLE, f"model '{self.name}' version {self.version} was unloaded")
        self._deliver(self._settle([(entry, stopped) for entry in left]))
        if self._gate is not None:
            self._gate.close()
        for session in idle:
            self._close_session(session)
