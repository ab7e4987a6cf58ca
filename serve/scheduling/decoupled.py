"""Runs decoupled models. A request to a decoupled model gets any number of responses, and each response is sent as soon
as the session yields it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..protocol.inference import Code, Durations, InferenceResponse, ServeError
from .instances import QueuedExecutor
from .queue import Entry, Settled, too_late
from .statistics import ns

if TYPE_CHECKING:
    import numpy as np

    from accel.runtimes.base import Session
    from accel.signature import Feeds


@runtime_checkable
class StreamingSession(Protocol):
    """A session that yields the outputs of a request as several responses."""

    def stream(self, feeds: Feeds) -> Iterator[Mapping[str, np.ndarray]]: ...


class DecoupledExecutor(QueuedExecutor):
    """Runs each request alone. Sends each yielded response at once, then a final response without outputs, as Triton
    does.

    If a request is canceled during the stream, the stream ends with the error CANCELLED.
    """

    def _cancel(self, entry: Entry) -> None:
        with self._lock:
            streaming = entry not in self._queue and not entry.done
            entry.unwanted = streaming
        if not streaming:
            super()._cancel(entry)

    def _run(self, session: Session, entries: list[Entry]) -> Settled:
        assert isinstance(session, StreamingSession)
        [entry] = entries
        started = self._clock()
        if entry.done:
            return []
        if entry.deadline <= started:
            return self._settle([(entry, too_late())])
        try:
            return self._stream(session, entry, started)
        except Exception as error:
            return self._settle([(entry, self._error(error))])

    def _stream(self, session: StreamingSession, entry: Entry, started: float) -> Settled:
        feeds = self._batching.stack([entry])
        stacked = self._clock()
        parts = session.stream(feeds)
        delivering = 0.0
        for outputs in parts:
            if entry.unwanted or entry.done:
                if (end := getattr(parts, "close", None)) is not None:
                    end()  # frees the generator's buffers now, not at garbage collection
                return self._settle([(entry, ServeError(Code.CANCELLED, "Request was cancelled"))])
            before = self._clock()
            response = self._response(entry, self._batching.split(outputs, [entry])[0])
            response.final = False
            self._answer(entry, response)
            delivering += self._clock() - before
        end_of_stream = self._clock()
        spent = Durations(
            compute_input=ns(stacked - started),
            compute_infer=ns(end_of_stream - stacked - delivering),
            compute_output=ns(delivering),
        )
        entry.book(started, spent)
        last = InferenceResponse(
            model=self.name, version=self.version, id=entry.request.id, outputs={}, durations=entry.durations
        )
        return self._settle([(entry, last)], spent)
