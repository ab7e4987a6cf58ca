"""Proves that the response cache answers only equal requests, keeps its size limit and has correct statistics."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import BadConfig
from accel.serve.protocol.inference import InferenceRequest, infer
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import Scheduling, SequenceBatching
from accel.serve.scheduling.response_cache import CachingExecutor, ResponseCache, request_digest
from tests.support.fake_sessions import POISON, SIGNATURE, Caller, FakeSession, request


def cached(cache: ResponseCache | None = None, version: str = "1") -> tuple[CachingExecutor, FakeSession]:
    session = FakeSession()
    scheduling = Scheduling(max_batch_size=8, dynamic=True, response_cache=True)
    executor = make_executor(
        SIGNATURE, scheduling, lambda: session, name="m", version=version, start=False, cache=cache
    )
    assert isinstance(executor, CachingExecutor)
    return executor, session


def test_an_equal_request_is_not_run() -> None:
    """Fails if a request that equals an earlier request runs again, gets the earlier request's id in its answer, or
    counts as an inference."""
    executor, session = cached()
    Caller(executor, request(1, rows=2)).check_rows()
    again = Caller(executor, InferenceRequest(model="m", id="1", inputs=dict(request(1, rows=2).inputs)))
    again.check_rows()
    other = infer(executor, InferenceRequest(model="m", id="other", inputs=request(1, rows=2).inputs), timeout=0)
    assert other.id == "other"
    again.ticket.cancel()
    assert session.sizes == [2]
    found = executor.statistics()
    assert (found.received, found.success.count, found.inference_count, found.execution_count) == (3, 3, 2, 1)
    assert (found.cache_hit.count, found.cache_miss.count) == (2, 1)
    assert executor.pending() == 0


@pytest.mark.parametrize(
    "other",
    [
        {"inputs": {"x": np.array([[1.0, 2.5]], np.float32)}},
        {"inputs": {"x": np.array([[1.0, 2.0]], np.float64)}},
        {"inputs": {"x": np.array([[1.0], [2.0]], np.float32)}},
        {"inputs": {"w": np.array([[1.0, 2.0]], np.float32)}},
        {"inputs": {"x": np.array([[1.0, 2.0]], np.float32)}, "outputs": ("y",)},
        {"inputs": {"x": np.array([[b"a", b"bc"]], object)}},
    ],
)
def test_what_differs(other: dict[str, Any]) -> None:
    """Fails if a request gets the cached answer of a request with other values, dtype, shape, names or outputs."""
    first = InferenceRequest(model="m", inputs={"x": np.array([[1.0, 2.0]], np.float32)})
    digests = {request_digest(one, name="m", version="1") for one in (first, InferenceRequest(model="m", **other))}
    assert len(digests) == 2
    assert request_digest(first, name="m", version="1") != request_digest(first, name="m", version="2")


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_strings_are_told_apart(left: list[bytes], right: list[bytes]) -> None:
    """Fails if the strings ("ab", "c") and ("a", "bc") count as equal."""

    def digest(items: list[bytes]) -> bytes:
        values = np.empty(len(items), object)
        values[:] = items
        return request_digest(InferenceRequest(model="m", inputs={"x": values}), name="m", version="1")

    assert (digest(left) == digest(right)) == (left == right)


def test_memory_order_does_not_matter() -> None:
    """Fails if the hash of an array view depends on the memory around the view."""
    wide = np.arange(8, dtype=np.float32).reshape(2, 4)
    plain = InferenceRequest(model="m", inputs={"x": np.ascontiguousarray(wide[:, ::2])})
    view = InferenceRequest(model="m", inputs={"x": wide[:, ::2]})
    assert request_digest(plain, name="m", version="1") == request_digest(view, name="m", version="1")


def test_a_failure_is_not_kept() -> None:
    """Fails if the cache stores the error of a failed request."""
    executor, session = cached()
    assert Caller(executor, request(POISON)).code == "INTERNAL"
    assert Caller(executor, request(POISON)).code == "INTERNAL"
    assert len(session.runs) == 2
    found = executor.statistics()
    assert (found.received, found.fail.count, found.cache_miss.count, found.cache_hit.count) == (2, 2, 2, 0)


def test_what_is_kept_cannot_be_changed() -> None:
    """Fails if a cached answer changes when the session reuses its buffers, or if a caller can change the cached
    answer."""

    class Reusing(FakeSession):
        buffer = np.zeros((1, 2), np.float32)

        def run(self, feeds: Any) -> dict[str, np.ndarray]:
            self.buffer[:] = feeds["x"]
            return {"y": self.buffer, "z": self.buffer[:, 0]}

    session = Reusing()
    scheduling = Scheduling(max_batch_size=8, response_cache=True)
    executor = make_executor(SIGNATURE, scheduling, lambda: session, name="m", version="1", start=False)
    infer(executor, request(1), timeout=0)
    infer(executor, request(2), timeout=0)
    found = infer(executor, request(1), timeout=0).outputs["y"]
    assert found.tolist() == [[1, 1]]
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 0


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 40)), max_size=60))
def test_never_more_than_its_size(steps: list[tuple[int, int]]) -> None:
    """Checks that the entry sizes add up, and that the most recently used entry isn't dropped first."""
    cache = ResponseCache(3000)
    for number, length in steps:
        key = (0, bytes([number]))
        if number % 3:
            cache.put(key, {"y": np.zeros(length * 8, np.float64)})
            fits = length * 64 + 512 <= 3000
            assert not fits or cache.get(key) is not None
        else:
            cache.get(key)
        assert cache.nbytes <= 3000
        assert cache.nbytes == sum(row[1] for row in cache._found.values())


