"""Serves ModelInfer from the completion queue of gRPC's core, in one thread.

grpcio's own server (``grpc/_server.py``) passes each call to a thread and back, which takes more time than a small
model. Here, one thread reads all events that are there, takes the requests that arrived together, and runs them as one
batch. All other methods stay with grpcio's server, whose queue this loop reads.

The loop uses private names of grpcio. ``why_not`` tells whether the installed grpcio has them.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc

from ...core.server import InferenceServer
from ...protocol.inference import ServeError
from ..turns import Turns
from .arrivals import Arrivals
from .infer_call import CLOSED, RECEIVED, OpenCall

log = logging.getLogger("accel.serve")

_REQUESTED = "requested"
_READY_FOR = 128  # calls that gRPC's core accepts without asking the loop
_MOST_EVENTS = 256  # read before the requests among them run
_QUIET = 1.0  # seconds


class InferLoop:
    """Starts ``made``, a server of grpcio, and serves ``method`` in place of it. Accepts at most ``most`` calls of
    ``method`` at the same time."""

    def __init__(self, made: grpc.Server, method: str, server: InferenceServer, arrivals: Arrivals, most: int) -> None:
        self._state = made._state
        self._core = self._state.server
        self._core.register_method(method)
        self._queue = self._state.completion_queue
        self._method, self._server, self._arrivals, self._most = method, server, arrivals, most
        self._arrived: list[tuple[OpenCall, bytes]] = []
        self._turns = Turns("accel-grpc", self._read)

    def start(self) -> None:
        """Starts to answer calls, as ``grpc.Server.start`` does."""
        with self._state.lock:
            self._core.start()
            self._state.stage = _server._ServerStage.STARTED
            for number in range(_READY_FOR):
                self._ask((_REQUESTED, number))
            for method in self._state.registered_method_handlers:
                _server._request_registered_call(self._state, method)
            _server._request_call(self._state)
        self._turns.start()

    def _ask(self, tag: tuple[str, int]) -> None:
        """Asks for a further call of the method. Called with grpcio's lock held."""
        self._core.request_registered_call(self._queue, self._queue, self._method, tag)
        self._state.due.add(tag)

    # Reading the queue

    def _read(self) -> list[tuple[OpenCall, bytes]]:
        """Waits for an event, handles all events that are there, and returns the calls whose message has arrived."""
        self._read_events()
        arrived, self._arrived = self._arrived, []
        return arrived

    def _read_events(self) -> None:
        timeout = time.time() + _QUIET
        for _ in range(_MOST_EVENTS):
            event = self._queue.poll(timeout)
            if event.completion_type == cygrpc.CompletionType.queue_timeout:
                return
            try:
                self._process(event)
            except Exception:
                log.exception("an event of the gRPC port could not be handled")
            if self._turns.ended:
                return
            timeout = 0.0

    def _process(self, event: Any) -> None:
        tag = event.tag
        if type(tag) is not tuple:
            self._turns.ended = not _server._process_event_and_continue(self._state, event)
            return
        first, what = tag
        if first is _REQUESTED:
            self._requested(event, tag)
            return
        if what is RECEIVED:
            self._arrivals.arrived(first)
            message = event.batch_operations[0].message()
            if message is None:
                first.refuse(grpc.StatusCode.UNIMPLEMENTED.value[0], "the call came without a message")
            else:
                self._arrived.append((first, message))
        elif what is CLOSED:
            first.closed(cancelled=event.batch_operations[0].cancelled())
        if first.over():
            self._end(first)

    def _requested(self, event: Any, tag: tuple[str, int]) -> None:
        call = None
        state = self._state
        with state.lock:
            state.due.remove(tag)
            if event.success:
                call = OpenCall(self._server, event)
                state.rpc_states.add(call)
                crowded = state.active_rpc_count >= self._most
                state.active_rpc_count += 1
            if state.stage is _server._ServerStage.STARTED:
                self._ask(tag)
            elif _server._stop_serving(state):
                self._turns.ended = True
        if call is None:
            return
        if crowded:
            call.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "Concurrent RPC limit exceeded!")
            return
        try:
            # A caller without a token is refused on the headers, before the message is received.
            self._server.access.check(call.token())
        except ServeError as error:
            call.reply(error)
            return
        if self._server.taking:
            call.counted = True
            self._arrivals.opened()
        self._arrivals.expect(call)
        call.receive()

    def _end(self, call: OpenCall) -> None:
        if call.counted:
            self._arrivals.ended()
        with self._state.lock:
            self._state.active_rpc_count -= 1
            self._state.rpc_states.remove(call)
            if _server._stop_serving(self._state):
                self._turns.ended = True
