"""Tests the outputs that are kept in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from accel import kept_outputs
from accel.kept_outputs import Run


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Lets threads take turns after almost every bytecode, so that a race shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_share_the_kept_outputs(monkeypatch: pytest.MonkeyPatch, eager_threads: None) -> None:
    """Fails if a thread changes the kept outputs while another thread counts their bytes or renames a model. Such a
    change ended one of two exports with a RuntimeError."""
    monkeypatch.setattr(kept_outputs, "_kept", type(kept_outputs._kept)())

    def keep(thread: int) -> list[float]:
        runs = [Run(f"model {thread}", "torch", f"{index}") for index in range(60)]
        for index, run in enumerate(runs):
            kept_outputs.keep(run, {"first": np.float64(index).reshape(1)})
        kept_outputs.rename(f"model {thread}", f"digest {thread}", ["output"])
        found = [kept_outputs.find(run._replace(model=f"digest {thread}")) for run in runs]
        return [outputs["output"][0] for outputs in found if outputs]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(keep, range(4))) == [list(range(60))] * 4


def test_the_oldest_outputs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the kept outputs take more bytes than the limit. Also fails if outputs are dropped too early, because
    replaced or renamed outputs still count."""
    monkeypatch.setattr(kept_outputs, "_kept", type(kept_outputs._kept)())
    monkeypatch.setattr(kept_outputs, "_MOST_BYTES", 2000)
    first, second, third = (Run("model", "torch", f"{index}") for index in range(3))
    for run in (first, second, second, first):
        kept_outputs.keep(run, {"y": np.zeros(1000, np.int8)})
    kept_outputs.rename("model", "digest", ["y"])
    first, second = first._replace(model="digest"), second._replace(model="digest")
    assert kept_outputs.find(second)
    assert kept_outputs.find(first)
    kept_outputs.keep(third, {"y": np.zeros(1000, np.int8)})
    assert [kept_outputs.find(run) is not None for run in (first, second, third)] == [True, False, True]
    kept_outputs.keep(third, {"y": np.zeros(3000, np.int8)})
    assert not any(map(kept_outputs.find, (first, second, third)))
