"""Records OpenTelemetry traces of requests and sends them to an OTLP endpoint.

A trace shows where one request spent its time. Spans and attributes that also exist in Triton have Triton's names. The
spans of a request are created after the request is answered. The durations of the spans are equal to the durations in
the statistics of the model's executor. OpenTelemetry is imported only if ``--trace`` is given. The spans of a request
form this tree:

    InferRequest                 from the transport's call to the last response
    └── <model>                  in the model's executor; an ensemble's span has one child span for each step
        ├── queue                waiting in the queue
        └── compute
            ├── compute_input    stacking the inputs into a batch
            ├── compute_infer    running the session
            └── compute_output   splitting the outputs of the batch
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel.errors import MissingExtra
from accel.version import __version__

from ..protocol.inference import Durations, ServeError, Ticket
from .settings import TraceSettings
from .transport import InferCall, InferReply, Reply

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("accel.serve")

Take = Callable[[InferCall, Reply], Ticket]

# If the endpoint doesn't answer, the server's shutdown is delayed by at most this many seconds.
_LAST_EXPORT_SECONDS = 3.0


class Tracing:
    """Records spans with ``provider`` for the requests that ``settings`` selects."""

    def __init__(self, provider: TracerProvider, settings: TraceSettings) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.settings = settings
        self._provider = provider
        self._tracer = provider.get_tracer("accel.serve", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._inside, self._server = set_span_in_context, SpanKind.SERVER
        self._failed: Callable[[str], Status] = lambda text: Status(StatusCode.ERROR, text)

    def infer(self, take: Take, call: InferCall, reply: Reply) -> Ticket:
        """Calls ``take(call, reply)`` and returns the ticket of the request. Traces the request if the trace settings
        select the request. Raises the errors of ``take``."""
        # As in Triton, a request that comes with a trace context is always traced while tracing is on.
        if not self.settings.sample(call.model, propagated=bool(call.trace)):
            return take(call, reply)
        traced = _Traced(self, call, reply)
        try:
            ticket = take(call, traced.reply)
        except ServeError as error:
            traced.ended(error, None)
            raise
        traced.taken(ticket)
        return ticket

    def record(self, call: InferCall, begun: int, end: int, found: InferReply | ServeError, ticket: Any) -> None:
        """Records the spans of a request that has ended. ``begun`` and ``end`` are in nanoseconds since 1970."""
        version = call.version if isinstance(found, ServeError) else found.version
        attributes = {"triton.model_name": call.model, "triton.model_version": version, "triton.request_id": call.id}
        parent = self._extract(call.trace) if call.trace else None
        span = self._tracer.start_span(
            "InferRequest", parent, kind=self._server, attributes=attributes, start_time=begun
        )
        if isinstance(found, ServeError):
            span.set_attribute("error.type", found.code.name)
            span.set_status(self._failed(str(found)))
        if ticket is not None and span.is_recording():
            self._model(self._inside(span), call.model, version, ticket.durations, begun, end)
        span.end(end)

    def _model(self, parent: Context, name: str, version: str, spent: Durations, earliest: int, end: int) -> None:
        """Records the span of a model. A model's span has the child spans ``queue`` and ``compute``. An ensemble's span
        has one child span for each step."""
        begun = max(earliest, end - spent.total) if spent.total else earliest
        attributes = {"triton.model_name": name, "triton.model_version": version}
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=begun)
        inside = self._inside(span)
        if spent.steps:
            for step in spent.steps:
                self._model(inside, step.model, step.version, step.durations, begun, step.end)
        elif spent.compute_infer:
            at = self._span(inside, "queue", begun, spent.queue)
            compute = self._tracer.start_span("compute", inside, start_time=at)
            within = self._inside(compute)
            for part in ("compute_input", "compute_infer", "compute_output"):
                at = self._span(within, part, at, getattr(spent, part))
            compute.end(at)
        span.end(end)

    def _span(self, parent: Context, name: str, begun: int, ns: int) -> int:
        self._tracer.start_span(name, parent, start_time=begun).end(begun + ns)
        return begun + ns

    def close(self) -> None:
        """Sends the remaining spans, and gives up after three seconds."""
        # ``force_flush`` and ``shutdown`` repeat a failed request for ten seconds each, whatever limit they get.
        last = threading.Thread(target=self._provider.shutdown, name="last-traces", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_SECONDS)


class _Traced:
    """Records the trace of a request once the request's ticket and last response have arrived. Either may arrive
    first."""

    __slots__ = ("_begun", "_call", "_end", "_found", "_lock", "_reply", "_ticket", "_tracing")

    def __init__(self, tracing: Tracing, call: InferCall, reply: Reply) -> None:
        self._tracing, self._call, self._reply = tracing, call, reply
        self._begun = time.time_ns()
        self._end = 0
        self._lock = threading.Lock()
        self._found: InferReply | ServeError | None = None
        self._ticket: Ticket | None = None

    def reply(self, found: InferReply | ServeError) -> None:
        """Passes each response to the transport at once, and keeps the last response for the trace."""
        end = time.time_ns()
        self._reply(found)
        if isinstance(found, InferReply) and not found.final:
            return
        with self._lock:
            self._found, self._end = found, end
            ticket = self._ticket
        if ticket is not None:
            self.ended(found, ticket)

    def taken(self, ticket: Ticket) -> None:
        with self._lock:
            self._ticket = ticket
            found = self._found
        if found is not None:
            self.ended(found, ticket)

    def ended(self, found: InferReply | ServeError, ticket: Ticket | None) -> None:
        try:
            self._tracing.record(self._call, self._begun, self._end or time.time_ns(), found, ticket)
        except Exception:  # a failed trace must not fail the request
            log.exception("a request could not be traced", extra={"model": self._call.model})


def open_tracing(url: str, rate: int) -> Tracing:
    """Returns a ``Tracing`` that traces one of every ``rate`` requests and sends the traces to ``url``, over OTLP/HTTP.

    If ``rate`` is 0, only requests with a trace context are traced. OpenTelemetry's own environment variables
    (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY ...) set all further options. Raises
    ``MissingExtra`` if the OpenTelemetry libraries are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "tracing") from None
    _log_as_the_server_does()
    resource = Resource.create({"process.pid": os.getpid()})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
        resource = resource.merge(Resource({SERVICE_NAME: "accel"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider, TraceSettings(url=url, rate=rate))


def _log_as_the_server_does() -> None:
    """Writes OpenTelemetry's messages to the server's log, such as an error when the endpoint doesn't answer."""
    logger, own = logging.getLogger("opentelemetry"), logging.getLogger("accel.serve")
    if own.handlers:
        logger.handlers, logger.propagate = own.handlers, False
