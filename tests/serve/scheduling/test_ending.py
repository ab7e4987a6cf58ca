"""Proves that requests that expire, fail or are canceled end correctly, and that executors close cleanly. The clock is
manual."""

from __future__ import annotations

import pytest

from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import QueuePolicy, Scheduling
from tests.support.fake_sessions import POISON, SIGNATURE, Caller, FakeSession, by_hand, request, run_all, waiting


def test_an_expired_request_never_runs() -> None:
    """Fails if a request runs after its client's deadline or its queue timeout."""
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
    assert callers[2].refused is not None, "the request was late on arrival, so it didn't wait"
    assert session.sizes == [1, 1]
    callers[3].check_rows()


def test_a_deadline_that_passes_while_the_batch_is_bisected() -> None:
    """When a batch fails, its two halves run separately. Fails if a half runs a request after the request's deadline
    has passed."""
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
    """Checks that a canceled request doesn't run, gets an answer, and cancels no other request."""
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
        caller.ticket.cancel()  # a cancel after the answer has no effect
    found = executor.statistics()
    assert (found.received, found.success.count, found.fail.count, found.cancel.count) == (5, 4, 1, 1)


def test_cancelling_during_the_batch() -> None:
    """Fails if a request that is canceled during its run is answered twice, or only after the run."""
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
    """Fails if a caller's bad row makes another caller's request fail, or if finding the bad row needs a run for each
    request."""
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
    """When a batch fails, its two halves run separately. Fails if a request that was canceled during the failed run
    runs again."""
    executor, session, clock = by_hand(waiting())
    callers = [Caller(executor, request(value)) for value in (POISON, 1, 2, 3)]

    def during() -> None:
        callers[3].ticket.cancel()

    session.during = during
    clock.now += 0.001
    run_all(executor)
    assert session.sizes == [4, 2, 1, 1, 1]
    assert [caller.code for caller in callers] == ["INTERNAL", "OK", "OK", "CANCELLED"]


def test_close_answers_what_was_taken() -> None:
    """Fails if closing drops requests that could still run, waits for the batching delay, accepts new requests, or
    leaves a session open."""
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
    """Fails if an error in one caller's answer callback breaks the instance or the other requests of the batch."""
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


def test_sessions_are_closed_when_one_does_not_open() -> None:
    """Fails if the first of two instances stays in memory when the second can't be opened."""
    opened: list[FakeSession] = []

    def open_session() -> FakeSession:
        if opened:
            raise MemoryError
        opened.append(FakeSession())
        return opened[0]

    with pytest.raises(MemoryError):
        make_executor(SIGNATURE, Scheduling(instances=2), open_session, name="m", version="1")
    assert opened[0].closed == 1
