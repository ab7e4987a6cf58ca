"""Defines a Ray Serve application that serves a repository on more than one machine.

Each replica serves the whole repository as ``accel serve`` does. HTTP works without further options. Triton's gRPC
clients work if Ray's proxies are started with ``serve start --grpc-servicer-functions
accel.serve.deploy.ray_app.add_inference_service``. A replica refuses streams, control commands and shared memory,
because Ray passes each request to a single replica. A call for statistics returns the statistics of the replica that
answers the call. This command starts the application:

    serve run accel.serve.deploy.ray_app:app repository=s3://bucket/models replicas=4
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import grpc

from accel.errors import MissingExtra, UsageError

from ..core.transport import InferReply
from ..models import config as model_config
from ..process.options import ServeOptions
from ..protocol import messages as proto
from ..protocol.inference import Code, ServeError
from ..security.access import bearer
from ..transports.grpc.servicer import unary_methods
from ..transports.http import wire as http_wire

METHODS = (
    "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer",
    "ModelStatistics", "RepositoryIndex",
)  # fmt: skip
_NUMBERS = ("replicas", "threads", "concurrency")
_MODEL = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|config|stats|infer))?")


def add_inference_service(servicer: Any, server: Any) -> None:
    """Adds the methods of the inference service to Ray's gRPC proxy. The proxy passes messages to a replica without
    parsing them."""
    made = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto.SERVICE, made),))


class _Context:
    """Gives Ray's gRPC context the methods that ``transports/grpc/servicer.py`` calls on a grpcio context."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [] if self._context is None else list(self._context.invocation_metadata())

    def time_remaining(self) -> None:
        """Returns None, which means no time limit. Ray itself ends a call that takes too long."""

    def add_callback(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002 - Ray reports no disconnects
        return True

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        if self._context is not None:
            self._context.set_code(code)
            self._context.set_details(text)
        raise ServeError(Code[code.name], text)


class Replica:
    """One replica of the server. ``options`` is the text of ``ServeOptions.to_text()``. ``concurrency`` is the number
    of calls that can wait for a model at the same time."""

    def __init__(self, options: str, concurrency: int) -> None:
        self._server = ServeOptions.from_text(options).open_server()
        self._server.repository.start()
        self._methods = unary_methods(self._server)
        # Ray runs a replica's methods on a single event loop. The pool's threads wait for the models, so that the event
        # loop is never blocked.
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="accel-ray")

    async def _call(self, name: str, message: bytes, context: Any) -> Any:
        def run() -> Any:
            inner = _Context(context)
            try:
                request = proto.methods()[name][0].FromString(message)
            except Exception:
                inner.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a {name}Request")
            return self._methods[name](request, inner)

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    async def __call__(self, request: Any) -> Any:
        """Answers one HTTP request of the REST v2 API: health, metadata, config, statistics or inference."""
        from starlette.responses import Response

        body = await request.body()
        answer = asyncio.get_running_loop().run_in_executor(
            self._pool, self._http, request.method, request.url.path, request.headers, body
        )
        try:
            status, headers, content = await answer
        except ServeError as error:
            status, headers, content = error.code.http, {}, json.dumps({"error": str(error)}).encode()
        return Response(content, status, {"content-type": "application/json", **headers})

    def _http(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        server, token = self._server, bearer(headers.get("authorization"))

        def made(found: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
            return status, {}, b"" if found is None else json.dumps(found).encode()

        if path in ("/v2/health/live", "/v2/health/ready"):
            what = path.rpartition("/")[2]
            well = what == "live" or server.healthy()
            return made({what: well}, 200 if well else 503)
        if path == "/v2":
            name, version, extensions = server.metadata(token)
            return made({"name": name, "version": version, "extensions": list(extensions)})
        match = _MODEL.fullmatch(path)
        if match is None or (match[3] == "infer") != (method == "POST"):
            raise ServeError(Code.NOT_FOUND, f"{method} {path[:256]} is not served here")
        model, version = unquote(match[1]), unquote(match[2] or "")
        if match[3] == "infer":
            return self._infer(model, version, body, headers.get(http_wire.HEADER_LENGTH), token)
        if match[3] == "ready":
            return made(None, 200 if server.model_ready(model, version, token) else 400)
        if match[3] == "config":
            return made(model_config.to_json(server.model_config(model, version, token)))
        if match[3] == "stats":
            rows = server.statistics(model, version, token)
            return made({"model_stats": [http_wire.statistics_json(*row) for row in rows]})
        return made(http_wire.metadata_json(server.model_metadata(model, version, token)))

    def _infer(
        self, model: str, version: str, body: bytes, length: str | None, token: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        self._server.access.check(token, model=model)
        call = http_wire.read_call(model, version, body, length)
        call.token = token
        found: list[InferReply | ServeError] = []
        answered = threading.Event()

        def reply(answer: InferReply | ServeError) -> None:
            found.append(answer)
            answered.set()

        self._server.infer(call, reply)
        answered.wait()
        if isinstance(found[0], ServeError):
            raise found.pop()  # type: ignore[misc]  # the traceback holds this frame, which mustn't hold the error
        parts, head = http_wire.write_reply(found[0], call)
        headers = {}
        if head is not None:
            headers = {"content-type": "application/octet-stream", http_wire.HEADER_LENGTH: str(head)}
        return 200, headers, b"".join(parts)

    def __del__(self) -> None:
        """Closes the server. Ray calls ``__del__`` after the replica has answered its requests."""
        if server := getattr(self, "_server", None):
            server.close(0.0)
            self._pool.shutdown(wait=False)

    def check_health(self) -> None:
        """Raises ``RuntimeError`` if the server is not healthy. Ray calls ``check_health`` regularly and replaces a
        replica if the call raises an error."""
        if not self._server.healthy():
            raise RuntimeError("the server takes no requests")


def _method(name: str) -> Callable[..., Any]:
    async def method(self: Replica, message: bytes, grpc_context: Any = None) -> Any:
        return await self._call(name, message, grpc_context)

    method.__name__ = method.__qualname__ = name
    return method


for _name in METHODS:
    setattr(Replica, _name, _method(_name))


def app(arguments: dict[str, str]) -> Any:
    """Returns the application for the ``arguments`` of ``serve run``.

    ``repository`` is required, and is an address or a folder that every machine can read. All arguments except
    ``repository`` are optional. ``mode`` is none or poll. ``poll_seconds`` is the number of seconds between two polls
    of the repository. ``tokens`` is a path. ``replicas`` is the number of replicas. ``concurrency`` is the number of
    requests that a replica runs at the same time. ``threads`` is the number of threads of a session. ``cpus`` and
    ``gpus`` are the resources of each replica. Raises ``UsageError`` if an argument is missing, unknown or not a
    number, and ``MissingExtra`` if Ray is not installed.
    """
    given: dict[str, Any] = dict(arguments)
    try:
        numbers = {key: int(given.pop(key)) for key in _NUMBERS if key in given}
        resources = {f"num_{key}": float(given.pop(key)) for key in ("cpus", "gpus") if key in given}
        if "poll_seconds" in given:
            given["poll_seconds"] = float(given["poll_seconds"])
    except ValueError as error:
        raise UsageError(f"an argument of the application is not a number: {error}") from None
    if unknown := set(given) - {"repository", "mode", "poll_seconds", "tokens"}:
        raise UsageError(f"the application has no argument {sorted(unknown)[0]!r}; see accel.serve.deploy.ray_app.app")
    if "repository" not in given:
        raise UsageError("the application needs a model repository; give repository=FOLDER or repository=ADDRESS")
    if given.get("mode") == "explicit":
        raise UsageError("a Ray application gets no commands, so mode=explicit can't work; use mode=none or mode=poll")
    options = ServeOptions(**given, threads=numbers.get("threads", 0), grpc_port=None, http_port=None)
    concurrency = numbers.get("concurrency", 64)
    try:
        from ray import serve
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    deployment = serve.deployment(
        Replica,
        name="accel",
        num_replicas=numbers.get("replicas", 1),
        max_ongoing_requests=concurrency,
        ray_actor_options=resources,
    )
    return deployment.bind(options.to_text(), concurrency)
