"""Holds a candidate's session and feeds in the candidate's own process, and times each run."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.child import resolve
from accel.errors import BadFeeds, MissingExtra
from accel.runtimes.base import Session, default_runtime, get_runtime, open_session
from accel.signature import BATCH, Feeds, Signature

from .disturbance import Counters, usage
from .energy import EnergyCounter

if TYPE_CHECKING:
    import numpy as np

MIN_ITERATIONS = 3
MAX_ITERATIONS = 100_000
# Warm-up continues while the run time falls. The run time falls if the median of the last ``_WINDOW`` times is less
# than ``_STILL_FALLING`` times the median of the previous ``_WINDOW`` times.
_STILL_FALLING = 0.97
_WINDOW = 3
_PHASE_RUNS = 21


@dataclass(frozen=True)
class Candidate:
    """A model to time, with its runtime and options. ``runtime`` and ``options`` (fields of ``SessionOptions``) mean
    the same as in ``open_session``. By default, the runtime and the options come from the manifest. ``opener`` is the
    import string of a function that opens the session of a candidate, for models without a runtime in accel. The
    artifact of a candidate with an ``opener`` needs only a signature. ``streams`` is the number of concurrent runs. If
    ``streams`` is 0, the number of concurrent runs comes from ``options``. If a session doesn't support concurrent
    runs, each stream gets its own session with a share of the threads.
    """

    name: str
    artifact: Artifact
    runtime: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    opener: str = "accel.timing.blocks:open_candidate"
    streams: int = 0


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An opened candidate. ``load_ms`` is the time in milliseconds to open the first session, without the time to
    import the session's library."""

    runtime: str
    signature: Signature
    load_ms: float


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """The results of the first run on each feed.

    ``outputs`` has one dict per feed, which maps names to outputs. ``ms`` is the time of the very first run in
    milliseconds. ``sizes`` holds the sizes of the dynamic dims of each feed. ``batch`` is the number of samples in a
    feed. ``on_gpu`` is true if the process has a GPU open.
    """

    outputs: list[dict[str, np.ndarray]]
    ms: float
    sizes: list[dict[str, int]]
    batch: int
    on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """The measurements of a block.

    ``times`` is an int64 array with the nanoseconds of each run. ``seconds`` is the time from the start of the first
    run to the end of the last run. If streams overlap, ``seconds`` is less than the sum of ``times``. ``joules`` is the
    energy of the machine during the block, or None if the machine has no energy counter. ``cpu_seconds``, ``cores`` and
    ``lost`` are the CPU time of the process, the cores that the process could use, and the share of these cores that
    other work took (see ``accel.timing.disturbance.Usage``).
    """

    times: np.ndarray
    seconds: float
    joules: float | None = None
    cpu_seconds: float = 0.0
    cores: float = 0.0
    lost: float = 0.0

    @property
    def ms_a_run(self) -> float:
        """Returns the block's milliseconds divided by its number of runs, which is the inverse of the throughput."""
        return self.seconds * 1e3 / len(self.times)

    @property
    def cpu_ms_a_run(self) -> float:
        """Returns the CPU time of the block in milliseconds divided by its number of runs."""
        return self.cpu_seconds * 1e3 / len(self.times)


def open_candidate(candidate: Candidate) -> Session:
    """Opens the session of a candidate. ``BlockRunner.open`` has already imported the session's library."""
    return open_session(candidate.artifact, candidate.runtime, candidate.options)


