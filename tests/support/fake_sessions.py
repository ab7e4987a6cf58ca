"""Provides a fake clock, and fake sessions for the tests of the scheduler. A test sets the clock's time, and a session
records its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from accel.serve.protocol.inference import InferenceRequest, InferenceResponse, ServeError
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.instances import QueuedExecutor
from accel.serve.scheduling.options import Scheduling
from accel.signature import Feeds, Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", 2)),),
    (TensorSpec("y", "float32", ("batch", 2)), TensorSpec("z", "float32", ("batch",))),
)
POISON = -666.0


class FakeClock:
    """A clock that shows the seconds in ``now``, which a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeSession:
    """Computes ``y = 2 * x`` and ``z``, the sum of each row. Records the rows of each run, calls ``during`` inside each
    run, and raises an error on a row with POISON."""

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
    """A client of the executor that collects its answers in order."""

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
        """Returns ``None`` until the answer arrives. After the answer has arrived, returns ``OK`` or the name of the
        error."""
        found = self.refused or (self.answers[0] if self.answers else None)
        assert len(self.answers) <= 1
        return found.code.name if isinstance(found, ServeError) else "OK" if found else None

    def check_rows(self) -> None:
        """Asserts that the answer is computed from this caller's rows."""
        answer = self.answer
        assert isinstance(answer, InferenceResponse)
        x = self.request.inputs["x"]
        np.testing.assert_array_equal(answer.outputs["y"], x * 2)
        np.testing.assert_array_equal(answer.outputs["z"], x.sum(axis=1))
        assert answer.id == self.request.id


def request(value: float, rows: int = 1, **fields: Any) -> InferenceRequest:
    """Makes a request with ``rows`` rows. Requests with different values of ``value`` have different rows."""
    x = np.array([[value + row / 64, value] for row in range(rows)], dtype=np.float32)
    return InferenceRequest(model="m", id=str(value), inputs={"x": x}, **fields)


def by_hand(
    scheduling: Scheduling, session: FakeSession | None = None
) -> tuple[QueuedExecutor, FakeSession, FakeClock]:
    """Makes an executor without threads and with a fake clock. The test calls ``poll`` to run requests."""
    clock = FakeClock(100.0)
    session = session or FakeSession()
    executor = make_executor(
        SIGNATURE, scheduling, lambda: session, name="m", version="1", clock=clock, wall=lambda: 5.0, start=False
    )
    assert isinstance(executor, QueuedExecutor)
    return executor, session, clock


def waiting(**options: Any) -> Scheduling:
    """Returns a scheduling config that waits 1 ms for more rows, even if an instance is idle. A batch has up to 8
    rows."""
    return Scheduling(**{"max_batch_size": 8, "dynamic": True, "max_delay_us": 1000, "eager": False} | options)


def run_all(executor: QueuedExecutor) -> None:
    while executor.poll():
        pass
