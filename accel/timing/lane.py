"""Holds the process of a candidate and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel.child import Child
from accel.machine import users_environment
from accel.progress import report
from accel.signature import Feeds

from .blocks import Block, Candidate, FirstRun, Opened, passes_for
from .environment import peak_rss_mb
from .repeats import Repeats
from .witnesses import Timed

# A process counts as hung if a block with its warm-up takes longer than ``_PATIENCE_SECONDS`` and also longer than
# ``_PATIENCE`` times the planned time.
_PATIENCE = 50
_PATIENCE_SECONDS = 120.0
# A block ends early after ``_OVERRUN`` times its planned time. ``_OVERRUN`` is above 1, so that even a block with a
# slow first run contains enough runs for a robust median.
_OVERRUN = 2.0
# If a run takes longer than this number of seconds, a block has a single pass without a warm-up. Cold caches cost such
# a run little, and a pipeline with several seconds a run would take minutes to measure.
_SLOW_SECONDS = 1.0


class Lane:
    """Holds a candidate's process and its results so far. After calibration, the process runs only while a block is
    timed."""

    def __init__(self, candidate: Candidate, name: str, env: Mapping[str, str], throughput: bool) -> None:
        self.name = name
        self.candidate = candidate
        self.throughput = throughput
        self.child = Child(
            "accel.timing.blocks:BlockRunner", {"candidate": candidate}, env=env, inherited=users_environment()
        )
        self.opened: Opened | None = None
        self.pass_seconds = 0.0
        self.feeds = 1
        self.on_gpu = False
        self.rounds: list[Block] = []
        self.found: dict[str, Any] = {"options": dict(candidate.options)}  # the fields of the candidate's row
        self.is_slower = False  # True if the lane gets no further rounds, because another lane is surely faster
        self.error: str | None = None

    def start(self, feeds: Sequence[Feeds]) -> FirstRun:
        """Loads the candidate and runs every feed once."""
        self.feeds = len(feeds)
        self.opened = self.child.call("open")
        report(f"bench: first run of {self.name}")
        first: FirstRun = self.child.call("first_run", feeds=list(feeds))
        self.on_gpu = first.on_gpu
        self.found |= {"runtime": self.opened.runtime, "load_ms": self.opened.load_ms, "first_run_ms": first.ms}
        return first

    def calibrate(self, block_seconds: float) -> None:
        """Measures the time of one pass over the feeds, then pauses the process."""
        self.pass_seconds = self.child.call("calibrate", limit_seconds=max(2.0, 5 * block_seconds))
        self.child.pause()

    def time_block(self, block_seconds: float, repeats: Repeats) -> None:
        """Times a block of runs, and times it again if other work spoiled it. Adds the block to ``rounds``."""
        self.rounds.append(repeats.best_of(lambda: self._block(block_seconds)))

    def _block(self, block_seconds: float) -> Block:
        """Times a block of runs.

        The number of passes is calculated from the fastest block so far. If the machine or the session has become
        slower, the block ends early. The block of every candidate may take the same multiple of its planned time.
        """
        runs = self.feeds * self.candidate.streams  # runs in a pass
        slow = self.pass_seconds > _SLOW_SECONDS * runs
        passes = 1 if slow else passes_for(block_seconds, self.pass_seconds, runs)
        planned = passes * self.pass_seconds
        self.child.resume()
        block: Block = self.child.call(
            "block",
            passes=passes,
            warm_up_seconds=0.0 if slow else block_seconds / 2,
            limit_seconds=_OVERRUN * max(block_seconds, planned),
            timeout=max(_PATIENCE_SECONDS, _PATIENCE * planned),
        )
        self.child.pause()
        # Other work may have slowed down the calibration. A fast block then corrects ``pass_seconds``, so that later
        # blocks have enough runs.
        self.pass_seconds = min(self.pass_seconds, block.seconds * runs / len(block.times))
        return block

    def timed(self) -> Timed:
        """Returns the blocks so far."""
        return Timed(blocks=self.rounds, feeds=self.feeds, throughput=self.throughput, on_gpu=self.on_gpu)

    def fail(self, error: BaseException) -> None:
        """Records ``error`` as the reason why the candidate is dropped. Kills the candidate's process, which frees its
        memory."""
        self.error = str(error)
        self.child.kill()

    def look_inside(self) -> None:
        """Reads the peak memory and the times of the GPU phases once, after the timing."""
        self.found["peak_rss_mb"] = peak_rss_mb(self.child.pid)
        self.child.resume()
        self.found["phases_ms"] = self.child.call("phases")
        self.child.pause()
