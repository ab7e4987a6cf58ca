"""Answers one ModelInfer call by the operations of gRPC's core, without a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import Any

from grpc._cython import cygrpc

from ...core.server import InferenceServer
from ...core.transport import TRACE_HEADERS
from ...security.access import bearer
from .stream import FOREVER
from .taken_call import TakenCall
from .wire import Reply

RECEIVED, SENT, CLOSED = "received", "sent", "closed"  # what an event of a call tells
_OK = 0


class OpenCall(TakenCall):
    """A call from its headers to its end.

    The tag of each operation is the tuple ``(self, RECEIVED)``, ``(self, SENT)`` or ``(self, CLOSED)``. The end of the
    call is only watched if the call isn't answered at once. Any thread may answer the call.
    """

    __slots__ = ("_left", "_lock", "_watched", "call", "counted", "deadline", "headers")

    def __init__(self, server: InferenceServer, event: Any) -> None:
        super().__init__(server)
        self.call = event.call
        self.headers = event.invocation_metadata
        self.deadline: float = event.call_details.deadline  # in seconds since 1970
        self.counted = False  # True if the end of the server waits for this call
        self._left = 0  # operations whose event has not come yet
        self._lock = threading.Lock()
        self._watched = False

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

    def _trace(self) -> dict[str, str]:
        return {k: v for k, v in self.headers if k in TRACE_HEADERS and isinstance(v, str)}

    def _due(self) -> float | None:
        remaining = self.deadline - time.time()
        return time.monotonic() + remaining if remaining < FOREVER else None

    def _written(self, reply: Reply) -> bytes:
        return reply.SerializeToString()

    def _send(self, answer: bytes) -> None:
        self._answer(_OK, b"", cygrpc.SendMessageOperation(answer, 0))

    def refuse(self, code: int, text: str) -> None:
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
