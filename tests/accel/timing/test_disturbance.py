"""Proves that the benchmark notices other work, and repeats the blocks that other work spoiled."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.timing.blocks import Block
from accel.timing.disturbance import Counters, Reading, usage
from accel.timing.repeats import SPOILED, Repeats


def kernel_files(folder: Path) -> Counters:
    """Writes the files of a kernel with a process of two threads, and returns the counters."""
    proc, sys = folder / "proc", folder / "sys"
    for thread, waited in (("7", 1_500_000_000), ("8", 500_000_000)):
        (proc / "self/task" / thread).mkdir(parents=True)
        (proc / "self/task" / thread / "schedstat").write_text(f"123456 {waited} 9\n")
    (proc / "stat").write_text("cpu  9 0 9 9 9 0 9 300 0 0\ncpu0 4 0 4 4 4 0 4 150 0 0\ncpu1 5 0 5 5 5 0 5 150 0 0\n")
    (proc / "pressure").mkdir()
    (proc / "pressure/cpu").write_text(
        "some avg10=1.00 avg60=2.00 avg300=3.00 total=4000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    (sys / "fs/cgroup").mkdir(parents=True)
    (sys / "fs/cgroup/cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 250000\n")
    heat = sys / "devices/system/cpu/cpu0/thermal_throttle"
    heat.mkdir(parents=True)
    (heat / "package_throttle_total_time_ms").write_text("750\n")
    return Counters(proc, sys)


def test_each_counter_of_the_kernel_is_read_in_seconds(tmp_path: Path) -> None:
    """Fails if a counter is read from the wrong field, or in the wrong unit."""
    found = kernel_files(tmp_path).read()
    assert (found.waited, found.stolen, found.throttled) == (2.0, 1.5, 1.0)
    assert 0 < found.cpu <= time.process_time()


def test_without_the_times_of_threads_the_pressure_counts(tmp_path: Path) -> None:
    """Fails if a kernel without ``schedstat`` seems to have no other work."""
    counters = kernel_files(tmp_path)
    for file in tmp_path.glob("proc/self/task/*/schedstat"):
        file.unlink()
    assert counters.read().waited == 4.0


def test_a_system_without_these_files_counts_nothing(tmp_path: Path) -> None:
    """Fails if the benchmark needs Linux. Also fails if the text of a file can stop the benchmark."""
    found = Counters(tmp_path / "proc", tmp_path / "sys").read()
    assert (found.waited, found.stolen, found.throttled) == (0.0, 0.0, 0.0)
    assert not Counters(tmp_path / "proc", tmp_path / "sys").uses_gpu()
    counters = kernel_files(tmp_path)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"some \xff words\n")
    found = counters.read()
    assert (found.waited, found.stolen, found.throttled) == (0.0, 0.0, 0.0)


def test_an_open_gpu_is_noticed(tmp_path: Path) -> None:
    """Fails if the CPU time of a process that waits for a GPU may decide."""
    counters = kernel_files(tmp_path)
    opened = tmp_path / "proc/self/fd"
    opened.mkdir()
    (opened / "3").symlink_to("/dev/null")
    assert not counters.uses_gpu()
    (opened / "4").symlink_to("/dev/nvidia0")
    assert counters.uses_gpu()


def test_the_share_that_other_work_took() -> None:
    """Fails if the share isn't that of the cores that the process could use, or if it exceeds 1."""
    start = Reading(cpu=10.0, waited=3.0, stolen=1.0, throttled=1.0)
    alone = usage(start, Reading(cpu=10.4, waited=3.0, stolen=1.0, throttled=1.0), 0.2)
    assert (alone.cpu, alone.cores, alone.lost) == pytest.approx((0.4, 2.0, 0.0))
    beside = usage(start, Reading(cpu=10.1, waited=3.3, stolen=1.0, throttled=1.0), 0.2)
    assert (beside.cores, beside.lost) == pytest.approx((2.0, 0.75))
    guest = usage(start, Reading(cpu=10.2, waited=3.0, stolen=1.02, throttled=1.04), 0.2)
    assert guest.lost == pytest.approx(0.3)
    assert usage(start, Reading(cpu=10.0, waited=3.2, stolen=9.0, throttled=1.0), 0.2).lost == 1.0
    assert usage(start, start, 0.0).lost == 0.0
    # A thread that has ended takes its wait with it.
    assert usage(start, Reading(cpu=10.4, waited=2.0), 0.2).cores == pytest.approx(2.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the kernel counts no waits")
def test_a_real_process_that_shares_a_core_waits() -> None:
    """Checks the real kernel's counters: of two threads that may use the same core only, each waits while the other
    runs. The sum of the CPU time and the waits is the time of two threads on any machine."""
    counters, mask = Counters(), os.sched_getaffinity(0)
    ends = threading.Event()

    def spin() -> None:
        data = bytes(1 << 20)
        import hashlib

        while not ends.is_set():
            hashlib.sha256(data)  # releases the GIL

    threads = [threading.Thread(target=spin) for _ in range(2)]
    os.sched_setaffinity(0, {min(mask)})
    try:
        for thread in threads:
            thread.start()
        before, begun = counters.read(), time.monotonic()
        time.sleep(0.5)
        used = usage(before, counters.read(), time.monotonic() - begun)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        os.sched_setaffinity(0, mask)
    assert used.cores > 1.5
    assert used.lost > 0.35


def block(lost: float) -> Block:
    return Block(times=np.array([1]), seconds=0.2, lost=lost)


def best_of(repeats: Repeats, *lost: float) -> float:
    """Times a block whose tries lose ``lost``. Returns the share that the returned block lost."""
    tries = iter(lost)
    return repeats.best_of(lambda: block(next(tries))).lost


def test_a_spoiled_block_is_timed_again() -> None:
    """Fails if a clean block is timed again, if a spoiled block isn't, or if not the least disturbed try counts."""
    repeats = Repeats(60.0)
    assert best_of(repeats, SPOILED, 0.0) == SPOILED
    assert repeats.count == 0
    assert best_of(repeats, 0.3, 0.0) == 0.0
    assert best_of(repeats, 0.3, 0.2, 0.4) == 0.2
    assert repeats.count == 3


def test_other_work_that_goes_on_is_not_waited_for() -> None:
    """Fails if each of many blocks is timed three times beside work that never ends, or if no block is timed again once
    the other work has ended."""
    repeats = Repeats(60.0)
    tries = [repeats.best_of(lambda: block(0.7)) for _ in range(20)]
    assert len(tries) == 20
    assert repeats.count == 4
    assert best_of(repeats, 0.01) == 0.01
    assert best_of(repeats, 0.5, 0.0) == 0.0


@given(st.lists(st.floats(0, 1), min_size=60, max_size=60), st.floats(0, 5))
def test_repeats_end_with_their_time(lost: list[float], seconds: float) -> None:
    """Checks that no repeat begins after the time is used up. Each block takes a second."""
    now, tries = [0.0], iter(lost)

    def timed() -> Block:
        now[0] += 1.0
        return block(next(tries))

    repeats = Repeats(seconds, lambda: now[0])
    for _ in range(20):
        repeats.best_of(timed)
    assert repeats.count <= np.ceil(seconds)
    assert now[0] == 20 + repeats.count
