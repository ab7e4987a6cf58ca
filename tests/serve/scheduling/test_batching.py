"""Dynamic batching, priorities, timeouts, cancelling and failing, at times that the tests set by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_sessions import POISON, SIGNATURE, Caller, FakeSession, by_hand, request, run_all

from accel.errors import BadConfig
from accel.serve.executor import make_executor
from accel.serve.inference import InferenceRequest, InferenceResponse, infer
from accel.serve.scheduling import QueuePolicy, Scheduling


def waiting(**options: Any) -> Scheduling:
    """Batches of up to 8 that are waited for 1 ms, even by an idle instance."""
    return Scheduling(**{"max_batch_size": 8, "dynamic": True, "max_delay_us": 1000, "eager": False} | options)


def test_an_idle_instance_runs_at_once() -> None:
    """Fails if the first request waits for company that need not come."""
    executor, session, _ = by_hand(waiting(eager=True))
    caller = Caller(executor, request(1))
    caller.check_rows()
    assert session.sizes == [1]
    assert infer(executor, request(2, rows=3), timeout=0).outputs["y"].shape == (3, 2)


def test_requests_gather_while_the_instance_is_busy() -> None:
    """Fails if what comes during a run is run one by one afterwards, or inside it."""
    executor, session, clock = by_hand(waiting(eager=True))
    callers: list[Caller] = []

    def during() -> None:
        if not callers:
            callers.extend(Caller(executor, request(i)) for i in range(2, 7))

    session.during = during
    Caller(executor, request(1)).check_rows()
    callers.append(Caller(executor, request(7)))  # the instance is idle, but others wait: no overtaking
    assert not executor.poll()
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [1, 6]
    for caller in callers:
        caller.check_rows()


def test_the_delay_is_that_of_the_oldest() -> None:
    """Fails if a batch is run before the oldest has waited its time, if later ones prolong it, or a full one waits."""
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
    """A queue timeout shorter than the delay. Fails if such a request always times out while waiting for company."""
    executor, _, clock = by_hand(waiting(max_delay_us=10_000, default_policy=QueuePolicy(timeout_us=2000)))
    caller = Caller(executor, request(1))
    clock.now += 0.0011
    assert executor.poll()
    caller.check_rows()


def test_preferred_sizes() -> None:
    """Fails if a preferred size that is reached is waited with, or a larger one that isn't is taken instead."""
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
        ((1, 8), [1] * 5, [8]),  # rather one padded run than five
        ((4, 8), [3, 3], [8]),
        ((2, 8), [1] * 3, [2, 2]),
        ((4,), [1], [4]),
        ((8,), [3, 3, 3], [8, 8]),
    ],
)
def test_allowed_sizes(allowed: tuple[int, ...], rows: list[int], sizes: list[int]) -> None:
    """Fails if the session is given a batch that its engine has no profile for, or padding reaches a caller."""
    executor, session, clock = by_hand(waiting(allowed=allowed))
    callers = [Caller(executor, request(10 * i, rows=n)) for i, n in enumerate(rows)]
    clock.now += 1
    run_all(executor)
    assert session.sizes == sizes
    for caller in callers:
        caller.check_rows()


def test_without_dynamic_batching_each_runs_alone() -> None:
    """Fails if requests of two callers are mixed on a model that doesn't want it."""
    executor, session, _ = by_hand(Scheduling(max_batch_size=8, eager=False))
    callers = [Caller(executor, request(i, rows=2)) for i in range(3)]
    run_all(executor)
    assert session.sizes == [2, 2, 2]
    for caller in callers:
        caller.check_rows()


def test_different_shapes_and_dtypes_are_not_mixed() -> None:
    """Fails if two requests that can't be stacked meet, or if one of another kind holds up those behind it."""
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
    """Fails if a request that can't be batched rightly gets into a batch with others, or isn't counted."""
    executor, session, _ = by_hand(waiting())
    caller = Caller(executor, InferenceRequest(model="m", inputs=inputs, outputs=outputs))
    assert caller.code == "INVALID_ARGUMENT"
    assert text in str(caller.refused)
    assert not session.runs
    found = executor.statistics()
    assert (found.received, found.fail.count, found.success.count) == (1, 1, 0)


