"""Proves that the sequences of stateful models have the right order, state and control inputs, and end correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import BadConfig
from accel.serve.protocol.inference import InferenceRequest, InferenceResponse
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import Scheduling, SequenceBatching
from accel.serve.scheduling.sequence import SequenceExecutor
from accel.signature import Feeds, Signature, TensorSpec
from tests.support.fake_sessions import Caller, FakeClock, FakeSession

COUNTING = Signature(
    (
        TensorSpec("x", "float32", ("batch", 1)),
        TensorSpec("sum_in", "float32", ("batch", 1)),
        TensorSpec("seen_in", "float32", ("batch", "past")),
        TensorSpec("start", "int32", ("batch", 1)),
        TensorSpec("id", "int64", ("batch", 1)),
    ),
    (
        TensorSpec("sum", "float32", ("batch", 1)),
        TensorSpec("sum_out", "float32", ("batch", 1)),
        TensorSpec("seen_out", "float32", ("batch", "more")),
    ),
)
SEQUENCE = SequenceBatching(
    states={"sum_out": "sum_in", "seen_out": "seen_in"},
    controls={"START": "start", "CORRID": "id"},
    max_idle_us=1_000_000,
    max_sequences=4,
)
BAD = -1.0


class Summing(FakeSession):
    """A session that returns the running sum of a sequence. A row of -1 raises."""

    def __init__(self) -> None:
        super().__init__(COUNTING)
        self.feeds: list[Feeds] = []

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self.feeds.append(dict(feeds))
        if self.during is not None:
            self.during()
        if (feeds["x"] == BAD).any():
            raise RuntimeError("bad row")
        total = feeds["sum_in"] + feeds["x"]
        return {"sum": total, "sum_out": total, "seen_out": np.concatenate([feeds["seen_in"], feeds["x"]], axis=1)}


def make(**options: Any) -> tuple[SequenceExecutor, Summing, FakeClock]:
    session, clock = Summing(), FakeClock(100.0)
    scheduling = Scheduling(**{"max_batch_size": 8, "eager": False, "sequence": SEQUENCE} | options)
    executor = make_executor(COUNTING, scheduling, lambda: session, name="m", version="1", clock=clock, start=False)
    assert isinstance(executor, SequenceExecutor)
    return executor, session, clock


def step(sequence: int | str, x: float, flags: str = "", *, rows: int = 1, name: str = "x") -> InferenceRequest:
    """Returns a request for a step. ``flags`` contains s for start and e for end."""
    return InferenceRequest(
        model="m",
        inputs={name: np.full((rows, 1), x, np.float32)},
        sequence_id=sequence,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
    )


def total(caller: Caller) -> float:
    assert isinstance(caller.answer, InferenceResponse)
    return float(caller.answer.outputs["sum"][0, 0])


def run_all(executor: SequenceExecutor) -> None:
    while executor.poll():
        pass


def test_the_state_is_kept() -> None:
    """Checks that the state of a sequence is zero at the start, never reaches another sequence, and isn't sent to the
    client. Also fails if two sequences are never batched, or if two steps of one sequence share a batch."""
    executor, session, _ = make()
    callers = [Caller(executor, step(*what)) for what in ((7, 1, "s"), (8, 10, "s"), (7, 2), (8, 20), (7, 3, "e"))]
    run_all(executor)
    assert [total(caller) for caller in callers] == [1, 10, 3, 30, 6]
    assert [len(feeds["x"]) for feeds in session.feeds] == [2, 2, 1]
    assert session.feeds[1]["start"].tolist() == [[0], [0]]
    assert session.feeds[0]["start"].tolist() == [[1], [1]]
    assert session.feeds[2]["id"].tolist() == [[7]]
    assert session.feeds[2]["seen_in"].tolist() == [[1, 2]]
    assert session.feeds[0]["seen_in"].shape == (2, 0)
    assert isinstance(callers[0].answer, InferenceResponse)
    assert list(callers[0].answer.outputs) == ["sum"]
    assert executor.sequences() == 1


def test_start_begins_anew() -> None:
    """Checks that a second START flag resets the state of the sequence."""
    executor, _, _ = make()
    callers = [Caller(executor, step(1, x, flags)) for x, flags in ((5, "s"), (6, "s"), (7, ""))]
    run_all(executor)
    assert [total(caller) for caller in callers] == [5, 6, 13]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (step(0, 1, "s"), "non-zero or non-empty correlation ID"),
        (step("", 1, "s"), "non-zero or non-empty correlation ID"),
        (step(5, 1), "must specify the START flag on the first request"),
        (step("text", 1, "s"), "correlation ID that fits"),
        (step(1 << 63, 1, "s"), "correlation ID that fits"),
        (step(1, 1, "s", rows=2), "batch-size 1"),
        (step(1, 1, "s", name="sum_in"), "not send the input 'sum_in'"),
    ],
)  # fmt: skip
def test_refused(asked: InferenceRequest, text: str) -> None:
    """Checks that a request outside any sequence doesn't run, and counts as a failure."""
    executor, session, _ = make()
    caller = Caller(executor, asked)
    assert caller.code == "INVALID_ARGUMENT"
    assert text in str(caller.refused)
    assert (executor.statistics().received, executor.statistics().fail.count) == (1, 1)
    assert not session.feeds


