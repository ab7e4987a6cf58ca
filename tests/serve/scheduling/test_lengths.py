"""Proves that batching by length chooses cheap batches and that padding changes no result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.artifact import Artifact
from accel.errors import BadConfig
from accel.runtimes.base import SessionOptions, get_runtime
from accel.serve.protocol.inference import InferenceRequest, InferenceResponse
from accel.serve.scheduling.cost_table import CostTable
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.instances import QueuedExecutor
from accel.serve.scheduling.lengths import best_cut
from accel.serve.scheduling.options import LengthBatching, Scheduling
from accel.signature import Feeds
from tests.serve.scheduling.fake_texts import LENGTHS, TEXT, TextSession, check, text
from tests.support.fake_sessions import Caller, FakeClock, run_all

COSTS = CostTable.proportional(4)


def by_length(**options: Any) -> tuple[QueuedExecutor, TextSession, FakeClock]:
    session, clock = TextSession(), FakeClock(100.0)
    scheduling = Scheduling(**{"max_batch_size": 8, "dynamic": True, "eager": False, "lengths": LENGTHS} | options)
    executor = make_executor(
        TEXT, scheduling, lambda: session, name="m", version="1", clock=clock, start=False, costs=COSTS
    )
    assert isinstance(executor, QueuedExecutor)
    return executor, session, clock


def all_cuts(count: int) -> list[list[tuple[int, int]]]:
    found = []
    for inner in itertools.product([False, True], repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(inner) if cut] + [count]
        found.append(list(zip([0, *ends[:-1]], ends, strict=True)))
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=8),
    st.integers(3, 8),
    st.integers(0, 200),
)
def test_no_cut_is_cheaper(requests: list[tuple[int, int]], limit: int, overhead: int) -> None:
    """Fails if the dynamic programming misses the cheapest split into batches, or makes a batch too large."""
    requests.sort()
    lengths, rows = [r[0] for r in requests], [r[1] for r in requests]
    table = CostTable.proportional(overhead)

    def cost(cut: Sequence[tuple[int, int]]) -> float:
        return sum(float(table.by_rows(lengths[end - 1], limit)[sum(rows[begin:end])]) for begin, end in cut)

    fits = [cut for cut in all_cuts(len(rows)) if all(sum(rows[b:e]) <= limit for b, e in cut)]
    found = best_cut(lengths, rows, limit, lambda length: table.by_rows(length, limit))
    assert found in fits
    assert cost(found) == pytest.approx(min(map(cost, fits)))


def test_short_ones_are_not_padded_to_a_long_one() -> None:
    """Fails if short requests are padded to the length of a long request, or if a result changes. Also checks that the
    longest-waiting request is in the first batch."""
    executor, session, _ = by_length()
    callers = [Caller(executor, text(i, n)) for i, n in enumerate((50, 3, 4, 49, 3, 2))]
    run_all(executor)
    assert session.shapes == [(2, 50), (4, 4)]
    for caller in callers:
        check(caller)
    found = executor.statistics()
    assert (found.real_tokens, found.padded_tokens) == (111, 1 + 4)


def test_a_dear_run_is_shared() -> None:
    """Fails if the scheduler splits requests into many runs although a single padded run costs less."""
    session = TextSession()
    scheduling = Scheduling(max_batch_size=8, dynamic=True, eager=False, lengths=LENGTHS)
    executor = make_executor(
        TEXT, scheduling, lambda: session, name="m", version="1", start=False, costs=CostTable.proportional(1000)
    )
    callers = [Caller(executor, text(i, n)) for i, n in enumerate((50, 3, 4, 49, 3, 2))]
    assert isinstance(executor, QueuedExecutor)
    run_all(executor)
    assert session.shapes == [(6, 50)]
    for caller in callers:
        check(caller)


class TimedSession(TextSession):
    """A ``TextSession`` whose runs take the time in the cost table ``costs``."""

    def __init__(self, costs: CostTable, clock: FakeClock) -> None:
        super().__init__()
        self._costs, self._clock = costs, clock

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        rows, length = feeds["ids"].shape
        self._clock.now += float(self._costs.by_rows(length, rows)[rows])
        return super().run(feeds)


def timed(clock: FakeClock, costs: CostTable, *, eager: bool = True) -> tuple[QueuedExecutor, TimedSession]:
    session = TimedSession(costs, clock)
    scheduling = Scheduling(max_batch_size=8, dynamic=True, eager=eager, lengths=LENGTHS, max_delay_us=100_000)
    executor = make_executor(
        TEXT, scheduling, lambda: session, name="m", version="1", clock=clock, start=False, costs=costs
    )
    assert isinstance(executor, QueuedExecutor)
    return executor, session


@pytest.mark.parametrize("eager", [True, False])
def test_requests_are_run_within_the_delay_bound(eager: bool) -> None:
    """Fails if more than 1% of the requests wait longer than the delay. Also checks that an idle instance doesn't wait
    without need, and that waiting makes batches larger. The test simulates a stream of texts at half of the model's
    throughput."""
    clock = FakeClock(100.0)
    costs = CostTable((1, 8), (1, 64), ((0.004, 0.02), (0.008, 0.12)))
    executor, session = timed(clock, costs, eager=eager)
    rng = np.random.default_rng(0)
    instants = list(clock.now + np.cumsum(rng.exponential(0.014, 600)))
    lengths = np.clip(rng.lognormal(2.5, 0.9, 600), 1, 64).astype(int)
    alone = sum(float(costs.by_rows(int(length), 1)[1]) for length in lengths)
    tickets, began = [], clock.now
    while len(tickets) < len(instants) or executor.pending():
        while len(tickets) < len(instants) and instants[len(tickets)] <= clock.now:
            request, arrived = text(0, int(lengths[len(tickets)])), float(instants[len(tickets)])
            tickets.append(executor.submit(request, lambda _: None, arrived=arrived))
        if not executor.poll():
            clock.now += 0.0005
    assert 0.4 < alone / (clock.now - began) < 0.7  # checks that the load is about half of the throughput
    waits = [ticket.durations.queue / 1e9 for ticket in tickets]
    assert np.quantile(waits, 0.99) <= 0.1
    if eager:
        assert np.median(waits) < 0.02
    else:
        assert len(session.feeds) < 0.5 * len(tickets)


# The cost grows in proportion to the length. A row of 8 positions takes 10 ms, and a row of 64 positions takes 80 ms.
STEEP = CostTable((1, 8), (1, 64), ((0.00125, 0.08), (0.01, 0.64)))


def test_a_long_text_gives_way_where_it_would_make_others_late() -> None:
    """Checks that a long request runs after a short request if the short request would otherwise be late."""
    clock = FakeClock(100.0)
    executor, session = timed(clock, STEEP)
    callers = [Caller(executor, replace(text(i, n), inline=False)) for i, n in enumerate((64, 4))]
    clock.now += 0.06
    run_all(executor)
    assert session.shapes == [(1, 4), (1, 64)]
    assert all(caller.ticket.durations.queue <= 100_000_000 for caller in callers)


@pytest.mark.parametrize(("deadline", "waited"), [(None, 0.3), (0.2, 0.15)])
def test_a_late_text_is_not_put_off_for_ever(deadline: float | None, waited: float) -> None:
    """Checks that a late request is postponed only for a limited time, and that a late request with a deadline isn't
    postponed."""
    clock = FakeClock(100.0)
    executor, session = timed(clock, STEEP)
    request = replace(text(0, 64), inline=False)
    late = Caller(executor, replace(request, deadline=clock.now + deadline) if deadline else request)
    clock.now += 0.15
    for number in range(1, 40):
        Caller(executor, replace(text(number, 8), inline=False))
        executor.poll()
    assert (1, 64) in session.shapes
    assert late.ticket.durations.queue / 1e9 == pytest.approx(waited, abs=0.02)


def test_the_delay_bound() -> None:
    """Fails if a long request waits longer than the batching delay. Also fails if a batch starts before its oldest
    request has waited for the batching delay."""
    executor, session, clock = by_length(max_delay_us=1000)
    Caller(executor, text(0, 60))
    for i in range(1, 6):
        clock.now += 0.0001
        Caller(executor, text(i, 3))
    assert not executor.poll()
    clock.now += 0.0005
    assert executor.poll()
    assert session.shapes == [(1, 60)], "the oldest request runs alone, because no other is as long"
    clock.now += 0.0001
    assert executor.poll()
    assert session.shapes[1:] == [(5, 3)]


def test_enough_company_is_not_waited_for() -> None:
    """Fails if an idle instance waits although the waiting requests fill a batch."""
    executor, session, _ = by_length(max_delay_us=10**6)
    for i in range(8):
        Caller(executor, text(i, 5))
    assert executor.poll()
    assert session.shapes == [(8, 5)]


def test_a_mask_is_made_and_a_sent_one_kept() -> None:
    """Checks that a caller's mask is kept, that a missing mask is generated, and that padding is masked."""
    executor, session, _ = by_length()
    sent = ((5, True), (4, False), (3, True))
    callers = [Caller(executor, text(i, n, mask=mask)) for i, (n, mask) in enumerate(sent)]
    run_all(executor)
    assert session.shapes == [(3, 5)]
    ran = session.feeds[0]
    by_id = dict(zip((ran["scale"][:, 0] - 1).astype(int).tolist(), ran["mask"], strict=True))
    assert by_id[0].tolist() == [0, 1, 1, 1, 1]
    assert by_id[1].tolist() == [1, 1, 1, 1, 0]
    assert by_id[2].tolist() == [0, 1, 1, 0, 0]
    assert 77 in ran["ids"]
    for caller in callers:
        check(caller)
    alone, session, _ = by_length(eager=True)
    check(Caller(alone, text(1, 6)))
    assert session.feeds[0]["mask"].tolist() == [[1] * 6]