class BlockRunner:
    """A loaded candidate in a child process. The parent process calls the methods of this class over a pipe."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._sessions: list[Session] = []  # one session per stream, or one session for all streams
        self._feeds: list[dict[str, np.ndarray]] = []
        self._streams: int = candidate.streams or candidate.options.get("streams", 1)
        self._pool = ThreadPoolExecutor(max_workers=self._streams)
        self._energy = EnergyCounter.find()
        self._counters = Counters()

    def open(self) -> Opened:
        """Opens the sessions. Raises the session's error if a session can't be opened."""
        candidate, runtime = self._candidate, self._candidate.runtime or ""
        concurrent = False
        if candidate.opener == Candidate.opener:
            found = get_runtime(runtime) if runtime else default_runtime(candidate.artifact)
            runtime = found.name
            if not found.installed:
                raise MissingExtra(found.module, found.extra or "all-cpu")
            # Libraries are imported before the load time is measured, because importing torch takes seconds for any
            # model.
            module, _, name = found.session.partition(":")
            concurrent = getattr(importlib.import_module(module), name).concurrent
        if self._streams > 1 and not concurrent:
            share = {"threads": max(1, candidate.options.get("threads", 0) // self._streams), "streams": 1}
            candidate = replace(candidate, options={**candidate.options, **share})
        opener = resolve(candidate.opener)
        start = time.perf_counter_ns()
        session: Session = opener(candidate)
        load_ms = (time.perf_counter_ns() - start) / 1e6
        self._sessions = [session, *(session if concurrent else opener(candidate) for _ in range(self._streams - 1))]
        return Opened(runtime=runtime, signature=self._opened.signature, load_ms=load_ms)

    def first_run(self, feeds: Sequence[Feeds]) -> FirstRun:
        """Casts ``feeds`` to this session's dtypes, stores the cast feeds and runs each feed once. Raises ``BadFeeds``
        if the names of the session's inputs differ from the names in ``feeds``."""
        from accel.proof.gates import cast_feeds

        session = self._opened
        wanted, given = {spec.name for spec in session.signature.inputs}, set(feeds[0])
        if wanted != given:
            raise BadFeeds(
                f"the inputs of this model are {', '.join(sorted(wanted))}, but the inputs of the baseline are "
                f"{', '.join(sorted(given))}; give the inputs of both models the same names"
            )
        self._feeds = [cast_feeds(session, one) for one in feeds]
        sizes = [session.signature.check_feeds(one) for one in self._feeds]
        start = time.perf_counter_ns()
        first = session.run(self._feeds[0])
        ms = (time.perf_counter_ns() - start) / 1e6
        # Outputs are copied, because a runtime may return its own buffers and reuse them in the next run.
        outputs = [{name: value.copy() for name, value in first.items()}]
        for one in self._feeds[1:]:
            outputs.append({name: value.copy() for name, value in session.run(one).items()})
        batch = batch_of(session.signature, self._feeds[0])
        return FirstRun(outputs=outputs, ms=ms, sizes=sizes, batch=batch, on_gpu=self._counters.uses_gpu())

    def calibrate(self, limit_seconds: float) -> float:
        """Returns the seconds that one pass over the feeds takes after warm-up."""
        times = warm_up(self._pass, limit_seconds=limit_seconds)
        return statistics.median(times[-_WINDOW:]) / 1e9

    def block(self, passes: int, warm_up_seconds: float, limit_seconds: float) -> Block:
        """Warms up unless ``warm_up_seconds`` is 0, then times ``passes`` passes over the feeds in each stream.

        If the block takes longer than ``limit_seconds``, it ends after the current pass.
        """
        import numpy as np

        if warm_up_seconds:
            warm_up(self._pass, limit_seconds=warm_up_seconds)
        one_pass = self._feeds * len(self._sessions)
        collecting = gc.isenabled()
        gc.disable()  # a garbage collection would slow down a run of one candidate
        try:
            before = self._energy.read() if self._energy else ()
            counted = self._counters.read()
            begun = time.perf_counter_ns()
            times = self._timed(passes_until(one_pass, passes, begun + int(limit_seconds * 1e9)))
            seconds = (time.perf_counter_ns() - begun) / 1e9
            used = usage(counted, self._counters.read(), seconds)
            joules = self._energy.joules(before, self._energy.read()) if self._energy else None
        finally:
            if collecting:
                gc.enable()
        return Block(
            times=np.array(times, dtype=np.int64),
            seconds=seconds,
            joules=joules,
            cpu_seconds=used.cpu,
            cores=used.cores,
            lost=used.lost,
        )

    def phases(self) -> dict[str, float] | None:
        """Returns the median milliseconds of each phase of a run on a GPU, or None if the session can't time phases."""
        measure: Callable[[Feeds], dict[str, float]] | None = getattr(self._opened, "phases", None)
        if measure is None:
            return None
        found = [measure(self._feeds[i % len(self._feeds)]) for i in range(_PHASE_RUNS)]
        return {name: statistics.median(one[name] for one in found) for name in found[0]}

    def _timed(self, work: Iterable[Feeds]) -> list[int]:
        """Runs each feed of ``work`` and returns the nanoseconds of each run. If there are several streams, they take
        their feeds from one queue."""
        if len(self._sessions) == 1:
            return run_all(self._opened, work)
        left = Shared(work)
        return [ns for times in self._pool.map(lambda session: run_all(session, left), self._sessions) for ns in times]

    @property
    def _opened(self) -> Session:
        assert self._sessions, "open() comes first"
        return self._sessions[0]

    def _pass(self) -> None:
        self._timed(self._feeds * len(self._sessions))


