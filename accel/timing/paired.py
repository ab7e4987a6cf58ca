"""Times candidates in a paired schedule. Every candidate has its own process. While a candidate is timed, the processes
of all other candidates are stopped.

Thread pools of inference runtimes keep spinning after a run. If candidates share a process, or if their processes keep
running, each candidate slows down the others, by a factor of up to 2. Therefore, the processes of all other candidates
are stopped while a block of runs is timed. The order of the candidates is shuffled in each round, and candidates are
compared within the same round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from accel.child import Child
from accel.errors import AccelError, BadFeeds, ChildCrashed, UnknownName, UsageError
from accel.machine import available_cores, users_environment
from accel.progress import report
from accel.proof.compare import compare, worst
from accel.runtimes.base import recorded_options
from accel.signature import Feeds

from .blocks import Block, Candidate, FirstRun, Opened, joules_a_run, passes_for, throughput
from .environment import environment, peak_rss_mb
from .fast_runs import FastRuns
from .report import BenchReport, Row
from .same_model import is_same_model
from .statistics import (
    MIN_FLOOR,
    MIN_ROUNDS,
    NOISY_FLOOR,
    Ratio,
    floor_of,
    is_narrow,
    judge,
    round_medians,
    speedup,
    summarize,
)
from .statistics import baseline as baseline_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BenchReport", "Candidate", "measure"]

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
        self.found |= {"runtime": self.opened.runtime, "load_ms": self.opened.load_ms, "first_run_ms": first.ms}
        return first

    def calibrate(self, block_seconds: float) -> None:
        """Measures the time of one pass over the feeds, then pauses the process."""
        self.pass_seconds = self.child.call("calibrate", limit_seconds=max(2.0, 5 * block_seconds))
        self.child.pause()

    def time_block(self, block_seconds: float) -> None:
        """Times a block of runs and adds the block to ``rounds``.

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
        self.rounds.append(block)
        # Other work may have slowed down the calibration. A fast block then corrects ``pass_seconds``, so that later
        # blocks have enough runs.
        self.pass_seconds = min(self.pass_seconds, block.seconds * runs / len(block.times))

    @property
    def times(self) -> list[np.ndarray]:
        """Returns an array for each round with the nanoseconds of every run."""
        return [block.times for block in self.rounds]

    def values(self) -> np.ndarray:
        """Returns a float64 array with one time in milliseconds for each round: the median time of the round's runs. If
        throughputs are compared, the array has the total time of each round divided by the number of runs in the round.
        """
        import numpy as np

        if not self.throughput:
            return round_medians(self.times)
        return np.array([block.ms_a_run for block in self.rounds])

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