def test_only_the_outputs_asked_for_in_their_order() -> None:
    """Fails if outputs are left in or come in the model's order."""
    executor, _, _ = by_hand(Scheduling(max_batch_size=8))
    assert list(infer(executor, request(1, outputs=("z", "y"))).outputs) == ["z", "y"]
    assert list(infer(executor, request(1, outputs=("z",))).outputs) == ["z"]


def test_an_expired_request_never_runs() -> None:
    """Fails if a request is run after its client's deadline or its queue timeout, however it got into the batch."""
    executor, session, clock = by_hand(waiting(default_policy=QueuePolicy(timeout_us=5000), eager=True))
    callers: list[Caller] = []

    def during() -> None:
        if not callers:
            callers.extend(
                [
                    Caller(executor, request(2, deadline=clock.now + 0.002)),
                    Caller(executor, request(3)),
                    Caller(executor, request(4, deadline=clock.now)),
                ]
            )
            clock.now += 0.004
            callers.append(Caller(executor, request(5)))
            clock.now += 0.001

    session.during = during
    Caller(executor, request(1))
    clock.now += 0.0005
    run_all(executor)
    assert [caller.code for caller in callers] == ["DEADLINE_EXCEEDED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "OK"]
    assert str(callers[1].answer) == "Request timeout expired"
    assert callers[2].refused is not None, "late already when it came: nothing to wait for"
    assert session.sizes == [1, 1]
    callers[3].check_rows()


def test_a_deadline_that_passes_while_the_batch_is_bisected() -> None:
    """Fails if halves are run without looking at the deadlines again."""
    executor, session, clock = by_hand(waiting())

    def during() -> None:
        clock.now += 0.01

    session.during = during
    bad = Caller(executor, request(POISON))
    late = Caller(executor, request(2, deadline=clock.now + 0.015))
    good = Caller(executor, request(3))
    clock.now += 0.001
    run_all(executor)
    assert (bad.code, late.code, good.code) == ("INTERNAL", "DEADLINE_EXCEEDED", "OK")


@pytest.mark.parametrize("k", range(5))
def test_cancelling_the_kth_of_n_runs_the_others(k: int) -> None:
    """Fails if a cancelled request is run, isn't answered, or takes another one with it."""
    executor, session, clock = by_hand(waiting())
    callers = [Caller(executor, request(i)) for i in range(5)]
    callers[k].ticket.cancel()
    assert callers[k].code == "CANCELLED"
    assert executor.statistics().queue_depth == 4
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [4]
    assert k not in session.runs[0][:, 1]
    for i, caller in enumerate(callers):
        if i != k:
            caller.check_rows()
        caller.ticket.cancel()  # after the answer: nothing happens
    found = executor.statistics()
    assert (found.received, found.success.count, found.fail.count, found.cancel.count) == (5, 4, 1, 1)


def test_cancelling_during_the_batch() -> None:
    """Fails if a request cancelled while it runs is answered twice, or later than it could be."""
    executor, session, clock = by_hand(waiting())
    callers = [Caller(executor, request(i)) for i in range(3)]
    seen = []

    def during() -> None:
        callers[1].ticket.cancel()
        seen.append(callers[1].code)

    session.during = during
    clock.now += 0.001
    run_all(executor)
    assert seen == ["CANCELLED"]
    assert [caller.code for caller in callers] == ["OK", "CANCELLED", "OK"]
    callers[2].check_rows()
    assert executor.pending() == 0


@pytest.mark.parametrize("k", range(7))
def test_one_poisonous_row_fails_alone(k: int) -> None:
    """Fails if one caller's bad row costs another caller its answer, or finding it takes a run for each request."""
    executor, session, clock = by_hand(waiting())
    callers = [Caller(executor, request(POISON if i == k else i)) for i in range(7)]
    clock.now += 0.001
    run_all(executor)
    for i, caller in enumerate(callers):
        if i == k:
            assert caller.code == "INTERNAL"
            assert str(caller.answer) == "model 'm' failed: poison"
        else:
            caller.check_rows()
    assert len(session.runs) <= 7
    found = executor.statistics()
    assert (found.success.count, found.fail.count, found.inference_count) == (6, 1, 6)
    assert sum(size * row[1].count for size, row in found.batches.items()) == 6


def test_cancelling_in_a_batch_that_fails() -> None:
    """Fails if a request that was cancelled while its batch ran is run again with its half."""
    executor, session, clock = by_hand(waiting())
    callers = [Caller(executor, request(value)) for value in (POISON, 1, 2, 3)]

    def during() -> None:
        callers[3].ticket.cancel()

    session.during = during
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [4, 2, 1, 1, 1]
    assert [caller.code for caller in callers] == ["INTERNAL", "OK", "OK", "CANCELLED"]


def test_outputs_that_cannot_be_told_apart() -> None:
    """A model that gives one row for the whole batch. Fails if a caller gets all rows, or rows of another one."""

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
    """Fails if an urgent request waits behind others, or if the bound doesn't answer at once."""
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
    """Fails if time is booked where it wasn't spent, or the counts of requests, rows and runs are mixed up."""
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
    assert (executor.pending(), found.queue_depth) == (0, 0)
    found.success.count = 99
    assert executor.statistics().success.count == 2, "a copy is handed out"


def test_answers_in_order() -> None:
    """Two instances; the first request takes longer. Fails if ``preserve_ordering`` lets a later answer overtake."""
    order: list[str] = []
    executor, session, _ = by_hand(Scheduling(max_batch_size=1, instances=2, preserve_ordering=True, eager=False))
    for i in range(3):
        executor.submit(request(i), lambda answer: order.append(getattr(answer, "id", "error")))

    def during() -> None:
        session.during = None
        assert executor.poll()  # the second one runs, and is done, while the first is still running
        assert order == []

    session.during = during
    run_all(executor)
    assert order == ["0", "1", "2"]


def test_answers_in_order_wait_for_the_one_before() -> None:
    """Fails if the second answer is given while the first caller is still taking its own."""
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


def test_close_answers_what_was_taken() -> None:
    """Fails if closing drops requests that it had time for, waits for the delay first, takes new ones, or leaves a
    session open."""
    executor, session, _ = by_hand(waiting())
    callers = [Caller(executor, request(i)) for i in range(3)]
    executor.close(0.0)
    for caller in callers:
        caller.check_rows()
    assert session.closed == 1
    assert Caller(executor, request(9)).code == "UNAVAILABLE"
    executor.close(0.0)
    assert session.closed == 1
    found = executor.statistics()
    assert found.success.count + found.fail.count == found.received == 4


def test_an_answer_that_raises_hurts_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a front end's fault takes the rest of the batch or the instance with it."""
    executor, _, clock = by_hand(waiting())

    def broken(answer: object) -> None:
        raise ValueError("the connection is gone")

    executor.submit(request(1), broken)
    caller = Caller(executor, request(2))
    clock.now += 1
    run_all(executor)
    caller.check_rows()
    assert executor.pending() == 0
    assert "could not be delivered" in caplog.text


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
    """Fails if a config that can't be followed is taken, or a session is opened for it."""
    with pytest.raises(BadConfig, match=text):
        make_executor(SIGNATURE, Scheduling(**options), lambda: pytest.fail("opened"), name="m", version="1")


def test_sessions_are_closed_when_one_does_not_open() -> None:
    """Fails if the first of two instances stays in memory when the second can't be loaded."""
    opened: list[FakeSession] = []

    def open_session() -> FakeSession:
        if opened:
            raise MemoryError
        opened.append(FakeSession())
        return opened[0]

    with pytest.raises(MemoryError):
        make_executor(SIGNATURE, Scheduling(instances=2), open_session, name="m", version="1")
    assert opened[0].closed == 1
