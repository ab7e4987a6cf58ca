"""Serves REST v2 with binary tensors, health probes and metrics, with aiohttp in a separate thread."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from accel.errors import UnsupportedHere, one_line

from ...core.server import InferenceServer
from ...core.transport import TRACE_HEADERS, InferCall, InferReply
from ...models import config as model_config
from ...protocol.inference import Code, ServeError, Ticket
from ...protocol.tensors import invalid
from ...security.access import bearer
from ...security.tls import Tls, check_certificates
from .. import metrics
from . import live
from . import wire as http_wire
from .body import read_body

log = logging.getLogger("accel.serve")

_LONGEST_ERROR = 1 << 14  # an error may repeat names of any length that the client sent
_PIECE = 1 << 20  # bytes of a body that are sent at once
_BODY_SECONDS = 300.0  # the time limit for receiving the body of a request


class HttpTransport:
    """Serves an ``InferenceServer`` over HTTP. ``port=0`` takes a free port. ``threads`` is the number of threads that
    parse requests and pass them to ``server``. ``shared`` lets other processes listen on the same port. ``max_message``
    is the largest allowed size of a body in bytes."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        threads: int = 128,
        max_message: int = (1 << 31) - 1,
        tls: Tls | None = None,
        shared: bool = False,
    ) -> None:
        self._host, self._port, self._shared = host, port, shared
        self._tls = check_certificates(tls) if tls else None
        self._rest = _Rest(server, threads, max_message)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="accel-http", daemon=True)
        self._runner: web.AppRunner | None = None

    def start(self) -> int:
        """Starts to listen, and returns the port. Raises ``UnsupportedHere`` if the port is in use."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> int:
        application = web.Application(middlewares=[_errors])
        application.on_response_prepare.append(self._rest.say_goodbye)
        self._rest.add_to(application)
        # handler_cancellation cancels the request of a client that disconnects.
        # ``read_body`` unpacks compressed bodies, because aiohttp unpacks them without a limit.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, auto_decompress=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls, reuse_port=self._shared or None)
        try:
            await site.start()
        except OSError as error:
            raise UnsupportedHere(
                f"can't listen on {self._host}:{self._port} ({error.strerror}); choose another port with --http-port"
            ) from None
        return int(self._runner.addresses[0][1])

    def renew(self, tls: Tls) -> None:
        """Uses the certificates of ``tls`` for new connections. Raises ``UnsupportedHere``, and keeps the old
        certificates, if the new certificates can't be used. The earlier client CAs stay trusted until the server
        ends."""
        check_certificates(tls)
        if self._tls is not None:
            self._tls.load_cert_chain(tls.certificate, tls.key)
            if tls.client_ca:
                self._tls.load_verify_locations(tls.client_ca)

    def finish(self, timeout: float) -> None:
        """Closes the port and the idle connections, and waits at most ``timeout`` seconds for the others."""
        self.stop(timeout)

    def stop(self, grace: float) -> None:
        """Takes no new calls. Cuts off the running calls that have not ended after ``grace`` seconds."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(grace), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._rest.close()

    async def _end(self, grace: float) -> None:
        if self._runner is None:
            return
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()  # closes idle connections at once
            await self._runner.server.shutdown(grace)
        await self._runner.cleanup()


Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Turns an error into a JSON response ``{"error": text}`` with the HTTP status of the error. The parameter name
    ``handler`` is required by aiohttp."""
    try:
        return await handler(request)
    except ServeError as error:
        return web.json_response({"error": str(error)[:_LONGEST_ERROR]}, status=error.code.http)
    except web.HTTPException as error:
        return web.json_response({"error": error.text or error.reason}, status=error.status)
    except (TimeoutError, ConnectionError) as error:
        return web.json_response({"error": f"the request did not arrive: {error}"}, status=408)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        log.exception("a call failed", extra={"path": request.path})
        text = f"{type(error).__name__}: {one_line(error)}"
        return web.json_response({"error": text}, status=500)


class _Rest:
    """The routes. A call that may take a long time runs on a separate thread, so that the event loop only reads and
    writes bytes."""

    def __init__(self, server: InferenceServer, threads: int, max_message: int) -> None:
        self._server, self._max_message = server, max_message
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="accel-http")
        self._control = ThreadPoolExecutor(4, thread_name_prefix="accel-http-control")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._control.shutdown(wait=False, cancel_futures=True)

    def add_to(self, application: web.Application) -> None:
        get, post = application.router.add_get, application.router.add_post
        get("/", self.page)
        get("/live.json", self.live_rows)
        get("/metrics", self.metrics)
        get("/v2/health/live", self.live)
        get("/v2/health/ready", self.ready)
        get("/v2", self.metadata)
        get("/v2/models/stats", self.statistics)
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            get(model, self.model_metadata)
            get(f"{model}/ready", self.model_ready)
            get(f"{model}/config", self.model_config)
            get(f"{model}/stats", self.statistics)
            post(f"{model}/infer", self.infer)
        post("/v2/repository/index", self.index)
        post("/v2/repository/models/{model}/load", self.load)
        post("/v2/repository/models/{model}/unload", self.unload)
        for kind in ("system", "cuda"):
            memory = f"/v2/{kind}sharedmemory"
            for path in (memory, f"{memory}/region/{{region}}"):
                get(f"{path}/status", self.memory_status if kind == "system" else self.cuda_status)
                post(f"{path}/unregister", self.unregister_memory if kind == "system" else self.unregister_cuda)
            register = self.register_memory if kind == "system" else self.register_cuda
            post(f"{memory}/region/{{region}}/register", register)
        for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
            get(path, self.trace_setting)
            post(path, self.trace_setting)
        get("/v2/logging", self.log_settings)
        post("/v2/logging", self.log_settings)

    async def say_goodbye(self, request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG002
        """Tells the client to send its next request over a new connection, if this server is about to end."""
        if self._server.leaving:
            response.force_close()
            response.headers["Connection"] = "close"

    def _token(self, request: web.Request) -> str | None:
        return bearer(request.headers.get("Authorization"))

    def _names(self, request: web.Request) -> tuple[str, str]:
        return request.match_info.get("model", ""), request.match_info.get("version", "")

    async def _body(self, request: web.Request) -> bytearray:
        self._server.access.check(self._token(request))  # the token is checked before the body is read
        return await asyncio.wait_for(read_body(request, self._max_message, self._apart), _BODY_SECONDS)

    async def _apart(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(call, *arguments))

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._control, functools.partial(call, *arguments))

    # Health and metadata

    async def live(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"live": True})  # KServe's client needs a JSON body; Triton's body is empty

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002
        ready = self._server.healthy()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def page(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.Response(text=live.page(), headers=live.HEADERS, content_type="text/html", charset="utf-8")

    async def live_rows(self, request: web.Request) -> web.Response:
        found = await self._do(live.snapshot, self._server, self._token(request))
        return web.json_response(found, headers={"Cache-Control": "no-store"})

    async def metrics(self, request: web.Request) -> web.Response:
        rows = await self._do(self._server.statistics, "", "", self._token(request))
        counts = await self._do(self._server.counts, self._token(request))
        return web.Response(body=metrics.render(rows, counts), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def metadata(self, request: web.Request) -> web.Response:
        name, version, extensions = self._server.metadata(self._token(request))
        return web.json_response({"name": name, "version": version, "extensions": list(extensions)})

    async def model_metadata(self, request: web.Request) -> web.Response:
        found = self._server.model_metadata(*self._names(request), self._token(request))
        return web.json_response(http_wire.metadata_json(found))

    async def model_ready(self, request: web.Request) -> web.Response:
        found = self._server.model_ready(*self._names(request), self._token(request))
        return web.Response(status=200 if found else 400)

    async def model_config(self, request: web.Request) -> web.Response:
        found = self._server.model_config(*self._names(request), self._token(request))
        return web.json_response(model_config.to_json(found))

    async def statistics(self, request: web.Request) -> web.Response:
        rows = await self._do(self._server.statistics, *self._names(request), self._token(request))
        return web.json_response({"model_stats": [http_wire.statistics_json(*row) for row in rows]})

    # Inference

    async def infer(self, request: web.Request) -> web.StreamResponse:
        token = self._token(request)
        self._server.access.check(token, model=self._names(request)[0])  # the token is checked before the body is read
        found = await self._answer(request, await self._body(request), token)
        if isinstance(found, ServeError):
            try:
                raise found
            finally:
                del found  # the error's traceback holds this frame, so this frame mustn't hold the error
        parts, head = found
        headers = {"Content-Type": "application/json"}
        if head is not None:
            headers = {"Content-Type": "application/octet-stream", http_wire.HEADER_LENGTH: str(head)}
        return await _sent(request, parts, headers)

    async def _answer(
        self, request: web.Request, body: bytearray, token: str | None
    ) -> tuple[list[bytes | memoryview], int | None] | ServeError:
        """Returns the parts of the response body and the length of its JSON, or the error of the request."""
        name, version = self._names(request)
        length = request.headers.get(http_wire.HEADER_LENGTH)
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Any] = loop.create_future()
        tickets: list[Ticket] = []

        def settle(found: Any) -> None:
            loop.call_soon_threadsafe(_set, waiting, found.detached() if isinstance(found, ServeError) else found)

        def run() -> None:
            call: InferCall | None = None

            def reply(found: InferReply | ServeError) -> None:
                try:
                    if not isinstance(found, ServeError):
                        assert call is not None
                        settle(http_wire.write_reply(found, call))
                    else:
                        settle(found)
                except Exception as error:
                    settle(_as_serve_error(error, name))

            try:
                try:
                    call = http_wire.read_call(name, version, body, length)
                except ServeError:
                    self._server.check_served(name, version)  # whatever the body holds, a missing model is missing
                    raise
                call.token = token
                if self._server.tracing is not None:
                    call.trace = {k: request.headers[k] for k in TRACE_HEADERS if k in request.headers}
                tickets.append(self._server.infer(call, reply))
            except Exception as error:
                settle(_as_serve_error(error, name))

        try:
            await asyncio.wrap_future(self._pool.submit(run))
            return await waiting  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.cancel()
            raise

    # Repository

    async def index(self, request: web.Request) -> web.Response:
        body = http_wire.read_json(await self._body(request))
        rows = await self._do(
            functools.partial(self._server.index, ready=bool(body.get("ready")), token=self._token(request))
        )
        made = [{k: v for k, v in vars(row).items() if v or k == "name"} for row in rows]
        return web.json_response(made)

    async def load(self, request: web.Request) -> web.Response:
        body = http_wire.read_json(await self._body(request))
        given = http_wire.read_parameters(body.get("parameters"))
        await self._do(self._server.load, request.match_info["model"], given, self._token(request))
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        body = http_wire.read_json(await self._body(request))
        given = http_wire.read_parameters(body.get("parameters"))
        await self._do(self._server.unload, request.match_info["model"], given, self._token(request))
        return web.Response()

    # Shared memory

    async def memory_status(self, request: web.Request) -> web.Response:
        rows = self._server.memory_status(request.match_info.get("region", ""), self._token(request))
        keys = ("name", "key", "offset", "byte_size")
        return web.json_response([{key: getattr(row, key) for key in keys} for row in rows])

    async def register_memory(self, request: web.Request) -> web.Response:
        body = http_wire.read_json(await self._body(request))
        key, offset, size = body.get("key"), body.get("offset", 0), body.get("byte_size")
        if not isinstance(key, str) or not isinstance(offset, int) or not isinstance(size, int):
            raise invalid("registering shared memory takes a key, an offset and a byte_size")
        region = request.match_info["region"]
        await self._do(self._server.register_memory, region, key, offset, size, self._token(request))
        return web.Response()

    async def unregister_memory(self, request: web.Request) -> web.Response:
        region = request.match_info.get("region", "")
        await self._do(self._server.unregister_memory, region, self._token(request))
        return web.Response()

    async def cuda_status(self, request: web.Request) -> web.Response:
        rows = self._server.cuda_memory_status(request.match_info.get("region", ""), self._token(request))
        made = [{"name": row.name, "device_id": row.device, "byte_size": row.byte_size} for row in rows]
        return web.json_response(made)

    async def register_cuda(self, request: web.Request) -> web.Response:
        self._server.access.check(self._token(request), control=True)
        body = http_wire.read_json(await self._body(request))
        handle, device, size = body.get("raw_handle"), body.get("device_id", 0), body.get("byte_size")
        text = handle.get("b64") if isinstance(handle, dict) else None
        if not isinstance(text, str) or not isinstance(device, int) or not isinstance(size, int):
            raise invalid("registering CUDA shared memory takes a raw_handle with b64, a device_id and a byte_size")
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError:
            raise invalid("the raw_handle is not base64") from None
        region = request.match_info["region"]
        await self._do(self._server.register_cuda_memory, region, raw, device, size, self._token(request))
        return web.Response()

    async def unregister_cuda(self, request: web.Request) -> web.Response:
        region = request.match_info.get("region", "")
        await self._do(self._server.unregister_cuda_memory, region, self._token(request))
        return web.Response()

    # Settings

    async def trace_setting(self, request: web.Request) -> web.Response:
        changes: dict[str, list[str] | None] = {}
        if request.method == "POST":
            for key, value in http_wire.read_json(await self._body(request)).items():
                one_or_more = value if isinstance(value, list) else [value]
                changes[key] = None if value is None else [str(v) for v in one_or_more]
        model = request.match_info.get("model", "")
        found = await self._do(self._server.trace_settings, model, changes, self._token(request))
        return web.json_response({key: v if key == "trace_level" else v[0] for key, v in found.items()})

    async def log_settings(self, request: web.Request) -> web.Response:
        changes = {}
        if request.method == "POST":
            changes = http_wire.read_parameters(http_wire.read_json(await self._body(request)))
        return web.json_response(await self._do(self._server.log_settings, changes, self._token(request)))


async def _sent(request: web.Request, parts: list[bytes | memoryview], headers: dict[str, str]) -> web.StreamResponse:
    """Returns the response with ``parts`` as its body. Sends a large body piece by piece, because joining the parts
    would copy the tensors."""
    size = sum(map(len, parts))
    if size <= _PIECE:
        return web.Response(body=b"".join(parts), headers=headers)
    response = web.StreamResponse(headers={**headers, "Content-Length": str(size)})
    await response.prepare(request)
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE):
            await response.write(view[start : start + _PIECE])
    await response.write_eof()
    return response


def _set(waiting: asyncio.Future[Any], result: Any) -> None:
    if not waiting.done():  # if it is done, the client has disconnected
        waiting.set_result(result)


def _as_serve_error(error: Exception, model: str) -> ServeError:
    if isinstance(error, ServeError):
        return error
    log.error("an inference failed", extra={"model": model[:256]}, exc_info=error)
    return ServeError(Code.INTERNAL, f"{type(error).__name__}: {one_line(error)}")
