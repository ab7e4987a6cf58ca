"""Answers one ModelInfer call of the extension, without a thread of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...core.server import InferenceServer
from ...core.transport import TRACE_HEADERS
from ...protocol.inference import Code
from ...security.access import bearer
from ..grpc.refusal import quoted
from ..grpc.taken_call import CODES, TakenCall
from ..grpc.wire import Reply

if TYPE_CHECKING:
    from .loop import NativeLoop

UNIMPLEMENTED, RESOURCE_EXHAUSTED = 12, 8


def token_of(call: Any) -> str | None:
    """Returns the bearer token in the headers of a call, or None."""
    found = call.header(b"authorization")
    return None if found is None else bearer(found.decode("latin-1"))


class InferCalled(TakenCall):
    """A call of ModelInfer from its headers to its end. Any thread may answer the call."""

    __slots__ = ("_loop", "call", "expected")

    def __init__(self, server: InferenceServer, call: Any, loop: NativeLoop) -> None:
        super().__init__(server)
        self.call, self._loop = call, loop
        self.expected = False  # True while the loop waits for the message

    @property
    def done(self) -> bool:
        """Tells whether the call has an answer, or has ended."""
        return self._answered

    def watch(self) -> None:
        """Has the call ended at its deadline, if the call has no answer yet."""
        if not self._answered and self.call.deadline != math.inf:
            self._loop.watch(self)

    def token(self) -> str | None:
        return token_of(self.call)

    def _trace(self) -> dict[str, str]:
        found = dict(self.call.headers)
        names = (name for name in TRACE_HEADERS if name.encode() in found)
        return {name: found[name.encode()].decode("latin-1") for name in names}

    def _due(self) -> float | None:
        deadline: float = self.call.deadline
        return None if deadline == math.inf else deadline

    def _written(self, reply: Reply) -> tuple[bytes | memoryview, ...]:
        return reply.parts()

    def _send(self, answer: tuple[bytes | memoryview, ...]) -> None:
        self._answered, self._ticket = True, None
        self.call.finish(0, b"", answer)

    def refuse(self, code: int, text: str) -> None:
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