def measure(
    candidates: Sequence[Candidate],
    feeds: Feeds | Sequence[Feeds],
    *,
    baseline: int | str = 0,
    rounds: int = 9,
    block_seconds: float = 0.2,
    seed: int = 0,
    threads: int | None = None,
    streams: int | None = None,
    budget_seconds: float = 0.0,
    target_width: float = 0.05,
    limit_seconds: float | None = None,
    shorten: Literal["", "slower", "budget"] = "",
) -> BenchReport:
    """Times ``candidates`` and compares them with ``baseline``, which is the index or the name of a candidate. All
    candidates run the same feeds.

    ``feeds`` holds one set or several sets of inputs of the baseline. Every block runs each set of inputs equally
    often. The inputs are cast to the candidate's dtypes. Before the timing, the outputs of each candidate are compared
    with the baseline's outputs. If a candidate fails, or if its outputs differ from the baseline's outputs in names,
    shapes or NaN, the candidate is not timed, and its row has an ``error``.

    ``rounds`` is the number of rounds, at least 5. In each round, every candidate warms up and runs a block of about
    ``block_seconds`` seconds, with at least three runs. If a run takes longer than a second, a block is one pass over
    the feeds, without a warm-up. A block that takes twice its planned time ends early. The baseline runs in two
    processes. The difference between the two processes gives the noise floor. Candidates are compared with the times of
    both processes of the baseline. If other work disturbs the medians of the blocks, the fastest runs are compared
    instead (see ``accel.timing.fast_runs``). Further rounds run until the confidence interval of every speedup is at
    most ``target_width`` wide on a logarithmic scale. The total number of rounds is at most four times ``rounds``. No
    further round begins later than ``budget_seconds`` after the first round began. With the value ``budget`` for
    ``shorten``, ``budget_seconds`` also limits the ``rounds``: after the first 5 rounds, a round begins only if it is
    likely to end within the budget. ``limit_seconds`` limits the time of the whole call, including loading. After the
    first 5 rounds, a round begins only if it is likely to end within ``limit_seconds``. With the value ``slower`` for
    ``shorten``, a candidate that is surely slower than another candidate gets no further rounds after the first 5
    rounds.

    ``threads`` and ``streams`` (concurrent runs) apply to candidates that don't set these options. If neither
    ``threads`` nor ``streams`` is given, a candidate uses the numbers of threads and streams in its manifest. If the
    manifest doesn't have these numbers, the candidate uses one stream and all cores that this process may use. If only
    ``streams`` is given, ``threads`` is the number of cores. If only ``threads`` is given, ``streams`` is 1. If any
    candidate has several streams, throughputs are compared instead of median times.

    Raises the errors that occur while the baseline is loaded or run. Raises ``UsageError`` if two candidates have the
    same name or if there are too few rounds.
    """
    sets: list[Feeds] = [feeds] if isinstance(feeds, Mapping) else list(feeds)
    ends = math.inf if limit_seconds is None else time.monotonic() + limit_seconds
    index = _check(candidates, sets, baseline, rounds, block_seconds, budget_seconds)
    if streams is not None and streams < 1:
        raise UsageError(f"the number of streams can't be {streams}; use 1 or more")
    ready = [resolved(c, threads, streams) for c in candidates]
    most = max(c.streams for c in ready)
    machine = environment(threads or available_cores())
    lanes: list[Lane] = []
    with ExitStack() as stack:
        chosen = ready[index]
        # The baseline is loaded first to get the reference outputs. The process that is loaded last tends to be 1% or
        # 2% faster, so a second process of the baseline is loaded last. No candidate gets this advantage, and the noise
        # floor, the difference between the two processes of the baseline, includes the advantage.
        others = [(c, c.name) for c in ready if c is not chosen]
        queue = [(chosen, chosen.name), *others, (chosen, f"{chosen.name} (again)")]
        reference: FirstRun | None = None
        for step, (candidate, name) in enumerate(queue):
            report(f"bench: loading {name}", step / len(queue))
            lane = Lane(candidate, name, _variables(candidate), most > 1)
            stack.enter_context(lane.child)
            lanes.append(lane)
            if reference is None:
                reference = lane.start(sets)
                lane.found |= {"max_abs_diff": 0.0, "max_rel_diff": 0.0, "cosine": 1.0}
                lane.calibrate(block_seconds)
            else:
                _admit(lane, sets, reference, block_seconds)
        assert reference is not None
        twin = lanes[-1]
        if twin.error is not None:
            raise ChildCrashed(
                f"the baseline ran in one process and failed in a second process: {twin.error}; free some memory"
            )
        if shorten == "budget" and budget_seconds:
            ends = min(ends, time.monotonic() + budget_seconds)
        order = _run_rounds(lanes, rounds, block_seconds, seed, budget_seconds, target_width, ends, shorten == "slower")
        for lane in lanes:
            if lane.error is None:
                lane.look_inside()
    by_name = {lane.name: lane for lane in lanes[:-1]}
    return _report(
        [by_name[c.name] for c in candidates], lanes[0], twin, reference, machine, seed, block_seconds, order, most
    )


def resolved(candidate: Candidate, threads: int | None, streams: int | None) -> Candidate:
    """Returns the candidate with its number of streams and with all options of its session filled in."""
    options: dict[str, Any] = {"threads": available_cores(), "streams": 1, **recorded_options(candidate.artifact)}
    if threads or streams:
        # The artifact records a number of streams and a number of threads, which were chosen together. If the caller
        # gives one of these numbers, both recorded numbers are replaced.
        options |= {"threads": threads or available_cores(), "streams": streams or 1}
    options |= candidate.options
    return replace(candidate, options=options, streams=candidate.streams or options["streams"])


