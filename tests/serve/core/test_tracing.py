"""Proves that OpenTelemetry traces have the right spans, follow the settings and reach a collector."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tritonclient.utils import InferenceServerException

from accel.serve.core import tracing
from accel.serve.core.settings import TraceSettings
from accel.serve.core.tracing import Tracing
from tests.support.onnx_builder import artifact, node
from tests.support.serving import ENSEMBLE, FLOAT, Served, Start, linear

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
PARTS = ["compute_infer", "compute_input", "compute_output"]


class Traced:
    """A server that collects its spans in memory. With ``rate`` 0 the server traces only requests that carry a trace
    context."""

    def __init__(self, process: Any, rate: int = 0) -> None:
        self.process, self.memory = process, InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.memory))
        process.server.tracing = Tracing(provider, TraceSettings(url="http://memory", rate=rate))
        process.server.local.trace = process.server.tracing.settings
        self.grpc = triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}")

    def spans(self, requests: int) -> list[Any]:
        """Waits until ``requests`` requests are traced, and returns all spans. A span may end after the client has
        received the answer."""
        deadline = time.monotonic() + 30
        while sum(s.name == "InferRequest" for s in self.memory.get_finished_spans()) < requests:
            assert time.monotonic() < deadline, self.memory.get_finished_spans()
            time.sleep(0.005)
        return list(self.memory.get_finished_spans())


@pytest.fixture
def traced(repository: Path, start: Start) -> Iterator[Callable[..., Traced]]:
    with ExitStack() as stack:

        def begin(**options: Any) -> Traced:
            made = Traced(start(repository, mode="explicit", models=("*",), http_port=0), **options)
            stack.callback(made.grpc.close)
            return made

        yield begin


def given(rows: int = 2, name: str = "x", of: Any = triton) -> list[Any]:
    made = of.InferInput(name, [rows, 4], "FP32")
    made.set_data_from_numpy(np.ones((rows, 4), np.float32))
    return [made]


def by_parent(spans: list[Any], parent: Any) -> list[Any]:
    """Returns the child spans of a span."""
    return [s for s in spans if s.parent is not None and s.parent.span_id == parent.context.span_id]


def check_model(spans: list[Any], model: Any) -> None:
    """Checks a model's span. Checks that the child spans are "queue" and then "compute". Also checks that "compute" has
    child spans for input, infer and output."""
    queue, compute = sorted(by_parent(spans, model), key=lambda s: s.start_time)
    assert (queue.name, compute.name) == ("queue", "compute")
    assert model.start_time <= queue.start_time <= queue.end_time == compute.start_time
    parts = sorted(by_parent(spans, compute), key=lambda s: (s.start_time, s.end_time))
    assert sorted(s.name for s in parts) == PARTS
    assert parts[0].start_time == compute.start_time
    assert parts[-1].end_time == compute.end_time
    assert sum(s.end_time - s.start_time for s in parts) == compute.end_time - compute.start_time
    assert compute.end_time - compute.start_time > 0


@pytest.mark.parametrize("way", ["grpc", "http", "stream"])
def test_where_the_time_went(traced: Callable[..., Traced], way: str) -> None:
    """Checks that a request with a trace context is part of the client's trace. Also checks that no span for the queue
    or the computation is missing, that the spans are nested, and that the spans match the durations in the
    statistics."""
    server = traced()
    if way == "grpc":
        server.grpc.infer("linear", given(), request_id="7", headers=dict(PARENT))
    elif way == "http":
        with triton_http.InferenceServerClient(f"127.0.0.1:{server.process.ports['http']}") as client:
            client.infer("linear", given(of=triton_http), request_id="7", headers=dict(PARENT))
    else:
        arrived = threading.Event()
        server.grpc.start_stream(lambda **_: arrived.set(), headers=dict(PARENT))
        server.grpc.async_stream_infer("linear", given(), request_id="7")
        assert arrived.wait(30)
        server.grpc.stop_stream()
    spans = server.spans(1)
    root = next(s for s in spans if s.name == "InferRequest")
    assert root.kind is SpanKind.SERVER
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == SPAN_ID
    assert {s.context.trace_id for s in spans} == {root.context.trace_id}
    assert dict(root.attributes) == {
        "triton.model_name": "linear", "triton.model_version": "1", "triton.request_id": "7",
    }  # fmt: skip
    (model,) = by_parent(spans, root)
    assert model.name == "linear"
    assert root.start_time <= model.start_time <= model.end_time <= root.end_time
    check_model(spans, model)
    found = server.process.server.statistics("linear")[0][2]
    taken = {s.name: s.end_time - s.start_time for s in spans}
    for name in ("queue", *PARTS):
        assert taken[name] == getattr(found, name).ns
    assert abs((time.time_ns() - root.end_time) / 1e9) < 60  # the spans use wall clock time, not the machine's uptime


def test_which_requests_have_one(traced: Callable[..., Traced]) -> None:
    """Fails if the trace rate, trace count, trace level or a model's own trace setting is ignored. Also checks that a
    request with a trace context is traced, and that a request with an unsampled trace context isn't traced."""
    server = traced(rate=3)
    for _ in range(7):
        server.grpc.infer("linear", given())
    assert sum(s.name == "InferRequest" for s in server.spans(2)) == 2
    server.memory.clear()
    server.grpc.update_trace_settings("linear", {"trace_rate": "1", "trace_count": "2"})
    for _ in range(4):
        server.grpc.infer("linear", given())
    assert server.grpc.get_trace_settings("linear").settings["trace_count"].value == ["0"]
    server.grpc.infer("linear", given(), headers=dict(PARENT))
    spans = server.spans(3)
    roots = [s for s in spans if s.name == "InferRequest"]
    assert sorted(s.parent is not None for s in roots) == [False, False, True]  # spans may end in any order
    server.memory.clear()
    server.grpc.update_trace_settings("linear", {"trace_count": "-1"})
    server.grpc.infer("linear", given(), headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})
    server.grpc.update_trace_settings("linear", {"trace_level": "OFF"})
    server.grpc.infer("linear", given(), headers=dict(PARENT))
    server.grpc.update_trace_settings("linear", {"trace_level": "TIMESTAMPS"})
    server.grpc.infer("linear", given(), request_id="last")
    assert [s.attributes["triton.request_id"] for s in server.spans(1) if s.name == "InferRequest"] == ["last"]


