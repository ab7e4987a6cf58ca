"""Proves that the scheduler is correct with real threads. The tests wait for events instead of sleeping."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from accel.serve.protocol.inference import Executor, InferenceRequest, InferenceResponse, ServeError, infer
from accel.serve.scheduling.batcher import RowBatching
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import QueuePolicy, Scheduling, SequenceBatching
from accel.signature import Feeds, Signature, TensorSpec
from tests.support.fake_sessions import POISON, SIGNATURE, Caller, FakeSession, request

PATIENCE = 20.0


def threaded(scheduling: Scheduling, sessions: list[FakeSession]) -> Executor:
    left = iter(sessions)
    return make_executor(SIGNATURE, scheduling, lambda: next(left), name="m", version="1")


class Gate(FakeSession):
    """A session that hangs in ``run`` until the test releases the session."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.during = self._hang

    def _hang(self) -> None:
        self.entered.release()
        assert self.go.wait(PATIENCE)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_many_callers(eager: bool, preserve: bool) -> None:
    """Fails if a missing lock mixes up rows, loses or repeats an answer, or breaks the counters. The test uses 16
    threads and three instances, with poisonous requests and cancels."""
    sessions = [FakeSession() for _ in range(3)]
    scheduling = Scheduling(
        max_batch_size=8, dynamic=True, instances=3, max_delay_us=200, allowed=(1, 4, 8), eager=eager,
        preserve_ordering=preserve,
    )  # fmt: skip
    executor = threaded(scheduling, sessions)

    def ask(thread: int) -> list[Caller]:
        found = []
        for i in range(60):
            value = float(thread * 1000 + i)
            asked = request(value, rows=1 + i % 3)
            if i % 17 == 5:
                asked.inputs["x"][0, 0] = POISON
            caller = Caller(executor, asked)
            if i % 7 == 3:
                caller.ticket.cancel()
            found.append(caller)
        return found

    with ThreadPoolExecutor(16) as pool:
        callers = [caller for group in pool.map(ask, range(16)) for caller in group]
    executor.close(PATIENCE)
    for caller in callers:
        if caller.code == "OK":
            caller.check_rows()
        else:
            poisonous = (caller.request.inputs["x"] == POISON).any()
            assert caller.code == "CANCELLED" or (caller.code == "INTERNAL" and poisonous)
    codes = [caller.code for caller in callers]
    found = executor.statistics()
    assert found.received == len(callers) == found.success.count + found.fail.count
    assert found.success.count == codes.count("OK")
    assert found.cancel.count == codes.count("CANCELLED")
    assert all(size in (1, 4, 8) for session in sessions for size in session.sizes)
    assert [session.closed for session in sessions] == [1, 1, 1]


def test_the_caller_itself_runs_an_idle_instance() -> None:
    """Checks that a single request to an idle instance runs on the caller's thread."""
    session = FakeSession()
    seen = []
    session.during = lambda: seen.append(threading.current_thread())
    executor = threaded(Scheduling(max_batch_size=4, dynamic=True, max_delay_us=10**7), [session])
    assert infer(executor, request(1), timeout=PATIENCE).outputs["y"][0, 0] == 2
    assert seen == [threading.current_thread()]
    executor.close(PATIENCE)


def test_waiting_requests_are_taken_when_an_instance_is_free() -> None:
    """Checks that the requests waiting during a run are executed together after the run."""
    gate = Gate()
    executor = threaded(Scheduling(max_batch_size=4, dynamic=True), [gate])
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(infer, executor, request(i), PATIENCE) for i in range(4)]
        assert gate.entered.acquire(timeout=PATIENCE)
        while executor.pending() < 4:
            time.sleep(0)
        gate.go.set()
        for i, answer in enumerate(answers):
            np.testing.assert_array_equal(answer.result(PATIENCE).outputs["y"], [[2 * i, 2 * i]])
    assert gate.sizes == [1, 3]
    executor.close(PATIENCE)


def test_a_delay_ends_by_itself() -> None:
    """Checks that a request runs at the end of the batching delay."""
    executor = threaded(Scheduling(max_batch_size=4, dynamic=True, max_delay_us=2000, eager=False), [FakeSession()])
    assert isinstance(infer(executor, request(1), PATIENCE), InferenceResponse)
    executor.close(PATIENCE)


def test_closing_ends_a_delay() -> None:
    """Fails if requests still wait for the batching delay after closing."""
    looked: list[threading.Thread] = []

    def clock() -> float:
        looked.append(threading.current_thread())
        return time.monotonic()

    scheduling = Scheduling(max_batch_size=4, dynamic=True, max_delay_us=10**9, eager=False)
    executor = make_executor(SIGNATURE, scheduling, FakeSession, name="m", version="1", clock=clock)
    caller = Caller(executor, request(1))
    until = time.monotonic() + PATIENCE
    while threading.current_thread() in looked[-1:] and time.monotonic() < until:
        time.sleep(0)  # waits until the instance's thread sleeps
    executor.close(5.0)
    caller.check_rows()