def test_the_least_recently_used_goes() -> None:
    """Checks that a cache hit counts as a use of the entry."""
    cache = ResponseCache(2 * (512 + 8))
    for key in (b"a", b"b"):
        cache.put((0, key), {"y": np.zeros(1)})
    assert cache.get((0, b"a")) is not None
    cache.put((0, b"c"), {"y": np.zeros(1)})
    assert [cache.get((0, key)) is not None for key in (b"a", b"b", b"c")] == [True, False, True]


def test_a_reloaded_version_starts_empty() -> None:
    """Fails if a reloaded version answers with the outputs of the old weights, or if entries of an unloaded version
    stay in memory. Both versions use the same cache."""
    cache = ResponseCache(1 << 20)
    old, _ = cached(cache)
    infer(old, request(1), timeout=0)
    new, session = cached(cache)
    infer(new, request(1), timeout=0)
    assert session.sizes == [1]
    old.close(0.0)
    assert len(cache) == 1
    assert Caller(old, request(1)).code == "UNAVAILABLE", "a closed executor refuses even requests with cached answers"
    new.close(0.0)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_an_expired_request_is_not_answered_from_the_cache() -> None:
    """Fails if an expired request gets a cached answer instead of its error."""
    executor, _ = cached()
    infer(executor, request(1), timeout=0)
    assert Caller(executor, request(1, deadline=0.0)).code == "DEADLINE_EXCEEDED"


def test_many_threads() -> None:
    """Fails if simultaneous hits and misses of many callers break the counters or the sizes."""
    session = FakeSession()
    cache = ResponseCache(8000)
    scheduling = Scheduling(max_batch_size=8, dynamic=True, response_cache=True)
    executor = make_executor(SIGNATURE, scheduling, lambda: session, name="m", version="1", cache=cache)
    begin = threading.Barrier(8)

    def ask(thread: int) -> None:
        begin.wait(20)
        for i in range(80):
            asked = request((i * 7 + thread) % 20)
            np.testing.assert_array_equal(infer(executor, asked, timeout=20).outputs["y"], asked.inputs["x"] * 2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    found = executor.statistics()
    assert found.received == found.success.count == 640 == found.cache_hit.count + found.cache_miss.count
    assert cache.nbytes == sum(row[1] for row in cache._found.values()) <= 8000
    executor.close(5)


@pytest.mark.parametrize("other", [{"sequence": SequenceBatching()}, {"decoupled": True}])
def test_not_where_answers_differ(other: dict[str, Any]) -> None:
    """Fails if a stateful model may use the response cache."""
    with pytest.raises(BadConfig, match="response_cache"):
        make_executor(
            SIGNATURE, Scheduling(response_cache=True, **other), FakeSession, name="m", version="1", start=False
        )
