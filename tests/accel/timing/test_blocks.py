"""Proves how long a block of runs takes, and that its runs are counted and shared."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accel.timing.blocks import Shared, is_steady, passes_for, passes_until, warm_up


def test_warm_up_ends_when_runs_no_longer_get_faster() -> None:
    """Checks that warm-up continues while runs get faster, but ends at its limit even if the runs never become
    steady."""
    now = 0
    durations = iter([900, 700, 500, 300, 200, 150, *[100] * 100])

    def run() -> None:
        nonlocal now
        now += next(durations)

    times = warm_up(run, limit_seconds=1.0, clock=lambda: now)
    assert times[-3:] == [100, 100, 100]
    assert len(times) < 15
    durations = iter(range(10**9, 0, -(10**7)))  # each run takes about a second, and is faster than the run before
    assert len(warm_up(run, limit_seconds=3.0, clock=lambda: now)) == 4
    assert not is_steady([5, 5, 5, 5, 5])


def test_a_block_takes_about_the_time_asked_for() -> None:
    """Fails if a block of a slow model gets fewer than three runs. A pass over several inputs must count as several
    runs."""
    assert passes_for(0.2, 0.010, feeds=1) == 20
    assert passes_for(0.2, 0.010, feeds=4) == 20
    assert passes_for(0.2, 30.0, feeds=1) == 3
    assert passes_for(0.2, 30.0, feeds=2) == 2
    assert passes_for(0.2, 0.0, feeds=1) == 100_000


def test_a_block_is_cut_between_passes() -> None:
    """Fails if a block ends in the middle of a pass, or before its first pass is complete. Also fails if a block
    exceeds its time or its number of passes. If a pass over the inputs stayed unfinished, some inputs would count more
    than others."""
    feeds: Any = ["a", "b", "c"]
    for passes, ends, made in ((100, 25, 4), (2, 10**9, 2), (100, 0, 1), (1, 0, 1)):
        clock = iter(range(0, 1000, 10)).__next__  # each reading is 10 ns after the previous reading
        assert list(passes_until(feeds, passes, ends, clock)) == feeds * made


def test_streams_share_the_runs_of_a_block() -> None:
    """Fails if two threads advance a block's generator at the same time, because Python then raises an error. Also
    checks that every run is made exactly once."""

    def clock() -> int:
        time.sleep(0)  # lets Python switch to another thread
        return 0

    feeds: Any = ["a", "b"]
    work = Shared(passes_until(feeds, 2000, 1, clock))
    with ThreadPoolExecutor(max_workers=4) as pool:
        taken = list(pool.map(lambda _: list(work), range(4)))
    assert Counter(one for part in taken for one in part) == {"a": 2000, "b": 2000}
