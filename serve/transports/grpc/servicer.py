"""Answers the methods of GRPCInferenceService, each in a thread of its caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from accel.errors import one_line

from ...core.server import InferenceServer, stopping
from ...core.transport import InferReply
from ...protocol import messages as proto
from ...protocol.inference import Code, ServeError
from ...protocol.tensors import invalid
from ...security.access import bearer
from .arrivals import Arrivals
from .message import ReceivedRequest, parse_infer
from .refusal import refuse
from .stream import FOREVER, InferStream, trace_of
from .wire import Reply, read_call, write_metadata, write_reply, write_statistics

log = logging.getLogger("accel.serve")


class Servicer:
    """Has one method for each method of the gRPC service, with the same name."""

    def __init__(self, server: InferenceServer, arrivals: Arrivals, streams: int) -> None:
        self._server, self._arrivals = server, arrivals
        self._streams = threading.BoundedSemaphore(streams)

    def handlers(self) -> grpc.GenericRpcHandler:
        made, unary = {}, self.unary()
        for name, (request, response, streaming) in proto.methods().items():
            # This module parses the messages itself. If grpcio parsed a malformed message, the call might never end,
            # and stop() would wait forever.
            if streaming:
                made[name] = grpc.stream_stream_rpc_method_handler(self._streamed, None, response.SerializeToString)
            elif name == "ModelInfer":
                received = self._received(self.ModelInfer, parse_infer)
                made[name] = grpc.stream_unary_rpc_method_handler(received, None, Reply.SerializeToString)
            else:
                received = self._received(unary[name], request.FromString)
                made[name] = grpc.stream_unary_rpc_method_handler(received, None, response.SerializeToString)
        return grpc.method_handlers_generic_handler(proto.SERVICE, made)

    def unary(self) -> dict[str, Callable[[Any, Any], Any]]:
        """Returns the methods with a single request message, as a dict from names to functions ``(request, context) ->
        response``."""
        found = {
            name: self._unary(getattr(self, name), response)
            for name, (_, response, streaming) in proto.methods().items()
            if not streaming and name != "ModelInfer"
        }
        return {
            **found,
            "ModelInfer": lambda request, context: self.ModelInfer(ReceivedRequest(request), context).message(),
        }

    def _received(
        self, behavior: Callable[[Any, Any], Any], parse: Callable[[bytes], Any]
    ) -> Callable[[Iterator[bytes], Any], Any]:
        """Returns a function that waits for the message of a call, and passes the parsed message to ``behavior``.

        The function takes a stream of messages, because grpcio can cancel a stream that still waits for a message. On
        the wire, a call with one message looks the same as a stream of one message.
        """

        def received(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            try:
                # A caller without a token is refused on the headers, before the message is received.
                self._server.access.check(self._token(context))
            except ServeError as error:
                refuse(context, error)
            if self._server.taking:
                self._arrivals.track(context)
            message = self._arrivals.receive(messages, context)
            if message is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "the call came without a message")
                raise AssertionError  # abort has raised
            try:
                request = parse(message)
            except DecodeError:
                context.abort(grpc.StatusCode.INTERNAL, "Exception deserializing request!")
            del message  # the parsed request has a copy, or refers to the message
            return behavior(request, context)

        return received

    def _streamed(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        """Calls ``ModelStreamInfer`` with the parsed messages. A malformed message ends the stream once all earlier
        messages are answered."""
        malformed = False

        def requests() -> Iterator[ReceivedRequest]:
            nonlocal malformed
            for message in messages:
                try:
                    request = parse_infer(message)
                except DecodeError:
                    malformed = True
                    return
                del message
                yield request
                del request

        yield from self.ModelStreamInfer(requests(), context)
        if malformed:
            context.abort(grpc.StatusCode.INTERNAL, "Exception deserializing request!")

    def _unary(self, method: Callable[[Any, Any, str | None], Any], response: Any) -> Callable[[Any, Any], Any]:
        def behavior(request: Any, context: grpc.ServicerContext) -> Any:
            answer = response()
            try:
                method(request, answer, self._token(context))
            except ServeError as error:
                refuse(context, error)
            except Exception as error:
                log.exception("a call failed", extra={"method": method.__name__})
                refuse(context, ServeError(Code.INTERNAL, f"{type(error).__name__}: {one_line(error)}"))
            return answer

        return behavior

    def _token(self, context: grpc.ServicerContext) -> str | None:
        if self._server.access.open:
            return None
        found = dict(context.invocation_metadata()).get("authorization")
        return bearer(found.decode("latin-1") if isinstance(found, bytes) else found)

    # Inference

    def ModelInfer(self, request: ReceivedRequest, context: grpc.ServicerContext) -> Any:
        """Answers a ModelInfer call."""
        model = request.message.model_name
        try:
            return write_reply(self._answer(request, context))
        except ServeError as error:
            refuse(context, error)
        except Exception as error:
            log.exception("an inference failed", extra={"model": model[:256]})
            refuse(context, ServeError(Code.INTERNAL, f"{type(error).__name__}: {one_line(error)}"))

    def _answer(self, request: ReceivedRequest, context: grpc.ServicerContext) -> InferReply:
        """Returns the reply to a ModelInfer call. Raises ``ServeError`` if the call fails."""
        remaining = context.time_remaining()
        done = threading.Lock()  # held until the answer comes or the call ends; a Lock is cheaper than an Event
        done.acquire()
        found: list[InferReply | ServeError] = []

        def reply(answer: InferReply | ServeError) -> None:
            found.append(answer)
            _release(done)

        call = read_call(request)
        call.token, call.holds_place = self._token(context), True
        if self._server.tracing is not None:
            call.trace = trace_of(context)
        if remaining is not None and remaining < FOREVER:
            call.deadline = time.monotonic() + remaining
        ticket = self._server.infer(call, reply)
        if not found:

            def gone() -> None:
                if not found:
                    ticket.cancel()
                _release(done)

            if not context.add_callback(gone):
                gone()
            # If a session hangs, its request is never answered. A request without an answer must not block the
            # thread beyond the request's deadline.
            done.acquire(timeout=remaining if call.deadline is not None and remaining is not None else -1)
        if not found:
            ticket.cancel()
            raise ServeError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if isinstance(found[0], ServeError):
            # No name of this frame may hold the error, whose traceback holds the frame.
            raise found.pop()  # type: ignore[misc]
        return found[0]

    def ModelStreamInfer(self, requests: Iterator[ReceivedRequest], context: grpc.ServicerContext) -> Iterator[Any]:
        if not self._streams.acquire(blocking=False):
            refuse(
                context, ServeError(Code.UNAVAILABLE, "too many streams are open; close some or raise --grpc-threads")
            )
        try:
            token = self._token(context)
            self._server.live(token)
            if not self._server.taking:
                raise stopping()
            self._arrivals.track(context)
            yield from InferStream(self._server, requests, context, token).responses()
        except ServeError as error:
            refuse(context, error)
        finally:
            self._streams.release()

    # Health and metadata

    def ServerLive(self, _request: Any, answer: Any, token: str | None) -> None:
        answer.live = self._server.live(token)

    def ServerReady(self, _request: Any, answer: Any, token: str | None) -> None:
        answer.ready = self._server.ready(token)

    def ModelReady(self, request: Any, answer: Any, token: str | None) -> None:
        answer.ready = self._server.model_ready(request.name, request.version, token)

    def ServerMetadata(self, _request: Any, answer: Any, token: str | None) -> None:
        answer.name, answer.version, extensions = self._server.metadata(token)
        answer.extensions.extend(extensions)

    def ModelMetadata(self, request: Any, answer: Any, token: str | None) -> None:
        answer.CopyFrom(write_metadata(self._server.model_metadata(request.name, request.version, token)))

    def ModelConfig(self, request: Any, answer: Any, token: str | None) -> None:
        answer.config.CopyFrom(self._server.model_config(request.name, request.version, token))

    def ModelStatistics(self, request: Any, answer: Any, token: str | None) -> None:
        for row in self._server.statistics(request.name, request.version, token):
            write_statistics(answer.model_stats.add(), *row)

    # Repository

    def RepositoryIndex(self, request: Any, answer: Any, token: str | None) -> None:
        for row in self._server.index(ready=request.ready, token=token):
            answer.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)

    def RepositoryModelLoad(self, request: Any, _answer: Any, token: str | None) -> None:
        self._server.load(request.model_name, _given(request), token)

    def RepositoryModelUnload(self, request: Any, _answer: Any, token: str | None) -> None:
        self._server.unload(request.model_name, _given(request), token)

    # Shared memory

    def SystemSharedMemoryStatus(self, request: Any, answer: Any, token: str | None) -> None:
        for region in self._server.memory_status(request.name, token):
            answer.regions[region.name].name = region.name
            answer.regions[region.name].key = region.key
            answer.regions[region.name].offset = region.offset
            answer.regions[region.name].byte_size = region.byte_size

    def SystemSharedMemoryRegister(self, request: Any, _answer: Any, token: str | None) -> None:
        self._server.register_memory(request.name, request.key, request.offset, request.byte_size, token)

    def SystemSharedMemoryUnregister(self, request: Any, _answer: Any, token: str | None) -> None:
        self._server.unregister_memory(request.name, token)

    def CudaSharedMemoryStatus(self, request: Any, answer: Any, token: str | None) -> None:
        for region in self._server.cuda_memory_status(request.name, token):
            answer.regions[region.name].name = region.name
            answer.regions[region.name].device_id = region.device
            answer.regions[region.name].byte_size = region.byte_size

    def CudaSharedMemoryRegister(self, request: Any, _answer: Any, token: str | None) -> None:
        given = (request.name, request.raw_handle, request.device_id, request.byte_size)
        self._server.register_cuda_memory(*given, token)

    def CudaSharedMemoryUnregister(self, request: Any, _answer: Any, token: str | None) -> None:
        self._server.unregister_cuda_memory(request.name, token)

    # Settings

    def TraceSetting(self, request: Any, answer: Any, token: str | None) -> None:
        changes = {key: list(value.value) or None for key, value in request.settings.items()}
        for key, values in self._server.trace_settings(request.model_name, changes, token).items():
            answer.settings[key].value.extend(values)

    def LogSettings(self, request: Any, answer: Any, token: str | None) -> None:
        changes = {}
        for key, value in request.settings.items():
            kind = value.WhichOneof("parameter_choice")
            if kind is None:
                raise invalid(f"log setting '{key[:64]}' has no value")
            changes[key] = getattr(value, kind)
        for key, setting in self._server.log_settings(changes, token).items():
            target = answer.settings[key]
            if isinstance(setting, bool):
                target.bool_param = setting
            elif isinstance(setting, int):
                target.uint32_param = setting
            else:
                target.string_param = str(setting)


def unary_methods(server: InferenceServer) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the gRPC methods with a single request message, as a dict from names to functions ``(request, context) ->
    response``. Callers that have a gRPC server of their own, such as Ray Serve, use these functions."""
    return Servicer(server, Arrivals(1), streams=1).unary()


def _given(request: Any) -> dict[str, Any]:
    """Returns the parameters of a request to load or unload a model."""
    return {k: getattr(v, v.WhichOneof("parameter_choice") or "string_param") for k, v in request.parameters.items()}


def _release(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # the lock was already released, by ``reply`` or at the end of the call
        return
