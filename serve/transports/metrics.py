"""Writes Prometheus metrics under Triton's names, computed from the exact statistics at each scrape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..protocol.inference import LATENCIES_NS, Histogram, ModelStatistics, StatisticsRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _microseconds(ns: int) -> float:
    return ns // 1000


_COUNTERS = {
    "nv_inference_request_success": ("Inference requests that were answered", lambda s: s.success.count),
    "nv_inference_request_failure": ("Inference requests that failed", lambda s: s.fail.count),
    "nv_inference_count": ("Inferences; a batch of n counts n", lambda s: s.inference_count),
    "nv_inference_exec_count": ("Executions of the model; a batch counts one", lambda s: s.execution_count),
    "nv_inference_request_duration_us": ("Time of requests, end to end", lambda s: _microseconds(s.success.ns)),
    "nv_inference_queue_duration_us": ("Time of requests in the queue", lambda s: _microseconds(s.queue.ns)),
    "nv_inference_compute_input_duration_us": ("Time to prepare inputs", lambda s: _microseconds(s.compute_input.ns)),
    "nv_inference_compute_infer_duration_us": (
        "Time to run the model",
        lambda s: _microseconds(s.compute_infer.ns),
    ),
    "nv_inference_compute_output_duration_us": (
        "Time to split outputs",
        lambda s: _microseconds(s.compute_output.ns),
    ),
    "nv_cache_num_hits_per_model": ("Requests answered from the response cache", lambda s: s.cache_hit.count),
    "nv_cache_num_misses_per_model": (
        "Requests that were not in the response cache",
        lambda s: s.cache_miss.count,
    ),
    "accel_padded_tokens": ("Tokens of padding in batches of different lengths", lambda s: s.padded_tokens),
    "accel_real_tokens": ("Tokens of the requests in batches of different lengths", lambda s: s.real_tokens),
}


# Maps the name of each histogram to a description and two functions. The first function returns the histogram, and the
# second function returns the sum of the counted durations in nanoseconds.
_HISTOGRAMS: dict[str, tuple[str, Callable[[ModelStatistics], Histogram], Callable[[ModelStatistics], int]]] = {
    "accel_request_duration_seconds": (
        "Time of answered requests, end to end",
        lambda s: s.request_times,
        lambda s: s.success.ns,
    ),
    "accel_queue_duration_seconds": (
        "Time of answered requests in the queue",
        lambda s: s.queue_times,
        lambda s: s.queue.ns,
    ),
    "accel_compute_duration_seconds": (
        "Time of answered requests in the model, with their inputs and outputs",
        lambda s: s.compute_times,
        lambda s: s.compute_input.ns + s.compute_infer.ns + s.compute_output.ns,
    ),
}


def _waiting(found: ModelStatistics) -> int:
    return found.queue_depth


class _Rows(Collector):
    def __init__(self, rows: list[StatisticsRow]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _COUNTERS.items():
            yield self._metric(name, text, "counter", read)
        yield self._metric("nv_inference_pending_request_count", "Requests that wait in the queue", "gauge", _waiting)

        for name, (text, histogram, total) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=["model", "version"])
            for model, version, found in self._rows:
                family.add_metric([model, version], _buckets(histogram(found)), total(found) / 1e9)
            yield family

    def _metric(self, name: str, text: str, kind: str, read: object) -> Metric:
        metric = Metric(name, text, kind)
        for model, version, found in self._rows:
            labels = {"model": model, "version": version}
            metric.add_sample(name, labels, read(found))  # type: ignore[operator]
        return metric


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns the upper bound and the count of each bucket. In Prometheus, the count of a bucket includes all smaller
    buckets."""
    ends = [floatToGoString(ns / 1e9) for ns in LATENCIES_NS] + ["+Inf"]
    return list(zip(ends, accumulate(histogram.counts), strict=True))


# What a port counts: the key in its counts, the name and the description of the metric, and its kind.
CONNECTIONS, LIMIT, ACCEPTED, REFUSED, ENDED = "connections", "limit", "accepted", "refused", "ended_"
_PORT = (
    (CONNECTIONS, "accel_grpc_connections", "Open gRPC connections", "gauge"),
    (LIMIT, "accel_grpc_connections_limit", "gRPC connections that one address may have; 0: no limit", "gauge"),
    (ACCEPTED, "accel_grpc_connections_accepted", "gRPC connections that were accepted", "counter"),
    (REFUSED, "accel_grpc_connections_refused", "gRPC connections above the limit of an address", "counter"),
)


class _Counts(Collector):
    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for key, name, text, kind in _PORT:
            if key in self._counts:
                metric = Metric(name, text, kind)
                metric.add_sample(name, {}, self._counts[key])
                yield metric
        ended = {key.removeprefix(ENDED): count for key, count in self._counts.items() if key.startswith(ENDED)}
        if ended:
            name = "accel_grpc_connections_ended"
            metric = Metric(name, "gRPC connections that were ended because they sent too many of something", "counter")
            for reason, count in ended.items():
                metric.add_sample(name, {"reason": reason}, count)
            yield metric


def render(rows: list[StatisticsRow], counts: Mapping[str, int] = MappingProxyType({})) -> bytes:
    """Returns the metrics of ``rows`` and of a port's ``counts`` in the text format that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_Rows(rows))
    registry.register(_Counts(counts))
    # The Prometheus library declares a counter as NAME_total, but the names of Triton's counters don't end in _total.
    return re.sub(rb"(?m)^(# (?:HELP|TYPE) \w+)_total ", rb"\1 ", generate_latest(registry))
