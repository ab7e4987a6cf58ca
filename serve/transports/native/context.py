"""Runs a method of a grpcio service for a call of the extension, in a thread of a pool."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from accel.errors import one_line

from ..grpc.refusal import quoted, shortened
from ..unpacking import Broken, TooLarge, unpack
from .infer_call import RESOURCE_EXHAUSTED, UNIMPLEMENTED

if TYPE_CHECKING:
    from .loop import NativeLoop

log = logging.getLogger("accel.serve")

_MOST_QUEUED = 1 << 20  # bytes of responses that wait for the client


class _Ended(Exception):
    """Ends the method: its call has an answer, or has ended."""


def unpacked(call: Any, packed: bytes, most: int) -> bytes:
    """Returns the unpacked message. Raises ``_Ended`` after it has refused the call."""
    try:
        return unpack(packed, call.encoding or "", most)
    except LookupError:
        text = f"grpc-encoding '{(call.encoding or '')[:32]}' is not supported; use gzip, deflate or identity"
        call.finish(UNIMPLEMENTED, quoted(text))
    except TooLarge as error:
        call.finish(RESOURCE_EXHAUSTED, quoted(str(error)))
    except Broken as error:
        call.finish(grpc.StatusCode.INTERNAL.value[0], quoted(str(error)))
    raise _Ended


class MethodCall:
    """A call of any method but ModelInfer, which is also the context that the method gets. ``handler`` is grpcio's
    description of the method."""

    def __init__(self, call: Any, handler: Any, most_message: int, loop: NativeLoop) -> None:
        self.call, self._handler, self._most, self._loop = call, handler, most_message, loop
        self._news = threading.Condition()
        self._ended = False  # the client sends no further message
        self._over = False
        self._callbacks: list[Callable[[], None]] = []
        self._code, self._details = 0, ""
        self.expected = False  # True while the loop waits for the first message
        self.started = False

    @property
    def done(self) -> bool:
        """Tells whether the call has ended."""
        return self._over

    @property
    def starts_at_once(self) -> bool:
        """Tells whether the method starts before its first message."""
        return bool(self._handler.request_streaming and self._handler.response_streaming)

    # In the loop's thread

    def news(self, *, ended: bool) -> None:
        """Wakes the method: there is a message, or there will be none."""
        with self._news:
            self._ended |= ended
            self._news.notify_all()

    def closed(self) -> None:
        """Ends the method, because the call has ended."""
        with self._news:
            over, self._over = self._over, True
            callbacks, self._callbacks = self._callbacks, []
            self._news.notify_all()
        if not over:
            for callback in callbacks:
                callback()

    def expire(self) -> None:
        """Ends the call at its deadline."""
        self.call.finish(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], b"Deadline Exceeded")
        self.closed()

    def cancel(self) -> None:
        """Ends a call whose message doesn't come."""
        self._loop.arrived(self)
        self.call.finish(grpc.StatusCode.CANCELLED.value[0], b"the message of the call took too long")
        self.closed()

    # In the method's thread

    def run(self) -> None:
        """Runs the method to its end."""
        try:
            self._run()
        except _Ended:
            pass
        except Exception as error:
            log.exception("a call failed", extra={"method": self.call.path[:256]})
            text = shortened(f"Exception calling application: {one_line(error)}")
            self.call.finish(grpc.StatusCode.UNKNOWN.value[0], quoted(text))
        finally:
            self.closed()
            del self.call.owner

    def _run(self) -> None:
        handler = self._handler
        requests = self._requests()
        if handler.request_streaming:
            behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary
            given: Any = requests
        else:
            behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
            given = next(requests, None)
            if given is None:
                self.call.finish(UNIMPLEMENTED, b"the call came without a message")
                return
        found = behavior(given, self)
        del given
        write = handler.response_serializer
        if not handler.response_streaming:
            status = (self._code, quoted(shortened(self._details)))
            self.call.finish(*status) if self._code else self.call.finish(*status, (write(found),))
            return
        with contextlib.closing(found):
            for response in found:
                if not self.call.send(write(response)):
                    raise _Ended
                self._drain()
        self.call.finish(self._code, quoted(shortened(self._details)))

    def _drain(self) -> None:
        """Waits until the client has read enough."""
        if self.call.queued <= _MOST_QUEUED:
            return
        with self._news:
            while not self._over and self.call.queued > _MOST_QUEUED:
                self._news.wait()

    def _requests(self) -> Iterator[Any]:
        read = self._handler.request_deserializer or (lambda message: message)
        while True:
            with self._news:
                while (message := self.call.take()) is None and not self._ended and not self._over:
                    self._news.wait()
            if message is None:
                return
            if type(message) is tuple:
                message = unpacked(self.call, message[0], self._most)
            try:
                request = read(message)
            except DecodeError:
                self.call.finish(grpc.StatusCode.INTERNAL.value[0], b"Exception deserializing request!")
                raise _Ended from None
            del message
            yield request
            del request

    # What grpc.ServicerContext has, as far as the methods use it

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        found: list[tuple[str, str | bytes]] = []
        for raw, value in self.call.headers:
            name = raw.decode("latin-1")
            if name.endswith("-bin"):
                with contextlib.suppress(ValueError):
                    found.append((name, b64decode(value + b"=" * (-len(value) % 4))))
            else:
                found.append((name, value.decode("latin-1")))
        return found

    def time_remaining(self) -> float | None:
        deadline = self.call.deadline
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def is_active(self) -> bool:
        return not self._over

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._news:
            if self._over:
                return False
            self._callbacks.append(callback)
        return True

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code.value[0]

    def set_details(self, details: str) -> None:
        self._details = details

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.call.finish(code.value[0], quoted(details))
        raise _Ended
