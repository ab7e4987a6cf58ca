"""Answers one ModelInfer call by the operations of gRPC's core, without a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from google.protobuf.message import DecodeError
from grpc._cython import cygrpc

from accel.errors import one_line

from ...core.server import InferenceServer
from ...core.transport import TRACE_HEADERS, InferReply
from ...protocol.gathering import Gathering
from ...protocol.inference import Code, ServeError, Ticket
from ...security.access import bearer
from .message import parse_infer
from .refusal import STATUS, shortened
from .stream import FOREVER
from .wire import read_call, write_reply

log = logging.getLogger("accel.serve")

RECEIVED, SENT, CLOSED = "received", "sent", "closed"  # what an event of a call tells
_CODES = {code: status.value[0] for code, status in STATUS.items()}
_OK = 0


class OpenCall:
    """A call from its headers to its end.

    The tag of each operation is the tuple ``(self, RECEIVED)``, ``(self, SENT)`` or ``(self, CLOSED)``. The end of the
    call is only watched if the call isn't answered at once. Any thread may answer the call.
    """

    __slots__ = (
        "_answered", "_gone", "_left", "_lock", "_server", "_ticket", "_watched", "call", "counted", "deadline",
        "headers",
    )  # fmt: skip

    def __init__(self, server: InferenceServer, event: Any) -> None:
        self._server = server
        self.call = event.call
        self.headers = event.invocation_metadata
        self.deadline: float = event.call_details.deadline  # in seconds since 1970
        self.counted = False  # True if the end of the server waits for this call
        self._left = 0  # operations whose event has not come yet
        self._lock = threading.Lock()
        self._answered = self._watched = self._gone = False
        self._ticket: Ticket | None = None

    def cancel(self) -> None:
        """Cancels the call, so that the client gets the status CANCELLED."""
        self.call.cancel()

    def token(self) -> str | None:
        if self._server.access.open:
            return None
        found = dict(self.headers).get("authorization")
        return bearer(found.decode("latin-1") if isinstance(found, bytes) else found)

    def receive(self) -> None:
        """Waits for the message."""
        self._left += 1
        self.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), (self, RECEIVED))

    def watch(self) -> None:
        """Waits for the end of the call, if the call has no answer yet."""
        with self._lock:
            if self._answered or self._watched:
                return
            self._watched = True
            self._left += 1
        self.call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), (self, CLOSED))

    def take(self, message: bytes, gathering: Gathering) -> None:
        """Passes the message to the server."""
        model = ""
        try:
            request = parse_infer(message)
            model = request.message.model_name
            call = read_call(request)
            call.token, call.gathering, call.holds_place = self.token(), gathering, True
            if self._server.tracing is not None:
                call.trace = {k: v for k, v in self.headers if k in TRACE_HEADERS and isinstance(v, str)}
            remaining = self.deadline - time.time()
            if remaining < FOREVER:
                call.deadline = time.monotonic() + remaining
            if self._is_gone():
                return
            ticket = self._server.infer(call, self.reply)
        except DecodeError:
            self.refuse(_CODES[Code.INTERNAL], "Exception deserializing request!")
        except ServeError as error:
            self.reply(error.detached())
        except Exception as error:
            self._failed(error, model)
        else:
            with self._lock:
                if not self._answered:
                    self._ticket = ticket
            if self._is_gone():
                ticket.cancel()

    def _is_gone(self) -> bool:
        """Tells whether the client has gone, which another thread may find out at any time."""
        return self._gone

    def _failed(self, error: Exception, model: str) -> None:
        log.error("an inference failed", extra={"model": model[:256]}, exc_info=error)
        self.refuse(_CODES[Code.INTERNAL], f"{type(error).__name__}: {one_line(error)}")

    def reply(self, found: InferReply | ServeError) -> None:
        """Sends the reply or the error."""
        if isinstance(found, ServeError):
            self.refuse(_CODES[found.code], shortened(str(found)))
            return
        try:
            body = write_reply(found).SerializeToString()
        except Exception as error:
            self._failed(error, found.model)
        else:
            self._answer(_OK, b"", cygrpc.SendMessageOperation(body, 0))

    def refuse(self, code: int, text: str) -> None:
        """Ends the call with a status and its text."""
        self._answer(code, text.encode())

    def _answer(self, code: int, text: bytes, *message: Any) -> None:
        with self._lock:
            if self._answered:
                return
            self._answered, self._ticket = True, None  # the ticket refers to ``reply``
            self._left += 1
            last = () if self._watched else (cygrpc.ReceiveCloseOnServerOperation(0),)
        operations = (
            cygrpc.SendInitialMetadataOperation(None, 0),
            *message,
            cygrpc.SendStatusFromServerOperation(None, code, text, 0),
            *last,
        )
        self.call.start_server_batch(operations, (self, SENT))

    def closed(self, *, cancelled: bool) -> None:
        """Cancels the request if the call ended before its answer."""
        if not cancelled:
            return
        with self._lock:
            if self._answered:
                return
            self._answered = self._gone = True  # nobody is left to get an answer
            ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()

    def over(self) -> bool:
        """Counts an event of the call, and tells whether it was the last one."""
        with self._lock:
            self._left -= 1
            return self._answered and not self._left
