"""Proves that the queue keeps the order of requests, its size limits and its timeouts. The queue has no thread of its
own, so each test passes the time as an argument."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.serve.protocol.inference import InferenceRequest, ServeError
from accel.serve.scheduling.options import QueuePolicy, Scheduling
from accel.serve.scheduling.queue import NEVER, Entry, RequestQueue
from tests.support.fake_sessions import request


def entry(value: float, *, rows: int = 1, at: float = 0.0, **fields: object) -> Entry:
    return Entry(request(value, rows, **fields), lambda _: None, rows=rows, arrived=at)


def ids(queue: RequestQueue) -> list[str]:
    return [e.request.id for e in queue]


def test_levels_then_arrival() -> None:
    """Checks that a more urgent level runs first, and that requests of the same level run in the order of their
    arrival."""
    queue = RequestQueue(Scheduling(priority_levels=3, default_priority=2))
    for value, priority in ((1, 3), (2, 0), (3, 1), (4, 2), (5, 1), (6, 99)):
        queue.put(entry(value, priority=priority))
    # The model has the priority levels 1 to 3. As in Triton, a request with priority 0 or 99 gets the default level.
    assert ids(queue) == ["3", "5", "2", "4", "6", "1"]


def test_priority_means_nothing_without_levels() -> None:
    """Fails if a request's priority has an effect although the model has no priority levels."""
    queue = RequestQueue(Scheduling())
    for value, priority in ((1, 0), (2, 1), (3, 7)):
        queue.put(entry(value, priority=priority))
    assert ids(queue) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("scheduling", "fits"),
    [
        (Scheduling(queue_rows=5), 2),
        (Scheduling(queue_bytes=40), 2),  # 2 rows of 2 float32 values take 16 bytes
        (Scheduling(default_policy=QueuePolicy(max_queue_size=3)), 3),
        (Scheduling(queue_rows=0, queue_bytes=0), 50),
    ],
)
def test_bounds(scheduling: Scheduling, fits: int) -> None:
    """Fails if a size limit is off by one or ignored, or if a removed request still counts toward the limit."""
    queue = RequestQueue(scheduling)
    taken = [entry(i, rows=2) for i in range(fits)]
    for one in taken:
        queue.put(one)
    if fits < 50:
        with pytest.raises(ServeError, match=r"^Exceeds maximum queue size$") as caught:
            queue.put(entry(99, rows=2))
        assert caught.value.code.name == "UNAVAILABLE"
        queue.remove(taken[0])
        queue.put(entry(99, rows=2))
    assert len(queue) == fits


def test_strings_count_by_their_length() -> None:
    """Checks that the queue counts the bytes of a tensor's strings, not the eight bytes of each pointer."""
    queue = RequestQueue(Scheduling(queue_bytes=1000))
    text = InferenceRequest(model="m", inputs={"t": np.array([b"a" * 2000], dtype=object)})
    with pytest.raises(ServeError, match="Exceeds maximum"):
        queue.put(Entry(text, lambda _: None, rows=1, arrived=0.0))


def test_a_bound_for_each_level() -> None:
    """Fails if a full priority level makes the queue refuse requests of another level."""
    queue = RequestQueue(Scheduling(priority_levels=2, default_priority=1, policies={2: QueuePolicy(max_queue_size=1)}))
    queue.put(entry(1, priority=2))
    queue.put(entry(2, priority=1))
    with pytest.raises(ServeError):
        queue.put(entry(3, priority=2))


def test_timeout_rejects_or_delays() -> None:
    """Fails if the timeout action ``delay`` drops a timed-out request, or runs the request before requests that haven't
    timed out. Also fails if ``reject`` keeps a timed-out request."""
    policies = {
        1: QueuePolicy(timeout_us=1000, timeout_action="delay"),
        2: QueuePolicy(timeout_us=1000, timeout_action="reject"),
    }
    queue = RequestQueue(Scheduling(priority_levels=2, default_priority=1, policies=policies))
    queue.put(entry(1, priority=1, at=0.0))
    queue.put(entry(2, priority=2, at=0.0))
    queue.put(entry(3, priority=1, at=0.0005))
    assert queue.next_instant() == 0.001
    assert queue.expire(0.0009) == []
    expired = queue.expire(0.001)
    assert [(e.request.id, str(error)) for e, error in expired] == [("2", "Request timeout expired")]
    assert expired[0][1].code.name == "UNAVAILABLE"
    assert ids(queue) == ["3", "1"]
    assert queue.expire(9.0) == []
    assert queue.next_instant() == NEVER


def test_only_a_shorter_timeout_may_be_asked_for() -> None:
    """Checks that the policy's timeout applies if the request's own timeout is longer, or if the policy forbids
    timeouts in requests."""
    for override, asked, expires in ((True, 500, 0.0005), (True, 5000, 0.001), (False, 500, 0.001), (True, 0, 0.001)):
        policy = QueuePolicy(timeout_us=1000, allow_override=override)
        queue = RequestQueue(Scheduling(default_policy=policy))
        queue.put(entry(1, timeout_us=asked))
        assert queue.next_instant() == expires


def test_deadline_of_a_delayed_request() -> None:
    """Fails if a delayed request stays in the queue after its client's deadline."""
    queue = RequestQueue(Scheduling(default_policy=QueuePolicy(timeout_us=1000, timeout_action="delay")))
    queue.put(entry(1, deadline=0.005))
    assert queue.expire(0.002) == []
    [(_, error)] = queue.expire(0.005)
    assert error.code.name == "DEADLINE_EXCEEDED"
    assert not queue


def test_instants_of_those_that_left_are_forgotten() -> None:
    """Fails if a request that has left the queue stays in memory until its deadline."""
    queue = RequestQueue(Scheduling())
    for i in range(5000):
        one = entry(i, deadline=60.0)
        queue.put(one)
        queue.remove(one)
        queue.next_instant()
    assert len(queue._instants) < 100


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.floats(0, 1), st.sampled_from("pret"))))
def test_rows_and_bytes_add_up(steps: list[tuple[int, int, float, str]]) -> None:
    """Fails if the queue's sums of rows and bytes differ from the sums over the waiting requests. Requests leave the
    queue in every possible way."""
    queue = RequestQueue(
        Scheduling(
            priority_levels=3,
            default_priority=2,
            queue_rows=40,
            policies={1: QueuePolicy(timeout_us=200_000), 2: QueuePolicy(timeout_us=300_000, timeout_action="delay")},
        )
    )
    now = 0.0
    for priority, rows, seconds, what in steps:
        now += seconds / 10
        if what == "e":
            queue.expire(now)
        elif what == "r" and queue:
            queue.remove(list(queue)[rows % len(queue)])
        elif what in "pt":
            try:
                queue.put(entry(1, rows=rows, at=now, priority=priority, deadline=now + 1 if what == "t" else None))
            except ServeError:
                assert queue.rows + rows > 40
        waiting = list(queue)
        assert len(waiting) == len(queue)
        assert queue.rows == sum(e.rows for e in waiting)
        assert queue.nbytes == sum(value.nbytes for e in waiting for value in e.request.inputs.values())
        assert queue.next_instant() > now or not queue or what != "e"