def test_the_settings_as_triton_answers_them(traced: Callable[..., Traced]) -> None:
    """Fails if the trace settings differ from Triton's trace settings in OpenTelemetry mode, or if a client can
    redirect traces."""
    server = traced(rate=5)
    found = {key: list(v.value) for key, v in server.grpc.get_trace_settings().settings.items()}
    assert found == {
        "trace_level": ["TIMESTAMPS"], "trace_rate": ["5"], "trace_count": ["-1"], "trace_mode": ["opentelemetry"],
        "url": ["http://memory"],
    }  # fmt: skip
    for refused in ({"url": "http://elsewhere"}, {"trace_mode": "triton"}, {"trace_file": "/tmp/x"}):
        with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
            server.grpc.update_trace_settings(settings=refused)
    assert server.grpc.update_trace_settings(settings={"trace_rate": "9"}).settings["trace_rate"].value == ["9"]
    assert server.process.server.local.trace.changed() == {"": {"trace_rate": ["9"]}}
    assert server.grpc.update_trace_settings(settings={"trace_rate": None}).settings["trace_rate"].value == ["5"]


def test_a_request_that_fails(traced: Callable[..., Traced]) -> None:
    """Fails if a refused request has no trace, or if the request's trace reports success."""
    server = traced()
    with pytest.raises(InferenceServerException, match="unexpected inference input"):
        server.grpc.infer("linear", given(name="wrong"), headers=dict(PARENT))
    (span,) = server.spans(1)
    assert span.status.status_code is StatusCode.ERROR
    assert "unexpected inference input 'wrong'" in span.status.description
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"


