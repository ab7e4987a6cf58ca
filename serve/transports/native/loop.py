"""Reads what happens on the port in one thread, runs the ModelInfer calls that arrived together as one batch, and gives
all other calls to a pool of threads."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from ...core.server import InferenceServer
from ...protocol import messages as proto
from ...protocol.inference import ServeError
from ..grpc.arrivals import Arrivals
from ..grpc.refusal import quoted
from ..grpc.taken_call import CODES
from ..turns import Turns
from .context import MethodCall, unpacked
from .infer_call import RESOURCE_EXHAUSTED, UNIMPLEMENTED, InferCalled, token_of

log = logging.getLogger("accel.serve")

_INFER = f"/{proto.SERVICE}/ModelInfer"
_OURS = f"/{proto.SERVICE}/"
_QUIET = 1.0  # seconds
_FEW = 1024
NAME = "accel-native"  # of the threads
# What is new of a call: the same numbers as in port.h.
OPENED, MESSAGE, ENDED, CLOSED = 1, 2, 4, 8


class NativeLoop:
    """Serves the calls of ``port``, a Port of the extension. At most ``most`` calls are open at the same time. ``find``
    returns grpcio's description of a method, or None."""

    def __init__(
        self,
        port: Any,
        server: InferenceServer,
        find: Callable[[str], Any],
        arrivals: Arrivals,
        pool: Executor,
        *,
        most: int,
        most_message: int,
    ) -> None:
        self._port, self._server, self._find = port, server, find
        self._arrivals, self._pool = arrivals, pool
        self._most, self._most_message = most, most_message
        self._deadlines: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._crowd = _FEW  # so many deadlines are looked through for calls that have ended
        self._turns = Turns(NAME, self._read)

    def start(self) -> None:
        self._turns.start()

    def end(self) -> None:
        """Stops to read. The calls that are open are cut off."""
        self._turns.ended = True
        self._port.wake()

    def close(self) -> None:
        """Ends all calls. Called after ``end``."""
        for call in self._port.close():
            self._tell(call, [])

    # Reading

    def _read(self) -> list[tuple[InferCalled, bytes]]:
        timeout = _QUIET
        if self._deadlines:
            timeout = min(_QUIET, max(0.0, self._deadlines[0][0] - time.monotonic()))
        arrived: list[tuple[InferCalled, bytes]] = []
        if self._turns.ended:
            return arrived
        for call in self._port.poll(timeout):
            self._tell(call, arrived)
        if self._deadlines:
            self._expire()
        return arrived

    def _tell(self, call: Any, arrived: list[tuple[InferCalled, bytes]]) -> None:
        try:
            self._process(call, arrived)
        except Exception:
            log.exception("a call of the gRPC port could not be read")

    def _process(self, call: Any, arrived: list[tuple[InferCalled, bytes]]) -> None:
        news = call.news()
        if not news & OPENED:
            owner = call.owner
        elif news & CLOSED:  # the client reset the call at once
            return
        else:
            owner = self._open(call, complete=bool(news & MESSAGE))
        if owner is None:
            return
        if news & CLOSED:
            call.owner = None
            self.arrived(owner)
            owner.closed()
        elif type(owner) is InferCalled:
            if news & MESSAGE:
                self._infer(owner, call.take(), arrived)
            elif news & ENDED and owner.expected:
                self.arrived(owner)
                owner.refuse(UNIMPLEMENTED, "the call came without a message")
        else:
            self._method(owner, news)

    def _open(self, call: Any, *, complete: bool) -> Any:
        path = call.path
        try:
            # A caller without a token is refused on the headers, before the message is received.
            if path.startswith(_OURS) and not self._server.access.open:
                self._server.access.check(token_of(call))
        except ServeError as error:
            call.finish(CODES[error.code], quoted(str(error)))
            return None
        if self._port.open > self._most:
            call.finish(RESOURCE_EXHAUSTED, b"Concurrent RPC limit exceeded!")
            return None
        owner: Any
        if path == _INFER:
            owner = InferCalled(self._server, call, self)
            call.counted = self._server.taking
        else:
            handler = self._find(path)
            if handler is None:
                call.finish(UNIMPLEMENTED, b"Method not found!")
                return None
            owner = MethodCall(call, handler, self._most_message, self)
            self.watch(owner)
        call.owner = owner
        if not complete:
            owner.expected = True
            self._arrivals.expect(owner)
            if path == _INFER:
                self.watch(owner)
        call.accept()
        return owner

    def arrived(self, owner: Any) -> None:
        """Ends the wait for the message of a call."""
        if owner.expected:
            owner.expected = False
            self._arrivals.arrived(owner)

    def _infer(self, owner: InferCalled, message: Any, arrived: list[tuple[InferCalled, bytes]]) -> None:
        self.arrived(owner)
        if type(message) is tuple:
            self._pool.submit(self._unpack, owner, message[0])
        elif message is not None:
            arrived.append((owner, message))

    def _unpack(self, owner: InferCalled, packed: bytes) -> None:
        """Unpacks a message in a thread of the pool, because it takes time."""
        try:
            message = unpacked(owner.call, packed, self._most_message)
        except Exception:
            owner.closed()
            return
        del packed
        owner.take(message, None)
        owner.watch()

    def _method(self, owner: MethodCall, news: int) -> None:
        if news & (MESSAGE | ENDED):
            self.arrived(owner)
        if not owner.started and (owner.starts_at_once or news & (MESSAGE | ENDED)):
            owner.started = True
            self.arrived(owner)
            self._pool.submit(owner.run)
        owner.news(ended=bool(news & ENDED))

    # Deadlines

    def watch(self, owner: Any) -> None:
        """Has the call ended at its deadline."""
        deadline = owner.call.deadline
        if deadline == math.inf:
            return
        if len(self._deadlines) >= self._crowd:
            left = [row for row in self._deadlines if not row[2].done]
            heapq.heapify(left)
            self._deadlines, self._crowd = left, 2 * len(left) + _FEW
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), owner))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, owner = heapq.heappop(self._deadlines)
            if not owner.done:
                self.arrived(owner)
                owner.expire()