def test_after_the_end() -> None:
    """Fails if a sequence continues after its end, or if its state stays in memory."""
    executor, _, _ = make()
    first = Caller(executor, step(1, 1, "se"))
    assert Caller(executor, step(1, 2)).code == "INVALID_ARGUMENT", "an accepted last step ends the sequence"
    run_all(executor)
    assert first.code == "OK"
    assert executor.sequences() == 0


def test_a_silent_sequence_ends() -> None:
    """Fails if a sequence without requests lives longer than ``max_idle_us``, or if a sequence that waits for an
    instance is ended."""
    executor, _, clock = make()
    Caller(executor, step(1, 1, "s"))
    waiting = Caller(executor, step(1, 1))
    clock.now += 5
    assert executor.sequences() == 1, "it waits for us"
    run_all(executor)
    assert total(waiting) == 2
    clock.now += 0.999
    still = Caller(executor, step(1, 1))
    run_all(executor)
    assert total(still) == 3
    clock.now += 1.001
    assert Caller(executor, step(1, 1)).code == "INVALID_ARGUMENT"
    assert executor.sequences() == 0


def test_no_more_sequences_than_there_is_room_for() -> None:
    """Fails if the number of sequences has no limit, or if an idle sequence counts toward the limit forever."""
    executor, _, clock = make()
    codes = [Caller(executor, step(i, 1, "s")).code for i in range(1, 6)]
    assert codes == [None] * 4 + ["UNAVAILABLE"]
    run_all(executor)
    clock.now += 1.5
    assert Caller(executor, step(9, 1, "s")).code is None


def test_the_queue_of_steps_is_bounded() -> None:
    """Fails if the number of waiting steps in a sequence has no limit."""
    executor, _, _ = make(queue_rows=3)
    codes = [Caller(executor, step(1, 1, "s" if i == 0 else "")).code for i in range(6)]
    assert codes == [None] * 4 + ["UNAVAILABLE"] * 2, "one step is in the executor below, and three wait"


def test_bytes_that_wait_are_free_again() -> None:
    """Fails if a step that has run still counts as waiting, because the queue would then refuse every later step."""
    executor, _, _ = make(queue_bytes=60)
    for _ in range(10):
        callers = [Caller(executor, step(1, 1, "s" if i == 0 else "")) for i in range(6)]
        run_all(executor)
        assert [total(caller) for caller in callers] == [1, 2, 3, 4, 5, 6]
    codes = [Caller(executor, step(1, 1)).code for _ in range(20)]
    assert codes == [None] * 16 + ["UNAVAILABLE"] * 4, "one step is in the executor below, and fifteen of 4 bytes wait"


def test_a_failed_step_leaves_the_state() -> None:
    """Checks that a failed step doesn't change the state for the waiting steps, and that the sequence can continue
    afterwards."""
    executor, session, _ = make()
    first, bad, behind = (Caller(executor, step(1, x, f)) for x, f in ((1, "s"), (BAD, ""), (3, "")))
    other = Caller(executor, step(2, 50, "s"))
    run_all(executor)
    assert (first.code, bad.code, behind.code, other.code) == ("OK", "INTERNAL", "FAILED_PRECONDITION", "OK")
    again = Caller(executor, step(1, 2))
    run_all(executor)
    assert total(again) == 3
    found = executor.statistics()
    assert (found.received, found.success.count, found.fail.count) == (5, 3, 2)
    assert not any((feeds["x"] == 3).any() for feeds in session.feeds)


def test_a_failed_start_is_no_sequence() -> None:
    """Fails if a step runs although the start of its sequence failed. Also checks that a later request can start the
    sequence again."""
    executor, _, _ = make()
    callers = [Caller(executor, step(1, x, f)) for x, f in ((BAD, "s"), (3, "e"), (4, "s"), (5, ""))]
    run_all(executor)
    assert [caller.code for caller in callers] == ["INTERNAL", "FAILED_PRECONDITION", "OK", "OK"]
    assert total(callers[3]) == 9
    alone = Caller(executor, step(2, BAD, "s"))
    run_all(executor)
    assert alone.code == "INTERNAL"
    assert Caller(executor, step(2, 1)).code == "INVALID_ARGUMENT"


