"""Proves the rules, bounds and priorities of dynamic batching. The tests set the clock by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accel.errors import BadConfig
from accel.serve.protocol.inference import LATENCIES_NS, InferenceRequest, InferenceResponse, infer
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import QueuePolicy, Scheduling
from tests.support.fake_sessions import SIGNATURE, Caller, FakeSession, by_hand, request, run_all, waiting


def test_an_idle_instance_runs_at_once() -> None:
    """Fails if the first request waits for more requests although an instance is idle."""
    executor, session, _ = by_hand(waiting(eager=True))
    caller = Caller(executor, request(1))
    caller.check_rows()
    assert session.sizes == [1]
    assert infer(executor, request(2, rows=3), timeout=0).outputs["y"].shape == (3, 2)


def test_requests_gather_while_the_instance_is_busy() -> None:
    """Fails if requests that arrive during a run join this run, or run one by one afterwards."""
    executor, session, clock = by_hand(waiting(eager=True))
    callers: list[Caller] = []

    def during() -> None:
        if not callers:
            callers.extend(Caller(executor, request(i)) for i in range(2, 7))

    session.during = during
    Caller(executor, request(1)).check_rows()
    callers.append(Caller(executor, request(7)))  # this request must not overtake the waiting requests
    assert not executor.poll()
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [1, 6]
    for caller in callers:
        caller.check_rows()


def test_the_delay_is_that_of_the_oldest() -> None:
    """Fails if a batch that isn't full runs before its oldest request has waited for the whole batching delay. Also
    fails if later requests extend the delay, or if a full batch waits."""
    executor, session, clock = by_hand(waiting())
    first = Caller(executor, request(1))
    clock.now += 0.0009
    second = Caller(executor, request(2))
    assert not executor.poll()
    clock.now += 0.0001
    assert executor.poll()
    assert session.sizes == [2]
    first.check_rows()
    second.check_rows()
    full = [Caller(executor, request(i)) for i in range(9)]
    run_all(executor)
    assert session.sizes == [2, 8]
    assert [caller.code for caller in full] == ["OK"] * 8 + [None]


def test_a_limit_of_its_own_is_not_waited_away() -> None:
    """Checks that a request runs before its queue timeout, even if the queue timeout is shorter than the batching
    delay."""
    executor, _, clock = by_hand(waiting(max_delay_us=10_000, default_policy=QueuePolicy(timeout_us=2000)))
    caller = Caller(executor, request(1))
    clock.now += 0.0011
    assert executor.poll()
    caller.check_rows()


def test_preferred_sizes() -> None:
    """Fails if a batch of a preferred size waits, or if a larger batch of another size runs instead."""
    executor, session, clock = by_hand(waiting(preferred=(2, 4)))
    for i in range(7):
        Caller(executor, request(i))
    run_all(executor)
    assert session.sizes == [4, 2]
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [4, 2, 1]


@pytest.mark.parametrize(
    ("allowed", "rows", "sizes"),
    [
        ((1, 4, 8), [1] * 5, [4, 1]),
        ((1, 8), [1] * 5, [8]),  # one padded run costs less than five runs
        ((4, 8), [3, 3], [8]),
        ((2, 8), [1] * 3, [2, 2]),
        ((4,), [1], [4]),
        ((8,), [3, 3, 3], [8, 8]),
    ],
)
def test_allowed_sizes(allowed: tuple[int, ...], rows: list[int], sizes: list[int]) -> None:
    """Checks that the session gets only allowed batch sizes, and that no caller gets padding."""
    executor, session, clock = by_hand(waiting(allowed=allowed))
    callers = [Caller(executor, request(10 * i, rows=n)) for i, n in enumerate(rows)]
    clock.now += 1
    run_all(executor)
    assert session.sizes == sizes
    for caller in callers:
        caller.check_rows()


def test_without_dynamic_batching_each_runs_alone() -> None:
    """Fails if requests of two callers run together although dynamic batching is off."""
    executor, session, _ = by_hand(Scheduling(max_batch_size=8, eager=False))
    callers = [Caller(executor, request(i, rows=2)) for i in range(3)]
    run_all(executor)
    assert session.sizes == [2, 2, 2]
    for caller in callers:
        caller.check_rows()


def test_different_shapes_and_dtypes_are_not_mixed() -> None:
    """Fails if two requests that can't be stacked share a batch, or if a request of another shape blocks later
    requests."""
    executor, session, clock = by_hand(waiting())
    wide = [
        Caller(executor, InferenceRequest(model="m", inputs={"x": np.full((1, n), v, "float32")}))
        for v, n in ((1, 2), (2, 3), (3, 2), (4, 3))
    ]
    clock.now += 1
    run_all(executor)
    assert [rows.shape for rows in session.runs] == [(2, 2), (2, 3)]
    assert [caller.code for caller in wide] == ["OK"] * 4


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({"x": np.zeros((9, 2), "float32")}, None, "batch-size must be <= 8"),
        ({"x": np.zeros((0, 2), "float32")}, None, "batch dim"),
        ({"x": np.float32(1)[()] * np.ones(())}, None, "batch dim"),
        ({"x": np.zeros((2, 2)), "w": np.zeros((1, 2))}, None, "does not match"),
        ({"x": np.zeros((1, 2), "float32")}, ("nope",), "unexpected inference output 'nope'"),
    ],
)
def test_refused_at_once(inputs: dict[str, np.ndarray], outputs: tuple[str, ...] | None, text: str) -> None:
    """Checks that a request that can't be batched runs alone, and that the statistics count the request."""
    executor, session, _ = by_hand(waiting())
    caller = Caller(executor, InferenceRequest(model="m", inputs=inputs, outputs=outputs))
    assert caller.code == "INVALID_ARGUMENT"
    assert text in str(caller.refused)
    assert not session.runs
    found = executor.statistics()
    assert (found.received, found.fail.count, found.success.count) == (1, 1, 0)


