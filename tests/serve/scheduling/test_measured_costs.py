"""Proves that run costs are measured within a time budget when a model loads, and that a model without measured costs
still loads."""

from __future__ import annotations

import numpy as np
import pytest

from accel.serve.scheduling.cost_table import grid, measure_costs
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.instances import QueuedExecutor
from accel.serve.scheduling.options import Scheduling
from accel.signature import Feeds
from tests.serve.scheduling.fake_texts import LENGTHS, TEXT, TextSession, check, text
from tests.support.fake_sessions import Caller, FakeClock, run_all


class SlowText(TextSession):
    """A ``TextSession`` that advances the clock by the time that a small transformer would take."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        rows, length = feeds["ids"].shape
        self.clock.now += 0.001 + 0.0001 * rows * length + 0.00001 * rows * length**2
        return super().run(feeds)


@pytest.mark.parametrize("budget", [1e9, 0.1])
def test_costs_are_measured(budget: float) -> None:
    """Fails if the cost table differs from the session's times, or if a cell of the table is measured after the time
    budget is spent. Also fails if the estimate of an unmeasured cell is bad."""
    clock = FakeClock(100.0)
    session = SlowText(clock)
    before = clock.now
    table = measure_costs(
        session, dim="length", batch="batch", sizes=grid(1, 8), lengths=grid(1, 64), budget=budget, clock=clock
    )
    if budget < 1:
        assert clock.now - before < 0.3
        assert len(session.feeds) < 2 * 4 * 7
    for rows, length in ((1, 8), (8, 64), (3, 20)):
        real = 0.001 + 0.0001 * rows * length + 0.00001 * rows * length**2
        assert table.by_rows(length, 8)[rows] == pytest.approx(real, rel=0.3)
    assert grid(8, 100) == [8, 16, 32, 64, 100]
    assert grid(4, 4) == [4]


def test_an_interrupted_measurement() -> None:
    """Fails if the cost table contains the time of a run that another process slowed down. A slowed-down run would make
    larger batches look too expensive, and the scheduler would run the requests separately."""
    clock = FakeClock(100.0)

    class Interrupted(SlowText):
        def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
            found = TextSession.run(self, feeds)
            self.clock.now += 0.01 if feeds["ids"].shape == (2, 4) else 0.00003
            return found

    table = measure_costs(
        Interrupted(clock), dim="length", batch="batch", sizes=grid(1, 8), lengths=grid(1, 64), clock=clock
    )
    assert table.by_rows(10, 8) == pytest.approx(0.00003)


def test_a_model_that_refuses_random_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a model loads even if its run costs can't be measured."""

    class Picky(TextSession):
        def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
            if feeds["scale"][0, 0] != 1:
                raise RuntimeError("not that scale")
            return super().run(feeds)

    scheduling = Scheduling(max_batch_size=8, dynamic=True, eager=False, lengths=LENGTHS)
    executor = make_executor(TEXT, scheduling, Picky, name="m", version="1", start=False)
    assert isinstance(executor, QueuedExecutor)
    caller = Caller(executor, text(0, 5))
    run_all(executor)
    check(caller)
    assert "could not be measured (not that scale)" in caplog.text