def test_an_ensemble(repository: Path, traced: Callable[..., Traced]) -> None:
    """Checks that the trace of an ensemble has a child span for each step, and that each step's span has the spans
    "queue" and "compute"."""
    shape = ["batch", 3]
    for name, text in {
        "relu": "",
        "both": ENSEMBLE,
    }.items():
        (repository / name / "1").mkdir(parents=True)
        if text:
            (repository / name / "config.pbtxt").write_text(text)
        else:
            graph = [node("Relu", "x", "z")]
            artifact(repository / name / "1" / "model.onnx", graph, {"x": (FLOAT, shape)}, {"z": (FLOAT, shape)})
    server = traced()
    assert server.grpc.is_model_ready("both")
    server.grpc.infer("both", given(name="image"), headers=dict(PARENT))
    spans = server.spans(1)
    (root,) = [s for s in spans if s.name == "InferRequest"]
    (both,) = by_parent(spans, root)
    first, second = by_parent(spans, both)
    assert [both.name, first.name, second.name] == ["both", "linear", "relu"]
    assert first.attributes["triton.model_version"] == "1"
    assert first.end_time <= second.end_time <= both.end_time
    for step in (first, second):
        check_model(spans, step)


class Collector:
    """An OTLP/HTTP endpoint that appends the received resource spans to ``got``."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.news = threading.Condition()
        outer = self

        class Endpoint(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                found = ExportTraceServiceRequest.FromString(body)
                with outer.news:
                    outer.got += found.resource_spans if self.path == "/v1/traces" else []
                    outer.news.notify_all()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Logs nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_an_endpoint_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the end of a server waits until OpenTelemetry gives up on its endpoint."""
    monkeypatch.setattr(tracing, "_LAST_EXPORT_SECONDS", 0.05)
    answered = threading.Event()
    provider = TracerProvider(shutdown_on_exit=False)
    for name in ("shutdown", "force_flush"):
        monkeypatch.setattr(provider, name, lambda *_: answered.wait(30))
    begun = time.monotonic()
    Tracing(provider, TraceSettings(url="http://memory", rate=0)).close()
    assert time.monotonic() - begun < 20
    answered.set()


def test_they_arrive(repository: Path, serve: Callable[..., Served]) -> None:
    """Checks that ``accel serve --trace URL`` sends all traces to an OTLP endpoint, including the last traces before
    the server ends. Also checks that a server with an unreachable endpoint still serves and ends cleanly."""
    collector = Collector()
    dead = Collector()
    dead.close()
    try:
        for url in (collector.url, dead.url):
            served = serve(str(repository), "--trace", url, "--trace-rate", "1")
            with triton.InferenceServerClient(f"127.0.0.1:{served.wait_for('serving')['ports']['grpc']}") as client:
                for _ in range(3):
                    client.infer("linear", given())
            assert served.end() == 0
            assert all("process" in line for line in served.log if line["message"] != "end of log"), served.log
    finally:
        collector.close()
    spans = [s for resource in collector.got for scope in resource.scope_spans for s in scope.spans]
    assert sorted(s.name for s in spans if s.name == "InferRequest") == ["InferRequest"] * 3
    assert sum(s.name == "compute_infer" for s in spans) == 3
    attributes = {a.key: a.value for a in collector.got[0].resource.attributes}
    assert attributes["service.name"].string_value == "accel"


def test_the_extra_is_named(repository: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that ``--trace`` without the OpenTelemetry libraries ends with a one-line error that names the extra to
    install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    ran = cli("serve", str(repository), "--grpc-port", "0", "--http-port", "0", "--trace", "http://127.0.0.1:1")
    assert ran.code == 2
    assert 'pip install "accel-toolchain[tracing]"' in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_off_it_costs_nothing(tmp_path: Path) -> None:
    """Fails if a server without ``--trace`` imports OpenTelemetry."""
    linear(tmp_path / "models" / "linear" / "1")
    code = f"""
import sys
from accel.serve.process.options import ServeOptions
from accel.serve.process.serving import ServingProcess
process = ServingProcess(ServeOptions(repository={str(tmp_path / "models")!r}, grpc_port=0, http_port=0))
process.start()
assert process.server.tracing is None
process.stop()
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"