def test_sizes_are_part_of_the_cost() -> None:
    """Checks that the scheduler counts the cost of all eight rows if each run must have eight rows, and that a padding
    row is a copy of a valid row."""
    executor, session, _ = by_length(allowed=(8,))
    callers = [Caller(executor, text(i, n)) for i, n in enumerate((3, 50, 3))]
    run_all(executor)
    assert session.shapes == [(8, 50)]
    for rows in session.feeds[0].values():
        assert (rows[3:] == rows[2]).all()
    for caller in callers:
        check(caller)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([None, (2, 4), (3, 8), (8,)]),
)
def test_batched_is_as_alone(requests: list[tuple[int, int, bool]], allowed: tuple[int, ...] | None) -> None:
    """Fails if a caller's result contains padding or lacks values, or if a batch has a forbidden size."""
    executor, session, _ = by_length(allowed=allowed)
    callers = [Caller(executor, text(i, n, rows, mask=mask)) for i, (n, rows, mask) in enumerate(requests)]
    run_all(executor)
    for caller in callers:
        check(caller)
    assert all(shape[0] in (allowed or range(1, 9)) for shape in session.shapes)
    found = executor.statistics()
    assert found.real_tokens == sum(n * rows for n, rows, _ in requests)
    assert found.real_tokens + found.padded_tokens == sum(rows * length for rows, length in session.shapes)


