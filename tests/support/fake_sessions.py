"""A clock that is set by hand, and sessions whose work the tests can see, shared by the tests of the scheduling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from accel.serve.executor import make_executor
from accel.serve.inference import InferenceRequest, InferenceResponse, ServeError
from accel.serve.instances import QueuedExecutor
from accel.serve.scheduling import Scheduling
from accel.signature import Feeds, Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", 2)),),
    (TensorSpec("y", "float32", ("batch", 2)), TensorSpec("z", "float32", ("batch",))),
)
POISON = -666.0


class FakeClock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSession:
    """y = 2x, z = sum of a row. Keeps the rows of each run; ``during`` is called inside one; a poisonous row raises."""

    def __init__(self, signature: Signature = SIGNATURE) -> None:
        self.signature = signature
        self.runs: list[np.ndarray] = []
        self.closed = 0
        self.during: Callable[[], None] | None = None

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.runs]

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        assert not self.closed, "run after close"
        x = feeds["x"]
        self.runs.append(np.array(x))
        if self.during is not None:
            self.during()
        if (x == POISON).any():
            raise RuntimeError("poison")
        return {"y": x * 2, "z": x.sum(axis=1)}

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        return self.signature.example_inputs(seed=seed, **sizes)

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Caller:
    """Someone who asked: every answer that came, in order."""

    def __init__(self, executor: Any, request: InferenceRequest) -> None:
        self.request = request
        self.answers: list[InferenceResponse | ServeError] = []
        self.ticket: Any = None
        self.refused: ServeError | None = None
        try:
            self.ticket = executor.submit(request, self.answers.append)
        except ServeError as error:
            self.refused = error

    @property
    def answer(self) -> InferenceResponse | ServeError:
        assert len(self.answers) == 1, self.answers
        return self.answers[0]

    @property
    def code(self) -> str | None:
        """``None`` while there is no answer, ``OK``, or the name of the error."""
        found = self.refused or (self.answers[0] if self.answers else None)
        assert len(self.answers) <= 1
        return found.code.name if isinstance(found, ServeError) else "OK" if found else None

    def check_rows(self) -> None:
        """It got its own rows and nobody else's."""
        answer = self.answer
        assert isinstance(answer, InferenceResponse)
        x = self.request.inputs["x"]
        np.testing.assert_array_equal(answer.outputs["y"], x * 2)
        np.testing.assert_array_equal(answer.outputs["z"], x.sum(axis=1))
        assert answer.id == self.request.id


def request(value: float, rows: int = 1, **fields: Any) -> InferenceRequest:
    """``rows`` rows that no other value has."""
    x = np.array([[value + row / 64, value] for row in range(rows)], dtype=np.float32)
    return InferenceRequest(model="m", id=str(value), inputs={"x": x}, **fields)


def by_hand(
    scheduling: Scheduling, session: FakeSession | None = None
) -> tuple[QueuedExecutor, FakeSession, FakeClock]:
    """An executor without threads: it does what ``poll`` says, at the time the clock says."""
    clock = FakeClock()
    session = session or FakeSession()
    executor = make_executor(
        SIGNATURE, scheduling, lambda: session, name="m", version="1", clock=clock, wall=lambda: 5.0, start=False
    )
    assert isinstance(executor, QueuedExecutor)
    return executor, session, clock


def waiting(**options: Any) -> Scheduling:
    """Batches of up to 8 that are waited for 1 ms, even by an idle instance."""
    return Scheduling(**{"max_batch_size": 8, "dynamic": True, "max_delay_us": 1000, "eager": False} | options)


def run_all(executor: QueuedExecutor) -> None:
    while executor.poll():
        pass
