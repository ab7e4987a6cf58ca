"""Serves ModelInfer from the completion queue of gRPC's core, in one thread.

grpcio's own server (``grpc/_server.py``) passes each call to a thread and back, which takes more time than a small
model. Here, one thread reads all events that are there, takes the requests that arrived together, and runs them as one
batch. All other methods stay with grpcio's server, whose queue this loop reads.

The loop uses private names of grpcio. ``why_not`` tells whether the installed grpcio has them.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc

from ...core.server import InferenceServer
from ...protocol.gathering import Gathering
from ...protocol.inference import ServeError
from .arrivals import Arrivals
from .infer_call import CLOSED, RECEIVED, OpenCall

log = logging.getLogger("accel.serve")

_REQUESTED = "requested"
_READY_FOR = 128  # calls that gRPC's core accepts without asking the loop
_MOST_EVENTS = 256  # read before the requests among them run
_STUCK = 0.05  # seconds after which another thread reads the queue
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
        self._taken: list[OpenCall] = []  # the calls of the requests that are run now
        self._gathering: Gathering | None = None
        self._since = 0.0  # when the loop began to run the gathering
        self._turn = 0  # changes when another thread takes over the queue
        self._passing = threading.Lock()  # guards the change of the turn
        self._ended = False
        self._busy = threading.Event()

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
        self._start_thread(self._run, 0)
        threading.Thread(target=self._watch, name="accel-grpc-watch", daemon=True).start()

    def _start_thread(self, target: Any, turn: int, *more: Any) -> None:
        threading.Thread(target=target, args=(turn, *more), name=f"accel-grpc-{turn}", daemon=True).start()

    def _ask(self, tag: tuple[str, int]) -> None:
        """Asks for a further call of the method. Called with grpcio's lock held."""
        self._core.request_registered_call(self._queue, self._queue, self._method, tag)
        self._state.due.add(tag)

    # Reading the queue

    def _run(self, turn: int) -> None:
        while self._turn == turn and not self._ended:
            self._read()
            if self._arrived:
                self._answer(turn)

    def _read(self) -> None:
        """Waits for an event, and handles all events that are there."""
        timeout = time.time() + _QUIET
        for _ in range(_MOST_EVENTS):
            event = self._queue.poll(timeout)
            if event.completion_type == cygrpc.CompletionType.queue_timeout:
                return
            try:
                self._process(event)
            except Exception:
                log.exception("an event of the gRPC port could not be handled")
            if self._ended:
                return
            timeout = 0.0

    def _process(self, event: Any) -> None:
        tag = event.tag
        if type(tag) is not tuple:
            self._ended = not _server._process_event_and_continue(self._state, event)
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
                self._ended = True
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
                self._ended = True

    # Running requests

    def _answer(self, turn: int) -> None:
        arrived, self._arrived = self._arrived, []
        gathering = Gathering(alone=len(arrived) == 1)
        taken = [call for call, _ in arrived]
        self._taken, self._gathering, self._since = taken, gathering, time.monotonic()
        if not self._busy.is_set():
            self._busy.set()
        arrived.reverse()
        while arrived:
            call, message = arrived.pop()
            call.take(message, gathering)
            del call, message  # while the requests run, they may be freed
        self._run_gathered(turn, gathering, taken)

    def _run_gathered(self, turn: int, gathering: Gathering, taken: list[OpenCall]) -> None:
        gathering.run()
        with self._passing:
            if self._turn == turn:
                self._taken, self._gathering = [], None
        for call in taken:
            call.watch()

    # Going on while a request takes long

    def _watch(self) -> None:
        """Lets another thread read the queue if a request keeps the loop for long. The requests that are known to take
        long run elsewhere, so this happens only if a model hangs or becomes slow."""
        while not self._ended:
            self._busy.clear()
            if self._gathering is not None or self._busy.wait(_QUIET):
                time.sleep(_STUCK)
                self._take_over()

    def _take_over(self) -> None:
        with self._passing:
            gathering, taken = self._gathering, self._taken
            if gathering is None or time.monotonic() - self._since < _STUCK:
                return
            gathering.leave()
            self._turn += 1
            self._since = time.monotonic()
            self._start_thread(self._go_on, self._turn, gathering, taken)

    def _go_on(self, turn: int, gathering: Gathering, taken: list[OpenCall]) -> None:
        for call in taken:
            call.watch()
        self._run_gathered(turn, gathering, taken)
        self._run(turn)
