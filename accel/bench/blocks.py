"""What runs in the process of a candidate: the session, its feeds, and the clock around each run."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.child import resolve
from accel.errors import BadFeeds, MissingExtra
from accel.runtimes.base import Session, default_runtime, get_runtime, open_session
from accel.signature import Feeds, Signature

if TYPE_CHECKING:
    import numpy as np

MIN_ITERATIONS = 3
MAX_ITERATIONS = 100_000
# A pass is steady once the last few are not this much shorter than the few before them.
_STILL_FALLING = 0.97
_WINDOW = 3


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    ``runtime`` and ``options`` (fields of ``SessionOptions``): as in ``open_session``; what isn't given is taken from
    the artifact's manifest. ``opener``: the import string of what makes the session from this candidate, for what accel
    has no runtime for; the artifact then only says what goes in and out.
    """

    name: str
    artifact: Artifact
    runtime: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    opener: str = "accel.bench.blocks:open_candidate"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """``load_ms``: opening the session, the import of its library not included."""

    runtime: str
    signature: Signature
    load_ms: float


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """``outputs`` by name, one set a feed; ``ms`` of the very first run; ``sizes`` of the dynamic dims of each feed."""

    outputs: list[dict[str, np.ndarray]]
    ms: float
    sizes: list[dict[str, int]]


def open_candidate(candidate: Candidate) -> Session:
    """The session of a candidate. Its library is imported before, see ``BlockRunner.open``."""
    return open_session(candidate.artifact, candidate.runtime, candidate.options)


class BlockRunner:
    """One candidate, loaded. Made in its child process; every method is one call over the pipe."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._session: Session | None = None
        self._feeds: list[dict[str, np.ndarray]] = []

    def open(self) -> Opened:
        """Open the session. Raises what opening it raises."""
        candidate, runtime = self._candidate, self._candidate.runtime or ""
        if candidate.opener == Candidate.opener:
            found = get_runtime(runtime) if runtime else default_runtime(candidate.artifact)
            runtime = found.name
            if not found.installed:
                raise MissingExtra(found.module, found.extra or "all-cpu")
            # Importing torch takes seconds and says nothing about the model.
            importlib.import_module(found.session.partition(":")[0])
        opener = resolve(candidate.opener)
        start = time.perf_counter_ns()
        self._session = opener(candidate)
        load_ms = (time.perf_counter_ns() - start) / 1e6
        return Opened(runtime=runtime, signature=self._session.signature, load_ms=load_ms)

    def first_run(self, feeds: Sequence[Feeds]) -> FirstRun:
        """Keep ``feeds``, in this session's dtypes, and run each once. ``BadFeeds`` where its inputs are others."""
        from accel.verify.gates import cast_feeds

        session = self._opened
        wanted, given = {spec.name for spec in session.signature.inputs}, set(feeds[0])
        if wanted != given:
            raise BadFeeds(
                f"its inputs are {', '.join(sorted(wanted))}, those of the baseline {', '.join(sorted(given))}; "
                "give both the same names"
            )
        self._feeds = [cast_feeds(session, one) for one in feeds]
        sizes = [session.signature.check_feeds(one) for one in self._feeds]
        start = time.perf_counter_ns()
        first = session.run(self._feeds[0])
        ms = (time.perf_counter_ns() - start) / 1e6
        # Copied: a runtime may hand out its own buffers and fill them again in the next run.
        outputs = [{name: value.copy() for name, value in first.items()}]
        for one in self._feeds[1:]:
            outputs.append({name: value.copy() for name, value in session.run(one).items()})
        return FirstRun(outputs=outputs, ms=ms, sizes=sizes)

    def calibrate(self, limit_seconds: float) -> float:
        """How many seconds a pass over the feeds takes once warm."""
        times = warm_up(self._pass, limit_seconds=limit_seconds)
        return statistics.median(times[-_WINDOW:]) / 1e9

    def block(self, passes: int, warm_up_seconds: float) -> np.ndarray:
        """Time ``passes`` passes over the feeds, warmed up first: int64[passes * feeds], nanoseconds a run."""
        import numpy as np

        run, clock, feeds = self._opened.run, time.perf_counter_ns, self._feeds
        warm_up(self._pass, limit_seconds=warm_up_seconds)
        times: list[int] = []
        collecting = gc.isenabled()
        gc.disable()  # a collection that falls into one candidate's run is no property of it
        try:
            for _ in range(passes):
                for one in feeds:
                    start = clock()
                    run(one)
                    times.append(clock() - start)
        finally:
            if collecting:
                gc.enable()
        return np.array(times, dtype=np.int64)

    @property
    def _opened(self) -> Session:
        assert self._session is not None, "open() comes first"
        return self._session

    def _pass(self) -> None:
        run = self._opened.run
        for one in self._feeds:
            run(one)


def passes_for(block_seconds: float, pass_seconds: float, feeds: int) -> int:
    """How many passes over ``feeds`` sets of inputs make a block: at least ``MIN_ITERATIONS`` runs."""
    fewest = -(-MIN_ITERATIONS // feeds)
    most = max(fewest, MAX_ITERATIONS // feeds)
    return min(most, max(fewest, round(block_seconds / max(pass_seconds, 1e-9))))


def warm_up(
    run: Callable[[], object], *, limit_seconds: float, clock: Callable[[], int] = time.perf_counter_ns
) -> list[int]:
    """Call ``run`` until it gets no faster, for at most about ``limit_seconds``; the time of each call in ns.

    A process that was just resumed has cold caches and sleeping threads, one that was just loaded also compiles.
    """
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
    """Whether the last ``_WINDOW`` times are no longer falling, compared with as many before them."""
    if len(times) < 2 * _WINDOW:
        return False
    before, last = times[-2 * _WINDOW : -_WINDOW], times[-_WINDOW:]
    return statistics.median(last) >= _STILL_FALLING * statistics.median(before)
