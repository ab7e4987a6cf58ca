"""Proves that each batch of an engine with several optimization profiles fits one of the profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel.errors import BadFeeds
from accel.serve.protocol.inference import InferenceRequest
from accel.serve.scheduling.cost_table import CostTable, measure_costs
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import LengthBatching, Scheduling
from accel.serve.scheduling.profiles import Profile, read_profiles, rows_of
from accel.signature import DimRange, Feeds, Signature, TensorSpec
from tests.support.fake_sessions import Caller, FakeClock, FakeSession, run_all

# One profile allows many short rows, and the other allows few long rows. No profile allows 3 rows.
PROPERTIES = {"profiles": [{"x": [[4, 2], [8, 4], [16, 8]]}, {"x": [[1, 4], [2, 32], [2, 64]]}]}
PROFILES = read_profiles(PROPERTIES)
SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", "length")),),
    (TensorSpec("y", "float32", ("batch", "length")),),
    {"batch": DimRange(1, 2, 16), "length": DimRange(2, 8, 64)},
)


class Engine(FakeSession):
    """A session that computes y = 2x and raises an error for shapes outside all profiles."""

    def __init__(self, profiles: tuple[Profile, ...] = PROFILES) -> None:
        super().__init__(SIGNATURE)
        self.profiles = profiles
        self.refused: list[tuple[int, ...]] = []

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        x = feeds["x"]
        held = any(
            all(a <= n <= b for a, n, b in zip(low, x.shape, high, strict=True))
            for low, high in (profile["x"] for profile in self.profiles)
        )
        if not held:
            self.refused.append(x.shape)
            raise BadFeeds(f"the shape {x.shape} is outside the engine's profiles")
        self.runs.append(np.array(x))
        return {"y": x * 2}


def sizes(length: int) -> list[int]:
    return list(rows_of(PROFILES, (("x", (length,)),), 16))


def make(lengths: LengthBatching | None = None, **options: Any) -> tuple[Any, Engine]:
    session = Engine()
    scheduling = Scheduling(
        max_batch_size=16, dynamic=True, eager=False, profiles=PROFILES, allowed=rows_of(PROFILES, None, 16),
        lengths=lengths, **options,
    )  # fmt: skip
    executor = make_executor(
        SIGNATURE, scheduling, lambda: session, name="m", version="1", clock=FakeClock(100.0), start=False,
        costs=CostTable.proportional(64),
    )  # fmt: skip
    return executor, session


def request(number: int, rows: int, length: int) -> InferenceRequest:
    x = np.full((rows, length), number + 1, np.float32)
    return InferenceRequest(model="m", id=str(number), inputs={"x": x})


def test_the_rows_of_profiles() -> None:
    """Fails if the batch sizes of one profile are used for shapes of another profile, or if a batch size outside all
    profiles is allowed."""
    assert rows_of(PROFILES, None, 16) == (1, 2, *range(4, 17))
    assert sizes(2) == list(range(4, 17))
    assert sizes(4) == [1, 2, *range(4, 17)]
    assert sizes(9) == [1, 2]
    assert sizes(65) == sizes(1) == []
    assert rows_of(PROFILES, (("x", (4, 4)),), 16) == ()
    assert rows_of(PROFILES, None, 3) == (1, 2)


@example([(1, 20)] * 5, "grouped")
@example([(1, 20)] * 5, "rows")
@example([(4, 8), (1, 32), (4, 8), (1, 32)], "as they came")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 66)), min_size=1, max_size=12),
    st.sampled_from(["rows", "grouped", "as they came"]),
)
def test_no_batch_is_off_the_profiles(given_shapes: list[tuple[int, int]], how: str) -> None:
    """Fails if the engine gets a batch outside all profiles, or if a caller gets another caller's rows. Also fails if a
    request inside a profile is refused, or a request outside all profiles is accepted."""
    lengths = None if how == "rows" else LengthBatching(dim="length", outputs={"y": 1}, grouped=how == "grouped")
    executor, session = make(lengths)
    callers = [Caller(executor, request(i, *shape)) for i, shape in enumerate(given_shapes)]
    run_all(executor)
    assert session.refused == []
    for caller, (rows, length) in zip(callers, given_shapes, strict=True):
        if rows > max(sizes(length), default=0):
            assert caller.code == "INVALID_ARGUMENT"
        else:
            np.testing.assert_array_equal(caller.answer.outputs["y"], caller.request.inputs["x"] * 2)  # type: ignore[union-attr]


def test_short_ones_are_run_together() -> None:
    """Fails if a batch that fits a profile is cut to the batch size of another profile."""
    executor, session = make()
    for i in range(16):
        Caller(executor, request(i, 1, 8))
    run_all(executor)
    assert session.sizes == [16]
    executor, session = make()
    for i in range(5):
        Caller(executor, request(i, 1, 32))
    run_all(executor)
    assert session.sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("rows", "length", "said"), [(1, 65, "outside the optimization profiles"), (3, 32, "must be <= 2")]
)
def test_what_no_profile_takes(rows: int, length: int, said: str) -> None:
    """Fails if a request outside all profiles reaches the engine, or if the error lacks the reason."""
    executor, session = make()
    caller = Caller(executor, request(0, rows, length))
    assert caller.refused is not None
    assert said in str(caller.refused)
    assert not session.runs


def test_costs_are_measured_where_it_runs() -> None:
    """Fails if shapes outside the profiles prevent the cost measurement of shapes inside the profiles."""
    session = Engine()
    table = measure_costs(session, dim="length", batch="batch", sizes=[1, 2, 4, 8, 16], lengths=[2, 8, 64])
    assert session.refused
    assert np.isfinite(table.seconds).all()
    assert {run.shape for run in session.runs} == {(1, 8), (2, 8), (1, 64), (2, 64), (4, 2), (8, 2), (16, 2), (4, 8),
                                                   (8, 8), (16, 8)}  # fmt: skip
