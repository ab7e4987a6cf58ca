"""Proves that models share resources within their limits, take fair turns and never wait forever."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import BadConfig
from accel.serve.protocol.inference import infer
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import QueuePolicy, Scheduling
from accel.serve.scheduling.rate_limit import Gate, RateLimiter
from tests.support.fake_sessions import SIGNATURE, Caller, FakeClock, FakeSession, request, run_all


def limited(limiter: RateLimiter, session: Any, name: str = "m", need: int = 1, **options: Any) -> Any:
    """Returns an executor whose runs take ``need`` of the resource R."""
    arguments = {key: options.pop(key) for key in ("clock", "start") if key in options}
    scheduling = Scheduling(max_batch_size=4, resources={"R": need}, **options)
    return make_executor(SIGNATURE, scheduling, lambda: session, name=name, version="1", limiter=limiter, **arguments)


def gates(limiter: RateLimiter, *needs: tuple[int, int]) -> list[Gate]:
    return [
        limiter.gate({"R": need}, priority, lambda: None, name=str(number))
        for number, (need, priority) in enumerate(needs)
    ]


def test_one_runs_while_the_other_waits() -> None:
    """Fails if two models run at the same time although the resource suffices for only one model, or if the second
    model never runs."""
    limiter, clock = RateLimiter(), FakeClock(100.0)
    first, second = FakeSession(), FakeSession()
    one = limited(limiter, first, "one", clock=clock, start=False)
    two = limited(limiter, second, "two", clock=clock, start=False)
    callers: list[Caller] = []

    def during() -> None:
        callers.append(Caller(two, request(2)))
        assert not two.poll()
        clock.now += 1.0

    first.during = during
    Caller(one, request(1)).check_rows()
    assert callers[0].code is None
    run_all(two)
    callers[0].check_rows()
    assert two.statistics().queue.ns == 10**9  # a request that waits for the resource counts as pending
    one.close(0.0)
    two.close(0.0)


def test_turns_by_priority() -> None:
    """Checks that a model of priority 2 gets half as many runs as a model of priority 1. Both models always have
    waiting requests."""
    limiter = RateLimiter()
    both = gates(limiter, (1, 1), (1, 2))
    runs: Counter[int] = Counter()
    inside = 0
    assert both[inside].enter()
    for _ in range(60):
        runs[inside] += 1
        assert not both[1 - inside].enter()
        both[inside].leave(again=True)
        [inside] = [number for number in (1, 0) if both[number].enter()]
    assert 39 <= runs[0] <= 41


def test_a_large_need_is_not_starved_by_small_ones() -> None:
    """Fails if a model that needs all of a resource never runs while other models use small amounts in turn."""
    limiter = RateLimiter({"R": 2})
    large, left, right = gates(limiter, (2, 1), (1, 1), (1, 1))
    assert left.enter()
    assert right.enter()
    assert not large.enter()
    left.leave()
    assert not left.enter(), "the free units are kept for the waiting model"
    right.leave()
    assert large.enter()
    large.leave()
    assert left.enter()
    assert right.enter()


def test_other_resources_are_not_waited_for() -> None:
    """Fails if a model that needs the resource S waits for a model that needs the resource R."""
    limiter = RateLimiter()
    one = limiter.gate({"R": 1}, 1, lambda: None, name="one")
    two = limiter.gate({"R": 1}, 1, lambda: None, name="two")
    other = limiter.gate({"S": 1}, 1, lambda: None, name="other")
    assert one.enter()
    assert not two.enter()
    assert other.enter()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["enter", "leave", "withdraw"])), max_size=80))
def test_never_more_than_there_is(steps: list[tuple[int, str]]) -> None:
    """Checks that runs stay within the limit of a resource, and that a model gets the resource when no other model uses
    the resource."""
    limiter = RateLimiter({"R": 4})
    made = gates(limiter, (1, 1), (2, 1), (3, 5), (4, 2))
    inside: Counter[int] = Counter()
    for number, what in steps:
        gate = made[number]
        if what == "enter":
            inside[number] += gate.enter()
        elif what == "leave" and inside[number]:
            gate.leave()
            inside[number] -= 1
        elif what == "withdraw":
            gate.withdraw()
        assert sum(count * made[n].need["R"] for n, count in inside.items()) <= 4
    for gate in made:
        gate.withdraw()
    for number, count in inside.items():
        for _ in range(count):
            made[number].leave()
    assert made[3].enter()


def test_many_threads() -> None:
    """Fails if runs use more than the 2 units of the resource at once, or if a model hangs. The three models have two
    instances each and need 1, 1 and 2 units."""
    limiter = RateLimiter({"R": 2})
    state, used, most = threading.Lock(), [0], [0]

    class Counting(FakeSession):
        def __init__(self, need: int) -> None:
            super().__init__()
            self.need = need

        def run(self, feeds: Any) -> dict[str, np.ndarray]:
            with state:
                used[0] += self.need
                most[0] = max(most[0], used[0])
            time.sleep(0.0005)
            with state:
                used[0] -= self.need
            return {"y": feeds["x"] * 2, "z": feeds["x"].sum(axis=1)}

    models = [limited(limiter, Counting(need), f"m{need}", need, instances=2) for need in (1, 1, 2)]
    begin = threading.Barrier(9)

    def ask(thread: int) -> None:
        begin.wait(30)
        for i in range(40):
            asked = request(thread * 100 + i)
            answer = infer(models[thread % 3], asked, timeout=60)
            np.testing.assert_array_equal(answer.outputs["y"], asked.inputs["x"] * 2)

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(ask, range(9)))
    assert most[0] == 2
    for model in models:
        found = model.statistics()
        assert found.success.count == found.received == 120
        model.close(5)


def test_who_gave_up_waiting_keeps_nothing() -> None:
    """Fails if a model still blocks other models after its request expired while waiting for a resource."""
    limiter = RateLimiter()
    running, released = threading.Semaphore(0), threading.Event()
    holder = FakeSession()

    def during() -> None:
        running.release()
        released.wait(30)

    holder.during = during
    one = limited(limiter, holder, "one", eager=False)
    gone = limited(limiter, FakeSession(), "gone", default_policy=QueuePolicy(timeout_us=1000))
    last = limited(limiter, FakeSession(), "last")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(infer, one, request(1), 60)
        assert running.acquire(timeout=30)
        expired = Caller(gone, request(2))
        third = pool.submit(infer, last, request(3), 60)
        deadline = time.monotonic() + 30
        while expired.code is None or last.pending() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        released.set()
        first.result(60)
        third.result(60)
    assert expired.code == "UNAVAILABLE"
    for model in (one, gone, last):
        model.close(5)


def test_more_than_there_is() -> None:
    """Checks that a model that needs more than a resource's limit is refused, and that the model's session is closed.
    Also fails if a removed model still determines the amount of a resource."""
    limiter, session = RateLimiter({"R": 2}), FakeSession()
    with pytest.raises(BadConfig, match=r"needs 3 of the resource 'R', but the limit is 2.*--rate-limit-resource R:3"):
        limited(limiter, session, need=3)
    assert session.closed == 1
    free = RateLimiter()
    large = limited(free, FakeSession(), need=5, start=False)
    assert free._amount("R") == 5
    large.close(0.0)
    assert free._amount("R") == 0