def test_time_runs_out_while_all_instances_hang() -> None:
    """Fails if a queue timeout or a deadline takes effect only when an instance becomes idle."""
    gate = Gate()
    executor = threaded(Scheduling(max_batch_size=4, default_policy=QueuePolicy(timeout_us=1000)), [gate])
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(infer, executor, request(1), PATIENCE)
        assert gate.entered.acquire(timeout=PATIENCE)
        with pytest.raises(ServeError, match="Request timeout expired"):
            infer(executor, request(2), PATIENCE)
        with pytest.raises(ServeError, match="Deadline"):
            infer(executor, request(3, deadline=time.monotonic() + 0.0005), PATIENCE)
        gate.go.set()
        assert hanging.result(PATIENCE).outputs["y"][0, 0] == 2
    assert gate.sizes == [1]
    executor.close(PATIENCE)


def test_closing_a_session_that_hangs() -> None:
    """Fails if closing waits for a session that never returns, or closes a session during its run. Also checks that
    each caller gets exactly one answer, even after the hung session returns."""
    gate = Gate()
    executor = threaded(Scheduling(max_batch_size=4, dynamic=True, eager=False), [gate])
    running = Caller(executor, request(1))
    assert gate.entered.acquire(timeout=PATIENCE)
    queued = Caller(executor, request(2))
    before = time.monotonic()
    executor.close(0.05)
    assert time.monotonic() - before < PATIENCE / 2
    assert (running.code, queued.code) == ("UNAVAILABLE", "UNAVAILABLE")
    assert gate.closed == 0
    gate.go.set()
    until = time.monotonic() + PATIENCE
    while not gate.closed and time.monotonic() < until:
        time.sleep(0)
    assert gate.closed == 1
    assert (len(running.answers), len(queued.answers)) == (1, 1)
    found = executor.statistics()
    assert (found.received, found.fail.count, found.success.count) == (2, 2, 0)
    assert gate.sizes == [1]


def test_a_queue_that_is_full_answers_at_once() -> None:
    """Fails if a queue grows beyond its size limit while the session hangs."""
    gate = Gate()
    executor = threaded(Scheduling(max_batch_size=1, queue_rows=3, eager=False), [gate])
    callers = [Caller(executor, request(0))]
    assert gate.entered.acquire(timeout=PATIENCE)
    callers += [Caller(executor, request(i)) for i in range(1, 6)]
    assert [caller.code for caller in callers] == [None] * 4 + ["UNAVAILABLE"] * 2
    gate.go.set()
    executor.close(PATIENCE)
    assert [caller.code for caller in callers] == ["OK"] * 4 + ["UNAVAILABLE"] * 2


def test_sequences_from_many_threads() -> None:
    """Fails if two steps of a sequence run at once, if a state is lost between threads, or if a sequence stops. Each of
    eight callers sends the steps of one sequence without waiting for answers."""

    class Adding(FakeSession):
        def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
            return {"total": feeds["before"] + feeds["x"]}

    signature = Signature(
        (TensorSpec("x", "float32", ("batch", 1)), TensorSpec("before", "float32", ("batch", 1))),
        (TensorSpec("total", "float32", ("batch", 1)),),
    )
    scheduling = Scheduling(
        max_batch_size=4, dynamic=True, instances=2, sequence=SequenceBatching(states={"total": "before"})
    )
    executor = make_executor(signature, scheduling, Adding, name="m", version="1")

    def ask(thread: int) -> list[float]:
        found: list[float] = []
        last = threading.Event()

        def answer(result: InferenceResponse | ServeError) -> None:
            assert isinstance(result, InferenceResponse)
            found.append(float(result.outputs["total"][0, 0]))
            if len(found) == 100:
                last.set()

        for i in range(100):
            asked = InferenceRequest(
                model="m",
                inputs={"x": np.full((1, 1), thread, np.float32)},
                outputs=("total",),
                sequence_id=thread,
                sequence_start=i == 0,
                sequence_end=i == 99,
            )
            executor.submit(asked, answer)
        assert last.wait(PATIENCE)
        return found

    with ThreadPoolExecutor(8) as pool:
        for thread, found in zip(range(1, 9), pool.map(ask, range(1, 9)), strict=True):
            assert found == [thread * (i + 1) for i in range(100)]
    executor.close(PATIENCE)
    counted = executor.statistics()
    assert counted.success.count == counted.received == 800


def test_closing_runs_the_steps_that_wait() -> None:
    """Fails if closing drops the steps behind a running step although there is time to run the steps."""
    gate = Gate()
    executor = threaded(Scheduling(max_batch_size=1, sequence=SequenceBatching(), eager=False), [gate])
    asked = [request(i, sequence_id=1, sequence_start=i == 0) for i in range(5)]
    callers = [Caller(executor, one) for one in asked]
    assert gate.entered.acquire(timeout=PATIENCE)
    closing = threading.Thread(target=executor.close, args=(PATIENCE,))
    closing.start()
    while Caller(executor, request(9, sequence_id=2, sequence_start=True)).code != "UNAVAILABLE":
        time.sleep(0)
    gate.go.set()
    closing.join(PATIENCE)
    assert [caller.code for caller in callers] == ["OK"] * 5


def test_a_fault_of_the_servers_own_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an exception in the batching code ends the instance's thread, so that all callers wait forever."""
    executor = threaded(Scheduling(max_batch_size=4, dynamic=True, eager=False), [FakeSession()])

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(RowBatching, "choose", broken)
        with pytest.raises(ServeError, match="a bug") as caught:
            infer(executor, request(1), PATIENCE)
        assert caught.value.code.name == "INTERNAL"
    assert infer(executor, request(2), PATIENCE).outputs["y"][0, 0] == 4
    executor.close(PATIENCE)