def test_an_output_that_does_not_keep_the_length() -> None:
    """Fails if a caller gets another caller's rows from a model that halves the sequence. The output of this model is
    shorter than the request, so accel can't cut the output to the request's length."""

    class Halving(TextSession):
        def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
            found = super().run(feeds)
            return found | {"each": found["each"][:, :, ::2]}

    session = Halving()
    scheduling = Scheduling(max_batch_size=8, dynamic=True, eager=False, lengths=LENGTHS)
    executor = make_executor(TEXT, scheduling, lambda: session, name="m", version="1", start=False, costs=COSTS)
    callers = [Caller(executor, text(i, n)) for i, n in enumerate((8, 9))]
    assert isinstance(executor, QueuedExecutor)
    run_all(executor)
    for caller, width in zip(callers, (4, 5), strict=True):
        assert isinstance(caller.answer, InferenceResponse)
        assert caller.answer.outputs["each"].shape == (1, 2, width)


def test_lengths_that_differ_inside_a_request() -> None:
    """Fails if a request whose inputs have different lengths reaches the session."""
    executor, session, _ = by_length()
    asked = text(1, 5)
    asked.inputs["mask"] = np.ones((1, 4), np.int64)  # type: ignore[index]
    assert Caller(executor, asked).code == "INVALID_ARGUMENT"
    assert not session.feeds


