"""Proves that a decoupled model sends each response without delay, and then a single final response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.errors import BadConfig
from accel.serve.protocol.inference import InferenceRequest, InferenceResponse, ServeError
from accel.serve.scheduling.decoupled import DecoupledExecutor
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import Scheduling
from accel.signature import Feeds
from tests.support.fake_sessions import POISON, SIGNATURE, FakeSession, request


class Streaming(FakeSession):
    """A session that takes the number of its responses from the second value of the input. A row with POISON raises an
    error after the second response."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.freed = 0

    def stream(self, feeds: Feeds) -> Iterator[dict[str, np.ndarray]]:
        self.held = self._parts(feeds)  # the stream's buffers must be freed even if the session keeps the stream
        return self.held

    def _parts(self, feeds: Feeds) -> Iterator[dict[str, np.ndarray]]:
        x = feeds["x"]
        self.runs.append(np.array(x))
        poison = (x == POISON).any()
        try:
            for i in range(2 if poison else int(x[0, 1])):
                self.given += 1
                yield {"y": x + i, "z": x.sum(1)}
            if poison:
                raise RuntimeError("poison")
        finally:
            self.freed += 1


def decoupled(**options: Any) -> tuple[DecoupledExecutor, Streaming]:
    session = Streaming()
    executor = make_executor(
        SIGNATURE, Scheduling(max_batch_size=4, decoupled=True, **options), lambda: session, name="m", version="1",
        start=False,
    )  # fmt: skip
    assert isinstance(executor, DecoupledExecutor)
    return executor, session


def ask(executor: DecoupledExecutor, asked: InferenceRequest) -> list[InferenceResponse | ServeError]:
    answers: list[InferenceResponse | ServeError] = []
    executor.submit(asked, answers.append)
    return answers


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_parts_then_the_end(parts: int) -> None:
    """Fails if a response is lost, or is sent only when the next response is ready. Also fails if the final response is
    missing or repeated."""
    executor, session = decoupled(dynamic=True, allowed=(2, 4))
    answers = ask(executor, request(parts))
    assert not answers, "streams run on the instance's thread, not on the caller's"
    assert executor.poll()
    finals = []
    for i, answer in enumerate(answers):
        assert isinstance(answer, InferenceResponse)
        finals.append(answer.final)
        assert (answer.model, answer.id) == ("m", str(parts))
        if not answer.final:
            np.testing.assert_array_equal(answer.outputs["y"], request(parts).inputs["x"] + i)
        else:
            assert not answer.outputs
    assert finals == [False] * parts + [True]
    assert session.sizes == [2], "the batch is padded to a size that the model accepts"
    found = executor.statistics()
    assert (found.received, found.success.count, found.inference_count) == (1, 1, 1)


def test_requests_are_not_mixed() -> None:
    """Fails if two callers get responses of the same stream."""
    executor, session = decoupled(dynamic=True)
    both = [ask(executor, request(n)) for n in (1, 2)]
    while executor.poll():
        pass
    assert session.sizes == [1, 1]
    assert [len(answers) for answers in both] == [2, 3]


def test_a_stream_that_breaks() -> None:
    """Checks that the caller gets an error that occurs after some responses, and that no final response follows the
    error."""
    executor, _ = decoupled()
    answers = ask(executor, request(POISON))
    executor.poll()
    assert [getattr(answer, "final", "error") for answer in answers] == [False, False, "error"]
    assert isinstance(answers[-1], ServeError)
    assert executor.statistics().fail.count == 1


def test_cancelling_a_stream() -> None:
    """Fails if a canceled stream is computed to its end, leaves its generator open, or sends another response."""
    executor, session = decoupled()
    answers: list[InferenceResponse | ServeError] = []

    def answer(result: InferenceResponse | ServeError) -> None:
        answers.append(result)
        if len(answers) == 2:
            ticket.cancel()

    ticket = executor.submit(request(100), answer)
    waiting = ask(executor, request(5))
    executor.poll()
    assert len(answers) == 3
    assert isinstance(answers[-1], ServeError)
    assert answers[-1].code.name == "CANCELLED"
    assert (session.given, session.freed) == (3, 1)
    ticket.cancel()
    assert not waiting
    second = executor.submit(request(9), answers.append)
    second.cancel()
    assert isinstance(answers[-1], ServeError)
    while executor.poll():
        pass
    assert len(waiting) == 6
    assert executor.statistics().cancel.count == 2
    assert 9 not in [rows[0, 1] for rows in session.runs]


@pytest.mark.parametrize("times", [[0.0, 1.0], [0.0, 0.9, 1.1]])
def test_an_expired_stream_never_runs(times: list[float]) -> None:
    """Fails if a stream begins after its deadline, even if the deadline passes between the choice of the request and
    the run."""
    session = Streaming()
    executor = make_executor(
        SIGNATURE, Scheduling(max_batch_size=4, decoupled=True), lambda: session, name="m", version="1",
        start=False, clock=lambda: times.pop(0) if times[1:] else times[0],
    )  # fmt: skip
    assert isinstance(executor, DecoupledExecutor)
    answers = ask(executor, request(1, deadline=1.0))
    executor.poll()
    assert [getattr(answer, "code", None) and answer.code.name for answer in answers] == ["DEADLINE_EXCEEDED"]  # type: ignore[union-attr]
    assert not session.runs


def test_a_session_that_cannot_stream() -> None:
    """Checks that a decoupled model isn't loaded if its session can't stream, and that the session is closed."""
    session = FakeSession()
    with pytest.raises(BadConfig, match="has no method stream"):
        make_executor(SIGNATURE, Scheduling(decoupled=True), lambda: session, name="m", version="1")
    assert session.closed == 1