def batch_of(signature: Signature, feeds: Feeds) -> int:
    """Returns the number of samples in ``feeds``: the size of the dim called ``batch``, or else of the first dim, or 1
    if the inputs have different first dims."""
    for spec in signature.inputs:
        if BATCH in spec.shape:
            return int(feeds[spec.name].shape[spec.shape.index(BATCH)])
    first = {feeds[spec.name].shape[0] for spec in signature.inputs if spec.shape}
    return first.pop() if len(first) == 1 else 1


def run_all(session: Session, work: Iterable[Feeds]) -> list[int]:
    """Runs the feeds that are left in ``work``. Returns the nanoseconds of each run."""
    run, clock, times = session.run, time.perf_counter_ns, []
    for feeds in work:
        start = clock()
        run(feeds)
        times.append(clock() - start)
    return times


def passes_until(
    feeds: Sequence[Feeds], passes: int, ends: int, clock: Callable[[], int] | None = None
) -> Iterator[Feeds]:
    """Yields all of ``feeds`` up to ``passes`` times. After the time ``ends`` (in nanoseconds of ``clock``), no new
    pass begins.

    Yields at least one pass. Every pass is completed, so that each set of inputs runs equally often.
    """
    clock = clock or time.perf_counter_ns
    for done in range(passes):
        if done and clock() >= ends:
            return
        yield from feeds


class Shared:
    """An iterator that several threads share. Each item is given to only one thread."""

    def __init__(self, items: Iterable[Feeds]) -> None:
        self._items = iter(items)
        self._lock = Lock()  # threads can't call a generator concurrently

    def __iter__(self) -> Iterator[Feeds]:
        return self

    def __next__(self) -> Feeds:
        with self._lock:
            return next(self._items)


def passes_for(block_seconds: float, pass_seconds: float, feeds: int) -> int:
    """Returns the number of passes in a block of at least ``MIN_ITERATIONS`` runs. A pass has ``feeds`` runs."""
    fewest = -(-MIN_ITERATIONS // feeds)
    most = max(fewest, MAX_ITERATIONS // feeds)
    return min(most, max(fewest, round(block_seconds / max(pass_seconds, 1e-9))))


def warm_up(run: Callable[[], object], *, limit_seconds: float, clock: Callable[[], int] | None = None) -> list[int]:
    """Calls ``run`` until the calls get no faster or ``limit_seconds`` have passed. Returns the nanoseconds of each
    call.

    The first calls are slow, because a resumed process has cold caches and sleeping threads, and a new process may have
    to compile first.
    """
    clock = clock or time.perf_counter_ns
    times: list[int] = []
    begun = clock()
    while True:
        start = clock()
        run()
        now = clock()
        times.append(now - start)
        if is_steady(times) or now - begun > limit_seconds * 1e9:
            return times


def is_steady(times: Sequence[int]) -> bool:
    """Tells whether the last ``_WINDOW`` times are about as long as the ``_WINDOW`` times before them."""
    if len(times) < 2 * _WINDOW:
        return False
    before, last = times[-2 * _WINDOW : -_WINDOW], times[-_WINDOW:]
    return statistics.median(last) >= _STILL_FALLING * statistics.median(before)


def throughput(blocks: Sequence[Block], batch: int) -> float:
    """Returns the throughput in samples per second."""
    return batch * sum(len(block.times) for block in blocks) / sum(block.seconds for block in blocks)


def joules_a_run(blocks: Sequence[Block]) -> float | None:
    """Returns the energy of a run in joules, or None if a block has no reading."""
    used = [block.joules for block in blocks if block.joules is not None]
    return sum(used) / sum(len(block.times) for block in blocks) if len(used) == len(blocks) else None
