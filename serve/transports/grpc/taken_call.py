"""Passes the message of one ModelInfer call to the server, and the reply to the call, on every transport that answers
calls without a thread of their own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from google.protobuf.message import DecodeError

from accel.errors import one_line

from ...core.server import InferenceServer
from ...core.transport import InferReply
from ...protocol.gathering import Gathering
from ...protocol.inference import Code, ServeError, Ticket
from .forms import Forms
from .refusal import STATUS, shortened
from .wire import Reply, write_reply

log = logging.getLogger("accel.serve")

_FORMS = Forms()
CODES = {code: status.value[0] for code, status in STATUS.items()}


class TakenCall(ABC):
    """A call of ModelInfer from its message to its answer. Any thread may answer the call, or find out that the client
    has gone."""

    __slots__ = ("_answered", "_gone", "_server", "_ticket")

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._answered = self._gone = False
        self._ticket: Ticket | None = None

    @abstractmethod
    def token(self) -> str | None:
        """Returns the bearer token in the headers of the call, or None."""

    @abstractmethod
    def _trace(self) -> dict[str, str]:
        """Returns the headers that name the trace of the call."""

    @abstractmethod
    def _due(self) -> float | None:
        """Returns the deadline of the call on ``time.monotonic``, or None if the call has no deadline."""

    @abstractmethod
    def _written(self, reply: Reply) -> Any:
        """Returns the bytes of the answer, as ``_send`` takes them."""

    @abstractmethod
    def _send(self, answer: Any) -> None:
        """Ends the call with an answer."""

    @abstractmethod
    def refuse(self, code: int, text: str) -> None:
        """Ends the call with a status and its text."""

    def take(self, message: bytes, gathering: Gathering | None) -> None:
        """Passes the message to the server."""
        model = ""
        try:
            call = _FORMS.read(message)
            model = call.model
            call.gathering, call.holds_place = gathering, True
            if not self._server.access.open:
                call.token = self.token()
            if self._server.tracing is not None:
                call.trace = self._trace()
            call.deadline = self._due()
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

    def reply(self, found: InferReply | ServeError) -> None:
        """Sends the reply or the error."""
        if isinstance(found, ServeError):
            self.refuse(CODES[found.code], shortened(str(found)))
            return
        try:
            answer = self._written(write_reply(found))
        except Exception as error:
            self._failed(error, found.model)
        else:
            self._send(answer)

    def _failed(self, error: Exception, model: str) -> None:
        log.error("an inference failed", extra={"model": model[:256]}, exc_info=error)
        self.refuse(CODES[Code.INTERNAL], f"{type(error).__name__}: {one_line(error)}")
