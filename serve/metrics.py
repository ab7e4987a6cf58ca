"""Prometheus metrics under Triton's names, made from the exact statistics when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from accel.serve.inference import ModelStatistics
from accel.serve.peers import Row

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _microseconds(ns: int) -> float:
    return ns // 1000


_COUNTERS = {
    "nv_inference_request_success": ("Inference requests that were answered", lambda s: s.success.count),
    "nv_inference_request_failure": ("Inference requests that failed", lambda s: s.fail.count),
    "nv_inference_count": ("Inferences, a batch of n counting n", lambda s: s.inference_count),
    "nv_inference_exec_count": ("Executions of the model, a batch counting one", lambda s: s.execution_count),
    "nv_inference_request_duration_us": ("Time of requests, end to end", lambda s: _microseconds(s.success.ns)),
    "nv_inference_queue_duration_us": ("Time of requests in the queue", lambda s: _microseconds(s.queue.ns)),
    "nv_inference_compute_input_duration_us": ("Time of inputs", lambda s: _microseconds(s.compute_input.ns)),
    "nv_inference_compute_infer_duration_us": ("Time of the model", lambda s: _microseconds(s.compute_infer.ns)),
    "nv_inference_compute_output_duration_us": ("Time of outputs", lambda s: _microseconds(s.compute_output.ns)),
    "nv_cache_num_hits_per_model": ("Requests answered from the response cache", lambda s: s.cache_hit.count),
    "nv_cache_num_misses_per_model": ("Requests that the response cache didn't have", lambda s: s.cache_miss.count),
    "accel_padded_tokens": ("Tokens of padding in batches of different lengths", lambda s: s.padded_tokens),
    "accel_real_tokens": ("Tokens of the requests in batches of different lengths", lambda s: s.real_tokens),
}


def _waiting(found: ModelStatistics) -> int:
    return found.queue_depth


class _Rows(Collector):
    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _COUNTERS.items():
            yield self._metric(name, text, "counter", read)
        yield self._metric("nv_inference_pending_request_count", "Requests that wait to be run", "gauge", _waiting)

    def _metric(self, name: str, text: str, kind: str, read: object) -> Metric:
        metric = Metric(name, text, kind)
        for model, version, found in self._rows:
            labels = {"model": model, "version": version}
            metric.add_sample(name, labels, read(found))  # type: ignore[operator]
        return metric


def render(rows: list[Row]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_Rows(rows))
    # The library announces a counter as NAME_total; Triton's counters have no such ending.
    return re.sub(rb"(?m)^(# (?:HELP|TYPE) \w+)_total ", rb"\1 ", generate_latest(registry))
