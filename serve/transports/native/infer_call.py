"""Answers one ModelInfer call of the extension, without a thread of its own."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from accel.errors import one_line

from ...core.server import InferenceServer
from ...core.transport import TRACE_HEADERS, InferReply
from ...protocol.gathering import Gathering
from ...protocol.inference import Code, ServeError, Ticket
from ...security.access import bearer
from ..grpc.message import parse_infer
from ..grpc.refusal import STATUS, quoted, shortened
from ..grpc.wire import read_call, write_reply

if TYPE_CHECKING:
    from .loop import NativeLoop

log = logging.getLogger("accel.serve")

CODES = {code: status.value[0] for code, status in STATUS.items()}
UNIMPLEMENTED, RESOURCE_EXHAUSTED = 12, 8


def token_of(call: Any) -> str | None:
    """Returns the bearer token in the headers of a call, or None."""
    found = call.header(b"authorization")
    return None if found is None else bearer(found.decode("latin-1"))


class InferCalled:
    """A call of ModelInfer from its headers to its end. Any thread may answer the call."""

    __slots__ = ("_answered", "_gone", "_loop", "_server", "_ticket", "call", "expected")

    def __init__(self, server: InferenceServer, call: Any, loop: NativeLoop) -> None:
        self._server, self.call, self._loop = server, call, loop
        self.expected = False  # True while the loop waits for the message
        self._answered = self._gone = False
        self._ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        """Tells whether the call has an answer, or has ended."""
        return self._answered

    def watch(self) -> None:
        """Has the call ended at its deadline, if the call has no answer yet."""
        if not self._answered and self.call.deadline != math.inf:
            self._loop.watch(self)

    def take(self, message: bytes, gathering: Gathering | None) -> None:
        """Passes the message to the server."""
        model = ""
        try:
            request = parse_infer(message)
            model = request.message.model_name
            call = read_call(request)
            call.gathering, call.holds_place = gathering, True
            if not self._server.access.open:
                call.token = token_of(self.call)
            if self._server.tracing is not None:
                found = dict(self.call.headers)
                names = (name for name in TRACE_HEADERS if name.encode() in found)
                call.trace = {name: found[name.encode()].decode("latin-1") for name in names}
            if self.call.deadline != math.inf:
                call.deadline = self.call.deadline
            if self._is_gone():
                return
            ticket = self._server.infer(call, self.reply)
        except DecodeError:
            self.refuse(CODES[Code.INTERNAL], "Exception deserializing request!")
        except ServeError as error:
            self.reply(error.detached())
        except Exception as error:
            self._failed(error, model)
        else:
            self._ticket = ticket
            if self._answered:  # by another thread, just now; the ticket refers to ``reply``
                self._ticket = None
            if self._is_gone():
                ticket.cancel()

    def _is_gone(self) -> bool:
        """Tells whether the client has gone, which another thread may find out at any time."""
        return self._gone

    def _failed(self, error: Exception, model: str) -> None:
        log.error("an inference failed", extra={"model": model[:256]}, exc_info=error)
        self.refuse(CODES[Code.INTERNAL], f"{type(error).__name__}: {one_line(error)}")

    def reply(self, found: InferReply | ServeError) -> None:
        """Sends the reply or the error."""
        if isinstance(found, ServeError):
            self.refuse(CODES[found.code], shortened(str(found)))
            return
        try:
            parts = write_reply(found).parts()
        except Exception as error:
            self._failed(error, found.model)
            return
        self._answered, self._ticket = True, None
        self.call.finish(0, b"", parts)

    def refuse(self, code: int, text: str) -> None:
        """Ends the call with a status and its text."""
        self._answered, self._ticket = True, None
        self.call.finish(code, quoted(text))

    def cancel(self) -> None:
        """Ends a call whose message doesn't come."""
        self._loop.arrived(self)
        self.refuse(CODES[Code.CANCELLED], "the message of the call took too long")

    def expire(self) -> None:
        """Ends the call at its deadline."""
        if self._answered:
            return
        self.call.finish(CODES[Code.DEADLINE_EXCEEDED], b"Deadline Exceeded")
        self.closed()

    def closed(self) -> None:
        """Cancels the request, because the call ended before its answer."""
        self._answered = self._gone = True
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()