@pytest.mark.parametrize(
    ("lengths", "dynamic", "text"),
    [
        (LengthBatching(dim="width"), True, "has no dim 'width'.* length"),
        (LengthBatching(dim="batch"), True, "has no dim 'batch'"),
        (LengthBatching(dim="length", mask="nope"), True, "'nope' is not one of the model's inputs"),
        (LengthBatching(dim="length", pad={"nope": 1}), True, "padding is given for 'nope'"),
        (LengthBatching(dim="length", outputs={"each": 0}), True, "axis 0"),
        (LengthBatching(dim="length"), False, "dynamic"),
    ],
)
def test_options_that_cannot_be(lengths: LengthBatching, dynamic: bool, text: str) -> None:
    """Fails if ``make_executor`` accepts scheduling options that would give wrong results."""
    scheduling = Scheduling(max_batch_size=4, dynamic=dynamic, lengths=lengths)
    with pytest.raises(BadConfig, match=text):
        make_executor(TEXT, scheduling, TextSession, name="m", version="1", start=False)


def texts_of_many_lengths(count: int) -> list[np.ndarray]:
    """Returns the token ids of documents and word pairs with many different lengths, in a mixed order."""
    from accel.examples import minilm

    found = []
    for part in minilm.evaluation_data(256).values():
        for ids, mask in zip(part["input_ids"], part["attention_mask"], strict=True):
            found.append(ids[: mask.sum()])
    rng = np.random.default_rng(0)
    rng.shuffle(documents := found[:50])
    rng.shuffle(words := found[50:])
    mixed = documents[: count // 2] + words[: count - count // 2]
    rng.shuffle(mixed)
    return mixed


def test_in_the_order_of_arrival() -> None:
    """Checks that the batches are in the order of arrival with ``grouped`` off, and that no caller gets padding or
    another caller's rows."""
    executor, session, clock = by_length(lengths=replace(LENGTHS, grouped=False))
    lengths = [60, 2, 3, 59, 4, 5, 6, 58, 7, 8]
    callers = [Caller(executor, text(i, length)) for i, length in enumerate(lengths)]
    clock.now += 1
    run_all(executor)
    assert session.shapes == [(8, 60), (2, 8)]
    for caller in callers:
        check(caller)


@pytest.mark.proof
@pytest.mark.slow
def test_minilm(minilm: Artifact) -> None:
    """Fails if batching by length changes an embedding of a real model by more than rounding. Also checks that batching
    by length halves the padding of real texts compared with batching in the order of arrival."""
    texts = texts_of_many_lengths(64)
    session = get_runtime("onnxruntime").open(minilm, SessionOptions(threads=1))
    lengths = LengthBatching(dim="sequence", mask="attention_mask")
    scheduling = Scheduling(max_batch_size=8, dynamic=True, eager=False, lengths=lengths)
    alone = [session.run({"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)}) for ids in texts]
    executor = make_executor(
        minilm.signature,
        scheduling,
        lambda: session,
        name="minilm",
        version="1",
        start=False,
        costs=CostTable.proportional(16),
    )
    assert isinstance(executor, QueuedExecutor)
    callers = [Caller(executor, InferenceRequest(model="minilm", inputs={"input_ids": ids[None]})) for ids in texts]
    run_all(executor)
    for caller, expected in zip(callers, alone, strict=True):
        assert isinstance(caller.answer, InferenceResponse)
        got = caller.answer.outputs["embedding"]
        assert np.linalg.norm(got - expected["embedding"]) / np.linalg.norm(expected["embedding"]) < 1e-5
    found = executor.statistics()
    sizes = [len(ids) for ids in texts]
    in_order = sum(8 * max(sizes[i : i + 8]) for i in range(0, len(sizes), 8)) - sum(sizes)
    assert found.real_tokens == sum(sizes)
    assert found.padded_tokens * 2 <= in_order, (found.padded_tokens, in_order, found.batches.keys())
    assert found.execution_count < len(texts) / 2, "the padding is not saved by running each text alone"
    executor.close(1.0)
