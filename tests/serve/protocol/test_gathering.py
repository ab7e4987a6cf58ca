"""Tests requests that a transport submits together: they run as one batch in the transport's thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from accel.serve.protocol.gathering import Gathering
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import Scheduling
from tests.support.fake_sessions import SIGNATURE, Caller, FakeClock, FakeSession, request

BATCHED = Scheduling(max_batch_size=8, dynamic=True)


def by_clock(scheduling: Scheduling, seconds: float) -> tuple[Any, FakeSession, FakeClock]:
    """Makes an executor whose runs take ``seconds``, and runs one request."""
    clock, session = FakeClock(100.0), FakeSession()

    def during() -> None:
        clock.now += seconds

    session.during = during
    executor = make_executor(SIGNATURE, scheduling, lambda: session, name="m", version="1", clock=clock, start=False)
    Caller(executor, request(0.0))
    session.runs.clear()
    return executor, session, clock


def together(executor: Any, count: int, **fields: Any) -> tuple[Gathering, list[Caller]]:
    gathering = Gathering(alone=count == 1)
    return gathering, [Caller(executor, request(float(k), gathering=gathering, **fields)) for k in range(count)]


def test_requests_that_arrived_together_are_one_batch() -> None:
    """Fails if gathered requests run before all are submitted, run one by one, or mix up their rows."""
    executor, session, _ = by_clock(BATCHED, 1e-4)
    gathering, callers = together(executor, 5)
    assert session.runs == []
    gathering.run()
    assert session.sizes == [5]
    for caller in callers:
        caller.check_rows()
    assert executor.statistics().success.count == 6
    gathering.run()  # does nothing
    assert session.sizes == [5]


def test_more_requests_than_a_batch() -> None:
    """Fails if the requests behind the first full batch are left."""
    executor, session, _ = by_clock(BATCHED, 1e-4)
    gathering, callers = together(executor, 19)
    gathering.run()
    assert session.sizes == [8, 8, 3]
    assert [caller.code for caller in callers] == ["OK"] * 19


def test_a_request_alone_runs_at_once() -> None:
    """Fails if the only request of a gathering takes the way through the queue."""
    executor, session, _ = by_clock(BATCHED, 1e-4)
    gathering, [caller] = together(executor, 1)
    assert session.sizes == [1]
    caller.check_rows()
    gathering.run()


@pytest.mark.parametrize("count", [1, 4])
def test_long_runs_are_left_to_the_instances(count: int) -> None:
    """Fails if the thread of a transport runs a model whose runs take long."""
    executor, session, _ = by_clock(BATCHED, 0.01)
    gathering, callers = together(executor, count)
    gathering.run()
    assert session.runs == []
    executor.poll()  # what an instance's thread does
    assert session.sizes == [count]
    assert [caller.code for caller in callers] == ["OK"] * count


def test_a_gathering_does_not_hurry_waiting_requests() -> None:
    """Fails if requests that wait for a preferred batch size run too early because others arrive together."""
    delayed = Scheduling(max_batch_size=8, dynamic=True, max_delay_us=1000, preferred=(6,))
    executor, session, clock = by_clock(delayed, 1e-4)
    waiting = Caller(executor, request(9.0, inline=False))
    gathering, callers = together(executor, 2)
    gathering.run()
    assert session.runs == []
    clock.now += 0.002
    executor.poll()
    assert session.sizes == [3]
    for caller in (waiting, *callers):
        caller.check_rows()


def test_a_gathering_that_finds_an_idle_model_does_not_wait() -> None:
    """Fails if requests that find an idle instance and an empty queue wait for further requests."""
    delayed = Scheduling(max_batch_size=8, dynamic=True, max_delay_us=1000, preferred=(6,))
    executor, session, _ = by_clock(delayed, 1e-4)
    gathering, _ = together(executor, 3)
    gathering.run()
    assert session.sizes == [3]


def test_another_thread_and_a_left_gathering() -> None:
    """Fails if a request of another thread, or one that comes after the gathering was left, waits for ``run``."""
    gathering = Gathering(alone=False)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(gathering.add(print)))
    thread.start()
    thread.join()
    started: list[int] = []
    assert gathering.add(lambda: started.append(1))
    gathering.leave()
    found.append(gathering.add(print))
    assert found == [False, False]
    gathering.run()
    assert started == [1]


def test_a_poisonous_request_in_a_gathering() -> None:
    """Fails if the error of one request reaches the others."""
    executor, _, _ = by_clock(BATCHED, 1e-4)
    gathering = Gathering(alone=False)
    callers = [Caller(executor, request(float(k), gathering=gathering)) for k in range(3)]
    callers[1].request.inputs["x"][:] = np.float32(-666.0)
    gathering.run()
    assert [caller.code for caller in callers] == ["OK", "INTERNAL", "OK"]


def test_an_interrupted_run_does_not_change_the_way() -> None:
    """Fails if one run that other work of the machine interrupts sends the next requests to another thread, or if a
    model that has become slow stays in the thread of the transport."""
    executor, session, clock = by_clock(BATCHED, 1e-4)

    def lasting(seconds: float) -> None:
        clock.now += seconds

    session.during = lambda: lasting(0.02)
    together(executor, 1)
    assert session.sizes == [1]
    session.during = lambda: lasting(1e-4)
    together(executor, 1)
    assert session.sizes == [1, 1]
    session.during = lambda: lasting(0.02)
    for _ in range(20):
        gathering, _ = together(executor, 1)
        gathering.run()
        while executor.poll():
            pass
    ran = len(session.runs)
    together(executor, 1)
    assert len(session.runs) == ran
