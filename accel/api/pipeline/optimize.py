"""Optimizes the parts of a pipeline, and judges and measures the whole pipeline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import AccelError, BadData, UsageError, shortened
from accel.optimizer.attempt import judged
from accel.optimizer.budget import SECONDS_A_CANDIDATE, SOURCES, Budget
from accel.optimizer.candidate import CandidateResult, megabytes
from accel.optimizer.judge.comparison import Judge, Metric
from accel.optimizer.measure.workload import Workload
from accel.optimizer.notes import data_notes
from accel.optimizer.request import OptimizeRequest
from accel.optimizer.result import Optimization
from accel.optimizer.run import published_choice, run, source_row, timed_workload
from accel.optimizer.search import Search
from accel.progress import report
from accel.proof.recorded_gate import write_recorded
from accel.proof.stream import SampleStream
from accel.runtimes.base import SessionOptions, default_runtime
from accel.runtimes.call import as_array, tensors_given
from accel.runtimes.pipeline.file import parts_of
from accel.runtimes.pipeline.session import PipelineSession
from accel.sources.notes import source_notes, training_note
from accel.sources.source import Source
from accel.spelling import option
from accel.tables.limits import STAGE_LIMITS

from ..as_onnx import Exported
from .calls import Calls, named
from .export import check_folders, joined

_BATCH = 8
# The number of the pipeline's runs in its gate, its judgement and its shortest measurement.
_RUNS_OF_THE_WHOLE = 60
# A note about a part names at most this many reasons.
_SHOWN = 4
# The name of the table row for the pipeline whose parts are all optimized.
_ALL = "all parts"


def optimize_pipeline(
    request: OptimizeRequest, src: Artifact, metric: str | Metric | None, cache: StageCache, budget: Budget
) -> Optimization:
    """Optimizes each part of the exported pipeline ``src``, and publishes the optimized parts if the whole pipeline is
    correct and faster. If the pipeline is not correct, restores the original parts one by one until the pipeline is
    correct. The part whose outputs changed most is restored first.

    Raises ``UsageError`` for options that name the inputs of a single model.
    """
    if request.profiles:
        raise UsageError(
            f"this source is a pipeline, but {option('profiles')} names the inputs of a single model; leave out "
            f"{option('profiles')}, or optimize each part alone"
        )
    check_folders(request.out, parts_of(src))
    stream = SampleStream(request.data, src.signature) if request.data else None
    # The judge reads only samples that were not used to calibrate the parts.
    calibrating = (len(stream) if request.eval_data else (len(stream) + 1) // 2) if stream else 0
    work = timed_workload(request, src, stream)
    judge = Judge(src, request.judged_on, metric, skip=0 if request.eval_data else calibrating)
    judge.check(cache)
    source = source_row(src, judge, request.cores)
    search = Search(
        source=source, workload=work, threads=request.cores, rounds=request.rounds, cache=cache, budget=budget
    )
    kept = _seconds_for_the_whole(src, work) if budget.limited else 0.0
    with TemporaryDirectory(prefix="accel-") as temporary:
        folder = Path(temporary)
        made, notes = _optimized_parts(request, src, stream, calibrating, folder, cache, budget, kept)
        rows = _rows(src, made, judge, request.max_drop, cache, budget)
        chosen = search.best(rows)
        done = f"{work.note}, {request.cores} threads"
        nothing = "anything was measured: the source itself was taken"
        if search.environment:
            notes.append(done)
        elif made:
            notes.append(budget.reason(nothing) if rows else "no part became faster")
        notes += [*data_notes(request, src), *source_notes(src), *filter(None, [training_note(src)])]
        return published_choice(request, src, chosen, [source, *rows], search.environment, notes)


def _seconds_for_the_whole(src: Artifact, work: Workload) -> float:
    """Returns an estimate of the seconds that it takes to join the parts, to judge the pipeline and to measure it. The
    estimate comes from the second of two runs of the pipeline."""
    with PipelineSession(src, SessionOptions()) as session:
        session.run(work.mix[0])
        begun = time.monotonic()
        session.run(work.mix[0])
        a_run = time.monotonic() - begun
    return (SOURCES + 1) * SECONDS_A_CANDIDATE + _RUNS_OF_THE_WHOLE * a_run


def _optimized_parts(
    request: OptimizeRequest,
    src: Artifact,
    stream: SampleStream | None,
    calibrating: int,
    folder: Path,
    cache: StageCache,
    budget: Budget,
    kept: float,
) -> tuple[dict[str, Optimization], list[str]]:
    """Optimizes each part alone, and leaves ``kept`` seconds of the budget for the whole pipeline. Returns the
    results by part name, and a note about each part: what was chosen and why, or why the part was left as it is."""
    parts = parts_of(src)
    calls = _recorded(src, parts, stream, calibrating) if stream else {}
    made: dict[str, Optimization] = {}
    notes = []
    for number, (name, part) in enumerate(parts.items()):
        report(f"pipeline: part {name}", number / len(parts))
        # Divides the remaining time evenly among the remaining parts.
        seconds = round((budget.left - kept) / (len(parts) - number), 1) if budget.limited else None
        if seconds is not None and seconds < SECONDS_A_CANDIDATE:
            late = budget.reason("it was optimized")
            notes.append(
                f"the part {name!r} stays as it is: {late}, and the whole pipeline takes about {kept:.0f} s to "
                f"judge and measure; give more {option('budget_seconds')}"
            )
            continue
        data, note = _samples(calls[name], part, folder / "data" / name) if calls else (None, "")
        own = replace(
            request,
            source=Source(part),
            out=folder / "made" / name,
            data=data,
            eval_data=None,
            metric=None,
            labels=None,
            label_metric=None,
            sizes=None,
            batch=None,
            lengths=None,
            budget_seconds=seconds,
        )
        try:
            made[name] = run(own, Exported(artifact=part), None, cache, Budget(seconds, thorough=request.thorough))
        except AccelError as error:
            raise named(error, name) from error
        notes.append(f"the part {name!r}: {_chosen_words(made[name])}{note}")
    return made, notes


def _chosen_words(result: Optimization) -> str:
    """Returns what was chosen for a part, its speedup alone, and the reason why each other candidate was not chosen."""
    source, *others = result.candidates
    chosen = next(row for row in result.candidates if row.name == result.chosen)
    if chosen is source:
        said = "stays as it is, because no candidate is right and measurably faster"
    else:
        speedup = (chosen.measured or {}).get("speedup")
        said = chosen.name + (f", {speedup:.2f} times as fast alone" if speedup else "")
    reasons: dict[str, list[str]] = {}
    for row in others:
        if row is not chosen:
            slower = f"slower than {chosen.name}" if row.measured else "not measured"
            reason = "out of time" if row.out_of_time else shortened(row.reason or slower, 120)
            reasons.setdefault(reason, []).append(row.name)
    shown = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    more = f"; {len(shown) - _SHOWN} further reasons" if len(shown) > _SHOWN else ""
    return f"{said} ({'; '.join(shown[:_SHOWN])}{more})" if shown else said


def _recorded(src: Artifact, parts: Mapping[str, Artifact], stream: SampleStream, samples: int) -> dict[str, Calls]:
    """Runs the pipeline on the first ``samples`` samples. Returns the calls of each part."""
    found = {name: Calls() for name in parts}

    def record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_given(parts[name], args, kwargs)
        found[name].runs.append({})
        found[name].keep(lambda: {key: as_array(value).copy() for key, value in tensors.items()})

    with PipelineSession(src, SessionOptions()) as session, session.recorded_by(record):
        for feeds in stream.batches(_BATCH, samples):
            report("pipeline: recording the calls")
            session.run(feeds)
    return found


def _samples(calls: Calls, part: Artifact, folder: Path) -> tuple[Path | None, str]:
    """Writes the recorded calls of a part as samples. Returns the folder of the samples. If the inputs differ in the
    size of axis 0, the calls can't be used as samples, and the function returns None and a note."""
    # Shuffles the calls, because calibration reads the first samples and the judge reads the rest.
    order = np.random.default_rng(0).permutation(len(calls.kept))
    data = write_recorded([calls.kept[index] for index in order], folder, "call")
    if data is None:
        return None, ""
    try:
        for _ in SampleStream(data, part.signature).batches(_BATCH):
            pass
    except BadData as error:
        return None, f" (without calibration, because its calls are no samples: {error})"
    return data, ""