def test_only_the_outputs_asked_for_in_their_order() -> None:
    """Fails if an output that wasn't requested is returned, or if the outputs come in the model's order instead of the
    requested order."""
    executor, _, _ = by_hand(Scheduling(max_batch_size=8))
    assert list(infer(executor, request(1, outputs=("z", "y"))).outputs) == ["z", "y"]
    assert list(infer(executor, request(1, outputs=("z",))).outputs) == ["z"]


def test_outputs_that_cannot_be_told_apart() -> None:
    """Fails if a caller gets all rows, or another caller's rows, from a model that returns a single row for the whole
    batch."""

    class Summing(FakeSession):
        def run(self, feeds: Any) -> dict[str, np.ndarray]:
            super().run(feeds)
            return {"y": feeds["x"].sum(axis=0, keepdims=True)}

    executor, session, clock = by_hand(waiting(), Summing())
    callers = [Caller(executor, request(i)) for i in range(3)]
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [3, 1, 2, 1, 1]
    for i, caller in enumerate(callers):
        assert isinstance(caller.answer, InferenceResponse)
        np.testing.assert_array_equal(caller.answer.outputs["y"], [[i, i]])


def test_priorities_and_their_bounds() -> None:
    """Checks that an urgent request doesn't wait behind others, and that a request above the queue's size limit is
    refused immediately."""
    executor, session, _ = by_hand(
        Scheduling(
            max_batch_size=1,
            eager=False,
            priority_levels=2,
            default_priority=2,
            policies={2: QueuePolicy(max_queue_size=2)},
        )
    )
    callers = [Caller(executor, request(i, priority=p)) for i, p in ((1, 2), (2, 0), (3, 2), (4, 1))]
    assert [caller.code for caller in callers] == [None, None, "UNAVAILABLE", None]
    run_all(executor)
    assert [rows[0, 1] for rows in session.runs] == [4, 1, 2]
    assert executor.statistics().received == 4


