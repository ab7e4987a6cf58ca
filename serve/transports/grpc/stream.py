"""Handles a ModelStreamInfer call. If a model sends one response for each request, the responses keep the order of the
requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from accel.errors import one_line

from ...core.server import InferenceServer, stopping
from ...core.transport import TRACE_HEADERS, InferReply
from ...protocol import messages as proto
from ...protocol.inference import Code, ServeError, Ticket
from .message import ReceivedRequest
from .refusal import shortened
from .wire import read_call, write_reply

log = logging.getLogger("accel.serve")

_Response = proto.message("ModelStreamInferResponse")
# The reader of a stream pauses at _UNANSWERED unanswered requests, so that gRPC's flow control stops the client.
_UNANSWERED = 128
FOREVER = 1e8  # for a call without a deadline, grpcio reports a remaining time of more than FOREVER seconds


def trace_of(context: Any) -> dict[str, str]:
    """Returns the trace headers in the client's metadata."""
    return {k: v for k, v in context.invocation_metadata() if k in TRACE_HEADERS and isinstance(v, str)}


class _Slot:
    """Holds one request of the stream, and the responses that are ready but not sent yet."""

    __slots__ = ("decoupled", "final", "id", "ready", "ticket")

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.ready: deque[InferReply | ServeError] = deque()
        self.final = False
        self.decoupled = False
        self.ticket: Ticket | None = None


class InferStream:
    """Reads requests on a separate thread, so that the server can accept one request while answering another."""

    def __init__(
        self, server: InferenceServer, requests: Iterator[ReceivedRequest], context: Any, token: str | None
    ) -> None:
        self._server, self._requests, self._context, self._token = server, requests, context, token
        self._slots: deque[_Slot] = deque()
        self._state = threading.Condition()
        self._ended = False
        remaining = context.time_remaining()
        self._trace = trace_of(context) if server.tracing is not None else None
        self._deadline = time.monotonic() + remaining if remaining is not None and remaining < FOREVER else None

    def responses(self) -> Iterator[Any]:
        """Yields every response, until the client has ended the stream and every request is answered.

        If the server ends, raises ``ServeError`` UNAVAILABLE after the answers to all taken requests.
        """
        if not self._context.add_callback(self._gone):
            return
        forget = self._server.on_change(self._wake)
        try:
            threading.Thread(target=self._read, name="accel-stream", daemon=True).start()
            yield from self._answers()
        finally:
            forget()

    def _wake(self) -> None:
        with self._state:
            self._state.notify_all()

    def _answers(self) -> Iterator[Any]:
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._next() is not None or ((self._ended or not self._server.taking) and not self._slots)
                )
                slot = self._next()
                if slot is None and not self._ended:
                    raise stopping()
                if slot is None:
                    return
                found = slot.ready.popleft() if slot.ready else None
                if slot.final and not slot.ready:
                    self._slots.remove(slot)
                    self._state.notify_all()
            if found is not None and not (isinstance(found, InferReply) and found.hidden):
                yield self._response(slot, found)

    def _next(self) -> _Slot | None:
        """Returns the oldest request with a response to send, or None. Also returns a request without a response to
        send if the request is complete, so that the caller removes the request. If a model sends exactly one response
        to a request, this response is sent before the responses to newer requests."""
        for slot in self._slots:
            if slot.ready or slot.final:
                return slot
            if not slot.decoupled:
                return None
        return None

    def _response(self, slot: _Slot, found: InferReply | ServeError) -> Any:
        if isinstance(found, ServeError):
            made = _Response(error_message=shortened(str(found)))
            made.infer_response.id = slot.id
            return made
        return _Response(infer_response=write_reply(found).message())

    def _read(self) -> None:
        try:
            for request in self._requests:
                slot = _Slot(request.message.id)
                with self._state:
                    self._state.wait_for(lambda: len(self._slots) < _UNANSWERED or self._ended)
                    if self._ended:
                        return
                    self._slots.append(slot)
                self._take(slot, request)
                del request, slot  # while the thread waits for the next request, this one may be freed
        except Exception as error:  # the client disconnected in the middle of a message
            log.debug("a stream ended", extra={"reason": str(error)})
        finally:
            with self._state:
                self._ended = True
                self._state.notify_all()

    def _take(self, slot: _Slot, request: ReceivedRequest) -> None:
        def reply(answer: InferReply | ServeError) -> None:
            with self._state:
                slot.ready.append(answer)
                slot.final = isinstance(answer, ServeError) or answer.final
                if slot.final:
                    slot.ticket = None  # the ticket refers to this function, which refers to the slot
                self._state.notify_all()

        try:
            call = read_call(request)
            call.token, call.trace, call.single = self._token, self._trace, False
            slot.decoupled = self._server.is_decoupled(call.model, call.version)
            call.deadline = self._deadline
            ticket = self._server.infer(call, reply)
            with self._state:
                slot.ticket = None if slot.final else ticket
                left = self._ended and not self._slots
            if left:  # the client disconnected while the server accepted the request
                ticket.cancel()
        except ServeError as error:
            reply(error.detached())
        except Exception as error:
            log.exception("an inference failed", extra={"model": request.message.model_name[:256]})
            reply(ServeError(Code.INTERNAL, f"{type(error).__name__}: {one_line(error)}"))

    def _gone(self) -> None:
        """Cancels the unanswered requests, because the call has ended."""
        with self._state:
            self._ended = True
            left = list(self._slots)
            self._slots.clear()
            self._state.notify_all()
        for slot in left:
            if slot.ticket is not None and not slot.final:
                slot.ticket.cancel()