def test_cancelling_a_step() -> None:
    """Fails if a canceled step runs, if a step that waits behind the canceled step runs, or if the previous step is
    affected."""
    executor, session, _ = make()
    callers = [Caller(executor, step(1, x, f)) for x, f in ((1, "s"), (2, ""), (3, ""))]
    callers[1].ticket.cancel()
    assert (callers[1].code, callers[2].code) == ("CANCELLED", "FAILED_PRECONDITION")
    run_all(executor)
    assert total(callers[0]) == 1
    running = Caller(executor, step(1, 5))
    running.ticket.cancel()  # the inner executor has already received the step
    assert running.code == "CANCELLED"
    last = Caller(executor, step(1, 7, "e"))
    run_all(executor)
    assert total(last) == 8
    assert len(session.feeds) == 2
    assert (executor.pending(), executor.sequences()) == (0, 0)
    assert executor.statistics().cancel.count == 2


def test_a_start_that_is_cancelled_begins_nothing() -> None:
    """Checks that the next step is refused, and doesn't continue the previous sequence, if the request that starts a
    sequence is canceled while it waits."""
    executor, _, _ = make()
    first, second = (Caller(executor, step(1, x, "s")) for x in (1, 5))
    second.ticket.cancel()
    assert Caller(executor, step(1, 2)).code == "INVALID_ARGUMENT"
    run_all(executor)
    assert total(first) == 1
    assert executor.sequences() == 0


def test_a_long_sequence_in_one_go() -> None:
    """Fails if each step runs inside the callback of the previous step, which would overflow the stack. A thousand
    waiting steps run on idle instances in the caller's thread."""
    executor, session, _ = make(eager=True)
    callers: list[Caller] = []

    def during() -> None:
        session.during = None
        callers.extend(Caller(executor, step(1, 1)) for _ in range(1500))

    session.during = during
    first = Caller(executor, step(1, 1, "s"))
    run_all(executor)
    assert total(first) == 1
    assert total(callers[-1]) == 1501


def test_closing() -> None:
    """Fails if closing drops waiting steps although there is time to run the steps, or if new steps are accepted after
    closing."""
    executor, session, _ = make()
    callers = [Caller(executor, step(1, 1, "s" if i == 0 else "")) for i in range(4)]
    executor.close(0.0)
    assert [total(caller) for caller in callers] == [1, 2, 3, 4]
    assert Caller(executor, step(2, 1, "s")).code == "UNAVAILABLE"
    assert session.closed == 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.sampled_from(["", "", "", "s", "e", "se"]), st.sampled_from([1, 2, 4, BAD]),
            st.sampled_from("ssspc"),
        ),
        max_size=40,
    ),
    st.booleans(),
)  # fmt: skip
def test_any_sequences(script: list[tuple[int, str, float, str]], eager: bool) -> None:
    """Checks that each answer is the sum of the successful steps of its sequence since the start, in order. The steps,
    failures and cancels are random."""
    executor, _, _ = make(eager=eager)
    taken: dict[int, list[tuple[str, float, Caller]]] = {1: [], 2: [], 3: []}
    callers: list[Caller] = []
    for sequence, flags, x, what in script:
        if what == "p":
            executor.poll()
        elif what == "c" and callers:
            if (ticket := callers[len(script) % len(callers)].ticket) is not None:
                ticket.cancel()
        else:
            callers.append(caller := Caller(executor, step(sequence, x, flags)))
            if caller.refused is None:
                taken[sequence].append((flags, x, caller))
            else:
                assert caller.code == "INVALID_ARGUMENT"
    run_all(executor)
    for steps in taken.values():
        sum_so_far: float | None = None
        for flags, x, caller in steps:
            if "s" in flags:
                sum_so_far = None
            if caller.code == "OK":
                sum_so_far = (sum_so_far or 0.0) + x
                assert total(caller) == sum_so_far
                assert x != BAD
            else:
                assert caller.code in ("INTERNAL", "CANCELLED", "FAILED_PRECONDITION")
    codes = [caller.code for caller in callers]
    found = executor.statistics()
    assert None not in codes
    assert found.received == len(callers) == found.success.count + found.fail.count
    assert found.success.count == codes.count("OK")
    assert executor.pending() == 0


@pytest.mark.parametrize(
    ("sequence", "text"),
    [
        (SequenceBatching(states={"nope": "sum_in"}), "no output 'nope' to take a state from"),
        (SequenceBatching(states={"sum_out": "nope"}), "no input 'nope' for a state"),
        (SequenceBatching(states={"sum_out": "start"}), "dtype"),
        (SequenceBatching(controls={"STOP": "start"}), "unknown control"),
        (SequenceBatching(controls={"START": "nope"}), "no input 'nope' for a control"),
        (SequenceBatching(max_sequences=0), "at least 1"),
    ],
)
def test_options_that_cannot_be(sequence: SequenceBatching, text: str) -> None:
    """Fails if the server accepts a config that names tensors outside the model."""
    with pytest.raises(BadConfig, match=text):
        make(sequence=sequence)