def test_statistics_of_a_batch() -> None:
    """Fails if the statistics add a time to the wrong duration, or mix up the numbers of requests, rows and runs."""
    executor, session, clock = by_hand(waiting())

    def during() -> None:
        clock.now += 0.25

    session.during = during
    callers = [Caller(executor, request(1, rows=2)), Caller(executor, request(2))]
    assert executor.pending() == 2
    assert executor.statistics().queue_depth == 2
    clock.now += 0.5
    run_all(executor)
    found = executor.statistics()
    assert (found.inference_count, found.execution_count, found.last_inference_ms) == (3, 1, 5000)
    assert (found.queue.count, found.queue.ns) == (2, 10**9)
    assert (found.compute_infer.count, found.compute_infer.ns) == (2, 5 * 10**8)
    assert (found.success.count, found.success.ns) == (2, 15 * 10**8)
    assert list(found.batches) == [3]
    assert (found.batches[3][1].count, found.batches[3][1].ns) == (1, 25 * 10**7)
    assert callers[0].ticket.durations.total == 75 * 10**7
    bounds = {"request_times": 10**9, "queue_times": 5 * 10**8, "compute_times": 25 * 10**7}  # 0.75, 0.5 and 0.25 s
    for name, bound in bounds.items():
        counts = getattr(found, name).counts
        assert counts[LATENCIES_NS.index(bound)] == sum(counts) == 2, name
    assert (executor.pending(), found.queue_depth) == (0, 0)
    found.success.count = 99
    assert executor.statistics().success.count == 2, "a copy is handed out"


def test_answers_in_order() -> None:
    """Fails if a later answer is sent first despite ``preserve_ordering``. The first request runs longer than the
    second, on another instance."""
    order: list[str] = []
    executor, session, _ = by_hand(Scheduling(max_batch_size=1, instances=2, preserve_ordering=True, eager=False))
    for i in range(3):
        executor.submit(request(i), lambda answer: order.append(getattr(answer, "id", "error")))

    def during() -> None:
        session.during = None
        assert executor.poll()  # the second request runs and ends during the first run
        assert order == []

    session.during = during
    run_all(executor)
    assert order == ["0", "1", "2"]


def test_answers_in_order_wait_for_the_one_before() -> None:
    """Fails if the second answer is sent while the callback of the first answer is still running."""
    executor, _, _ = by_hand(Scheduling(max_batch_size=1, preserve_ordering=True, eager=False))
    seen: list[str] = []

    def first(answer: object) -> None:
        seen.append("first begins")
        assert executor.poll()
        seen.append("first ends")

    executor.submit(request(1), first)
    executor.submit(request(2), lambda _: seen.append("second"))
    run_all(executor)
    assert seen == ["first begins", "first ends", "second"]
    executor.close(0.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dynamic": True}, "max_batch_size"),
        ({"max_batch_size": 4, "preferred": (8,)}, "preferred"),
        ({"max_batch_size": 4, "allowed": (8,)}, "allowed"),
        ({"instances": 0}, "instance"),
        ({"priority_levels": 2}, "default priority"),
        ({"priority_levels": 2, "default_priority": 1, "policies": {3: QueuePolicy()}}, "level 3"),
        ({"priority_levels": 2, "default_priority": 1, "preserve_ordering": True}, "contradict"),
        ({"default_policy": QueuePolicy(timeout_action="wait")}, "neither reject nor delay"),
        ({"max_delay_us": -1}, "negative"),
        ({"priority_levels": 1 << 60, "default_priority": 1}, "priority levels"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], text: str) -> None:
    """Fails if contradictory options are accepted, or if a session is opened for contradictory options."""
    with pytest.raises(BadConfig, match=text):
        make_executor(SIGNATURE, Scheduling(**options), lambda: pytest.fail("opened"), name="m", version="1")