def _rows(
    src: Artifact, made: Mapping[str, Optimization], judge: Judge, max_drop: float, cache: StageCache, budget: Budget
) -> list[CandidateResult]:
    """Joins the optimized parts, and judges the whole pipeline. Returns a row of the table for each attempt. The first
    attempt uses all optimized parts. Each later attempt uses one optimized part fewer, until the pipeline is correct
    or the time is over."""
    changed = {name: result for name, result in made.items() if result.chosen != result.candidates[0].name}
    before = parts_of(src)
    rows: list[CandidateResult] = []
    kept: list[str] = []
    for worst in [*sorted(changed, key=lambda name: _drop(changed[name]), reverse=True)]:
        if rows and budget.over(1.0):
            row = CandidateResult(name=f"all but {', '.join(kept)}")
            row.skip(budget.reason("it was joined"), out_of_time=True)
            return [*rows, row]
        row = _joined(src, before, {n: r for n, r in changed.items() if n not in kept}, kept, judge, max_drop, cache)
        rows.append(row)
        if row.passed:
            break
        kept.append(worst)
    return rows


def _drop(result: Optimization) -> float:
    """Returns the distance between a part's original outputs and the outputs of the part's chosen candidate."""
    judgement = next(row for row in result.candidates if row.name == result.chosen).judgement
    return judgement.drop if judgement else 0.0


def _joined(
    src: Artifact,
    before: Mapping[str, Artifact],
    changed: Mapping[str, Optimization],
    kept: list[str],
    judge: Judge,
    max_drop: float,
    cache: StageCache,
) -> CandidateResult:
    name = f"all but {', '.join(kept)}" if kept else _ALL
    row = CandidateResult(name=name, precision=", ".join(f"{n} {r.chosen}" for n, r in changed.items()))
    try:
        parts = {n: changed[n].artifact if n in changed else part for n, part in before.items()}
        artifact = joined(src, parts, STAGE_LIMITS["int8"], cache)
        row.artifact, row.megabytes, row.runtime = artifact, megabytes(artifact), default_runtime(artifact).name
        judged(row, judge, artifact, {}, max_drop, cache)
    except AccelError as error:
        row.reject(str(error))
    return row
