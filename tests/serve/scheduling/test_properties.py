"""Proves that the scheduler keeps its invariants if arrivals, cancels and failures happen at random times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.serve.scheduling.options import QueuePolicy, Scheduling
from tests.support.fake_sessions import POISON, Caller, FakeSession, by_hand, request, run_all

SCHEDULINGS = st.sampled_from(
    [
        Scheduling(max_batch_size=4, dynamic=True, max_delay_us=1000),
        Scheduling(max_batch_size=4, dynamic=True, max_delay_us=1000, eager=False),
        Scheduling(max_batch_size=8, dynamic=True, preferred=(2, 4), max_delay_us=2000, allowed=(2, 4, 8), eager=False),
        Scheduling(max_batch_size=6, dynamic=True, allowed=(4,), queue_rows=9, instances=2),
        Scheduling(max_batch_size=4, instances=2, queue_bytes=100),
        Scheduling(max_batch_size=4, dynamic=True, instances=2, preserve_ordering=True, max_delay_us=500),
        Scheduling(
            max_batch_size=5,
            dynamic=True,
            max_delay_us=1500,
            eager=False,
            priority_levels=3,
            default_priority=2,
            default_policy=QueuePolicy(timeout_us=2500, allow_override=True),
            policies={1: QueuePolicy(max_queue_size=2), 3: QueuePolicy(timeout_us=800, timeout_action="delay")},
        ),
    ]
)


@dataclass(frozen=True)
class Arrive:
    rows: int
    poison: bool
    priority: int
    timeout_us: int
    deadline: float | None


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Pass:
    seconds: float


@dataclass(frozen=True)
class Poll:
    pass


@dataclass(frozen=True)
class Inside:
    """An event that happens during the next run."""

    step: Any


STEPS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Arrive,
        rows=st.integers(1, 5),
        poison=st.sampled_from([False] * 4 + [True]),
        priority=st.integers(0, 4),
        timeout_us=st.sampled_from([0, 0, 700, 5000]),
        deadline=st.sampled_from([None, None, -0.001, 0.0015, 0.01]),
    ),
    st.builds(Cancel, st.integers(0, 40)),
    st.builds(Pass, st.sampled_from([0.0, 0.0004, 0.001, 0.003])),
    st.builds(Poll),
)
SCRIPTS = st.lists(st.one_of(STEPS, STEPS, st.builds(Inside, STEPS)), max_size=40)


@settings(max_examples=400, deadline=None)
@given(SCHEDULINGS, SCRIPTS)
def test_any_interleaving(scheduling: Scheduling, script: list[Any]) -> None:
    """Checks that each caller gets exactly one answer with the caller's rows, and that a poisonous request makes no
    other request fail. Also fails if a request runs after it was canceled, expired or refused. Also checks that each
    batch has an allowed number of rows, and that the counters add up."""
    session = FakeSession()
    executor, _, clock = by_hand(scheduling, session)
    callers: list[Caller] = []
    cancelled_before: dict[float, int] = {}  # maps a canceled request to the number of runs before the cancel
    inside: list[Any] = []
    started: list[tuple[float, set[float]]] = []

    def do(step: Any) -> None:
        if isinstance(step, Arrive):
            value = float(len(callers) + 1)
            deadline = None if step.deadline is None else clock.now + step.deadline
            asked = request(value, step.rows, priority=step.priority, timeout_us=step.timeout_us, deadline=deadline)
            if step.poison:
                asked.inputs["x"][step.rows // 2, 0] = POISON
            callers.append(caller := Caller.__new__(Caller))  # the caller must be listed before ``__init__`` runs
            caller.__init__(executor, asked)  # type: ignore[misc]
        elif isinstance(step, Cancel) and callers:
            caller = callers[step.which % len(callers)]
            ticket = getattr(caller, "ticket", None)
            if ticket is not None:
                before = caller.code
                ticket.cancel()
                if before is None and caller.code == "CANCELLED":
                    cancelled_before[float(caller.request.id)] = len(session.runs)
        elif isinstance(step, Pass):
            clock.now += step.seconds
        elif isinstance(step, Poll):
            executor.poll()
        elif isinstance(step, Inside):
            inside.append(step.step)

    def during() -> None:
        started.append((clock.now, set(session.runs[-1][:, 1].tolist())))
        while inside:
            do(inside.pop(0))

    session.during = during
    for step in script:
        do(step)
    clock.now += 0.0005
    while executor.poll() or executor.pending():
        clock.now += 0.001
    executor.close(0.0)

    sizes = sorted(scheduling.allowed or range(1, scheduling.max_batch_size + 1))
    assert all(size in sizes for size in session.sizes)
    runs_of = {
        float(i + 1): [k for k, (_, values) in enumerate(started) if i + 1 in values] for i in range(len(callers))
    }
    codes = []
    for number, caller in enumerate(callers, 1):
        assert len(caller.answers) == (caller.refused is None), "a caller gets exactly one answer or is refused"
        codes.append(caller.code)
        poisonous = (caller.request.inputs["x"] == POISON).any()
        if caller.code == "OK":
            assert not poisonous
            caller.check_rows()
        if caller.code == "INTERNAL":
            assert poisonous, "the request failed because of another request's row"
        runs = runs_of[number]
        if caller.refused is not None:
            assert not runs
        for k in runs:
            deadline = caller.request.deadline
            assert deadline is None or started[k][0] < deadline, "the request ran after its deadline"
            assert k < cancelled_before.get(float(number), len(started)), "the request ran after it was canceled"
        if not poisonous and caller.code == "OK" and not any((c.request.inputs["x"] == POISON).any() for c in callers):
            assert len(runs) == 1, "the request ran twice without a reason"
    found = executor.statistics()
    assert found.received == len(callers)
    assert found.success.count == codes.count("OK")
    assert found.fail.count == len(callers) - codes.count("OK")
    assert found.cancel.count == codes.count("CANCELLED")
    assert found.success.count == found.queue.count == found.compute_infer.count
    assert sum(size * row[0].count for size, row in found.batches.items()) == found.inference_count
    assert sum(row[0].count for row in found.batches.values()) == found.execution_count
    assert (executor.pending(), found.queue_depth) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.integers(1, 9))
def test_who_fails_does_not_depend_on_company(rows: list[int], bad: set[int], limit: int) -> None:
    """Checks that the bisection of a failed batch gives an error to the bad requests, and only to these requests."""
    executor, _, _ = by_hand(Scheduling(max_batch_size=max(limit, 4), dynamic=True, eager=False))
    callers = []
    for i, n in enumerate(rows):
        asked = request(i, n)
        if i in bad:
            asked.inputs["x"][-1] = POISON
        callers.append(Caller(executor, asked))
    run_all(executor)
    assert [caller.code == "INTERNAL" for caller in callers] == [i in bad for i in range(len(rows))]


def test_rows_are_compared_by_value() -> None:
    """Checks that the rows of different requests differ, because the other tests detect mixed-up rows by their
    values."""
    assert not np.intersect1d(request(1, 5).inputs["x"], request(2, 5).inputs["x"]).size
