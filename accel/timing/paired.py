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
from typing import Any, Literal

from accel.errors import AccelError, BadFeeds, ChildCrashed, UnknownName, UsageError
from accel.machine import available_cores
from accel.progress import report
from accel.proof.compare import compare, worst
from accel.runtimes.base import recorded_options
from accel.signature import Feeds

from .blocks import Candidate, FirstRun, joules_a_run, throughput
from .environment import environment
from .lane import Lane
from .repeats import Repeats
from .report import BenchReport, Row
from .same_model import is_same_model
from .statistics import MIN_FLOOR, MIN_ROUNDS, Ratio, floor_of, is_narrow, judge, summarize
from .witnesses import Timed, Witness, lost, witness

__all__ = ["BenchReport", "Candidate", "measure"]

# The share of the time for further rounds that repeats of spoiled blocks may take.
REPEATING = 0.3


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
    both processes of the baseline. If other work disturbs the medians of the blocks, the fastest runs or the CPU times
    are compared instead (see ``accel.timing.witnesses``). Blocks that other work spoils are timed again, for up to
    ``REPEATING`` of ``budget_seconds``. Further rounds run until the confidence interval of every speedup is at
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
        repeats = Repeats(REPEATING * budget_seconds)
        order = _run_rounds(
            lanes, rounds, block_seconds, seed, budget_seconds, target_width, ends, repeats, shorten == "slower"
        )
        for lane in lanes:
            if lane.error is None:
                lane.look_inside()
    by_name = {lane.name: lane for lane in lanes[:-1]}
    return _report(
        [by_name[c.name] for c in candidates],
        lanes[0],
        twin,
        reference,
        machine,
        seed,
        block_seconds,
        order,
        most,
        repeats.count,
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
    repeats: Repeats,
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
            _drop_slower(lanes, seed)
        turn = [lane for lane in lanes if lane.error is None and not lane.is_slower]
        shuffle(turn)
        for lane in turn:
            try:
                lane.time_block(block_seconds, repeats)
            except (AccelError, OSError) as error:
                if lane is lanes[0] or lane is lanes[-1]:
                    raise
                lane.fail(error)
        order.append(tuple(lane.name for lane in turn))
    return order


def _compared(lanes: Sequence[Lane], seed: int) -> tuple[Witness, dict[str, Ratio]]:
    """Returns the witness that decides at present, and the speedup of each lane that still runs. The first lane and the
    last lane are the two processes of the baseline."""
    timed = {lane.name: lane.timed() for lane in lanes if lane.error is None and not lane.is_slower}
    first, second = timed.pop(lanes[0].name), timed.pop(lanes[-1].name)
    decides = witness(first, second, list(timed.values()), seed=seed)
    return decides, {name: decides.speedup(one) for name, one in timed.items()}


def _drop_slower(lanes: Sequence[Lane], seed: int) -> None:
    """Sets ``is_slower`` of the lanes that are surely slower than the fastest lane. Their intervals don't overlap, and
    the speedups differ by more than the noise floor."""
    decides, ratios = _compared(lanes, seed)
    best = max(ratios.values(), key=lambda ratio: ratio.value, default=None)
    margin = 1 + max(MIN_FLOOR, floor_of(decides.itself))
    for lane in lanes[1:-1]:
        if best is not None and (ratio := ratios.get(lane.name)) is not None:
            lane.is_slower = ratio.high < best.low and ratio.value * margin < best.value


def _all_narrow(lanes: Sequence[Lane], seed: int, target: float) -> bool:
    decides, ratios = _compared(lanes, seed)
    return all(is_narrow(ratio, target) for ratio in (decides.itself, *ratios.values()))


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
    repeated: int,
) -> BenchReport:
    timed = [lane for lane in lanes if lane.error is None]
    blocks = {lane.name: lane.timed() for lane in timed}
    first, second = blocks[base.name], twin.timed()
    decides = witness(first, second, [one for one in blocks.values() if one is not first], seed=seed)
    ratios = {name: decides.speedup(one) for name, one in blocks.items()}
    floor = floor_of(decides.itself)
    rows, batch = [], reference.batch
    same = [lane.name for lane in timed if lane is not base and is_same_model(lane.candidate, base.candidate)]
    # A candidate that is the baseline under another name shows noise, as the second process of the baseline does.
    floor = max(floor, *(floor_of(ratios[name]) for name in same), 0.0)
    for lane in lanes:
        if lane.error is not None:
            rows.append(Row(name=lane.name, error=lane.error, **lane.found))
            continue
        # The row of the baseline includes the runs of both baseline processes.
        runs = [*base.rounds, *twin.rounds] if lane is base else lane.rounds
        summary = summarize([block.times for block in runs])
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
                round_medians_ms=tuple(_values(blocks[lane.name], second if lane is base else None, cpu=False)),
                round_cpu_ms=tuple(_values(blocks[lane.name], second if lane is base else None, cpu=True)),
                speedup=ratio.value,
                ci95=(ratio.low, ratio.high),
                verdict="baseline" if lane is base else "identical" if lane.name in same else judge(ratio, floor),
                samples_per_second=throughput(runs, batch),
                joules_per_run=joules_a_run(runs),
                cores=blocks[lane.name].cores,
                **lane.found,
            )
        )
    return BenchReport(
        rows=tuple(rows),
        baseline=base.name,
        noise_floor=floor,
        twin=decides.itself,
        statistic=decides.statistic,
        lost=lost([*blocks.values(), second]),
        repeated=repeated,
        sizes=reference.sizes[0],
        environment=machine,
        seed=seed,
        block_seconds=block_seconds,
        order=tuple(order),
        streams=streams,
        samples={lane.name: tuple(lane.timed().times) for lane in (*lanes, twin)},
    )


def _values(timed: Timed, twin: Timed | None, *, cpu: bool) -> list[float]:
    """Returns the milliseconds of a run in each round. For the baseline, returns the geometric means of both
    processes."""
    import numpy as np

    both = [one.cpu_values() if cpu else one.values() for one in (timed, twin) if one is not None]
    values: list[float] = np.exp(np.mean(np.log(np.maximum(both, 1e-9)), axis=0)).tolist()
    return values