def _variables(candidate: Candidate) -> dict[str, str]:
    """Returns environment variables that set OpenMP's number of threads and disable torch's pool of compiler processes,
    because this pool can't be paused."""
    share = (candidate.options["threads"] or available_cores()) // candidate.streams
    return {"OMP_NUM_THREADS": str(max(1, share)), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _check(
    candidates: Sequence[Candidate],
    feeds: Sequence[Feeds],
    baseline: int | str,
    rounds: int,
    block_seconds: float,
    budget_seconds: float,
) -> int:
    """Returns the index of the baseline. Raises ``UsageError`` or ``UnknownName`` for bad arguments."""
    names = [c.name for c in candidates]
    if not candidates or not feeds:
        raise UsageError("there is nothing to time; give at least one candidate and one set of inputs")
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(f"two candidates are called {twice!r}; give each candidate its own name")
    if rounds < MIN_ROUNDS:
        raise UsageError(f"{rounds} rounds are too few to tell a difference from noise; use at least {MIN_ROUNDS}")
    if not block_seconds > 0:
        raise UsageError(f"a block of runs can't take {block_seconds:g} s; use 0.1 to 1 s")
    if not budget_seconds >= 0:
        raise UsageError(f"the time budget can't be {budget_seconds:g} s; use 0 s or more")
    if isinstance(baseline, str):
        if baseline not in names:
            raise UnknownName(f"no candidate is called {baseline!r}; choose the baseline from {', '.join(names)}")
        return names.index(baseline)
    return range(len(candidates))[baseline]


def _admit(lane: Lane, feeds: Sequence[Feeds], reference: FirstRun, block_seconds: float) -> None:
    """Loads a candidate and compares its outputs with the reference outputs. If the candidate can't be timed, records
    the error and drops the candidate."""
    try:
        first = lane.start(feeds)
        lane.found |= _differences(reference, first)
        lane.calibrate(block_seconds)
    except BadFeeds as error:
        lane.fail(BadFeeds(f"not comparable: {error}"))
    except (AccelError, OSError) as error:
        lane.fail(error)


def _differences(reference: FirstRun, first: FirstRun) -> dict[str, float]:
    """Returns the largest differences between the outputs of two candidates over all outputs and feeds. Raises
    ``BadFeeds`` if the outputs can't be compared."""
    wanted, has = set(reference.outputs[0]), set(first.outputs[0])
    if wanted != has:
        own, others = (", ".join(sorted(names)) for names in (has, wanted))
        raise BadFeeds(f"the outputs of this model are {own}, but the outputs of the baseline are {others}")
    found = worst([compare(a, b) for a, b in zip(reference.outputs, first.outputs, strict=True)])
    for difference in found.values():
        if difference.problem:
            raise BadFeeds(f"output {difference.output!r}: {difference.problem}")
    return {
        "max_abs_diff": max(d.max_abs for d in found.values()),
        "max_rel_diff": max(d.rel_l2 for d in found.values()),
        "cosine": min(d.cosine for d in found.values()),
    }


def _run_rounds(
    lanes: Sequence[Lane],
    rounds: int,
    block_seconds: float,
    seed: int,
    budget_seconds: float,
    target_width: float,
    ends: float,
    only_fastest: bool = False,
) -> list[tuple[str, ...]]:
    """Runs the rounds and adds the blocks to ``lane.rounds``. Returns the order of the candidates in each round.

    ``ends`` is the deadline of the last round, as a time of ``time.monotonic``.
    """
    shuffle = random.Random(seed).shuffle
    order: list[tuple[str, ...]] = []
    begun = time.monotonic()
    while len(order) < rounds or (
        len(order) < 4 * rounds
        and time.monotonic() - begun < budget_seconds
        and not _all_narrow(lanes, seed, target_width)
    ):
        so_far = time.monotonic()
        if len(order) >= MIN_ROUNDS and so_far + (so_far - begun) / len(order) > ends:
            break
        report(f"bench: round {len(order) + 1}", min(1.0, len(order) / rounds))
        if only_fastest and len(order) >= MIN_ROUNDS:
            _drop_slower(lanes[1:-1], seed)
        turn = [lane for lane in lanes if lane.error is None and not lane.is_slower]
        shuffle(turn)
        for lane in turn:
            try:
                lane.time_block(block_seconds)
            except (AccelError, OSError) as error:
                if lane is lanes[0] or lane is lanes[-1]:
                    raise
                lane.fail(error)
        order.append(tuple(lane.name for lane in turn))
    return order


def _drop_slower(lanes: Sequence[Lane], seed: int) -> None:
    """Sets ``is_slower`` of the lanes that are surely slower than the fastest lane. Without other work on the machine,
    two processes of one model differ by less than ``MIN_FLOOR``."""
    timed = [lane for lane in lanes if lane.error is None and not lane.is_slower]
    best = min(timed, key=lambda lane: float(lane.values().mean()), default=None)
    for lane in timed:
        if best is not None and lane is not best:
            lane.is_slower = judge(speedup(lane.values(), best.values(), seed=seed), MIN_FLOOR) == "faster"


def _all_narrow(lanes: Sequence[Lane], seed: int, target: float) -> bool:
    base = baseline_of(lanes[0].values(), lanes[-1].values(), seed=seed)
    timed = [lane for lane in lanes[1:-1] if lane.error is None and not lane.is_slower]
    ratios = [speedup(base.medians, lane.values(), seed=seed) for lane in timed]
    return all(is_narrow(ratio, target) for ratio in (base.itself, *ratios))


def _report(
    lanes: Sequence[Lane],
    base: Lane,
    twin: Lane,
    reference: FirstRun,
    machine: Mapping[str, Any],
    seed: int,
    block_seconds: float,
    order: Sequence[tuple[str, ...]],
    streams: int,
) -> BenchReport:
    both = baseline_of(base.values(), twin.values(), seed=seed)
    floor, itself = both.floor, both.itself
    fast: FastRuns | None = None
    if streams == 1 and base.feeds == 1:  # several feeds have several fastest times
        found = FastRuns(first=base.times, second=twin.times, seed=seed)
        if found.stalled or (floor > NOISY_FLOOR and found.floor < floor):
            fast, floor, itself = found, found.floor, found.itself
    rows = []
    batch = reference.batch

    def ratio_of(lane: Lane) -> Ratio:
        if fast is not None and lane is not base:
            return fast.speedup(lane.times)
        medians = lane.values()
        return speedup(both.medians[: len(medians)], both.medians if lane is base else medians, seed=seed)

    timed = [lane for lane in lanes if lane.error is None]
    ratios = {lane.name: ratio_of(lane) for lane in timed}
    same = [lane.name for lane in timed if lane is not base and is_same_model(lane.candidate, base.candidate)]
    # A candidate that is the baseline under another name shows noise, as the second process of the baseline does.
    floor = max(floor, *(floor_of(ratios[name]) for name in same), 0.0)
    for lane in lanes:
        if lane.error is not None:
            rows.append(Row(name=lane.name, error=lane.error, **lane.found))
            continue
        # The row of the baseline includes the runs of both baseline processes.
        medians = both.medians if lane is base else lane.values()
        blocks = [*base.rounds, *twin.rounds] if lane is base else lane.rounds
        summary = summarize([block.times for block in blocks])
        ratio = ratios[lane.name]
        rows.append(
            Row(
                name=lane.name,
                median_ms=summary.median_ms,
                p90_ms=summary.p90_ms,
                p99_ms=summary.p99_ms,
                mean_ms=summary.mean_ms,
                iterations=summary.iterations,
                rounds=len(lane.rounds),
                round_medians_ms=tuple(medians.tolist()),
                speedup=ratio.value,
                ci95=(ratio.low, ratio.high),
                verdict="baseline" if lane is base else "identical" if lane.name in same else judge(ratio, floor),
                samples_per_second=throughput(blocks, batch),
                joules_per_run=joules_a_run(blocks),
                **lane.found,
            )
        )
    return BenchReport(
        rows=tuple(rows),
        baseline=base.name,
        noise_floor=floor,
        twin=itself,
        statistic="median" if fast is None else "fast runs",
        sizes=reference.sizes[0],
        environment=machine,
        seed=seed,
        block_seconds=block_seconds,
        order=tuple(order),
        streams=streams,
        samples={lane.name: tuple(lane.times) for lane in (*lanes, twin)},
    )
