"""Runs ``accel optimize``, from the opened model to the published folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.decoders.decoder import special_tokens
from accel.errors import MissingExtra, UsageError
from accel.proof.stream import SampleStream
from accel.runtimes.base import ROUNDED, default_runtime
from accel.signature.decoder import Cache
from accel.sources.notes import source_notes, training_note
from accel.spelling import option

from .attempt import attempt
from .budget import Budget, OutOfTime
from .calibration import calibration_samples
from .candidate import LARGE_MEGABYTES, CandidateResult, Status, megabytes, not_tried
from .choice import fused, likeliest
from .first_result import FirstResult
from .judge.cached import contexts_to_judge
from .judge.comparison import Judge, Judgement, Metric
from .judge.decoder import MEASURES, DecoderJudge, measure_and_limit
from .measure.noise import noise_notes
from .measure.workload import Workload, decode_steps, workload
from .notes import data_notes, not_as_asked, notes_on_making, seen_note
from .publish import publish
from .recipes.candidates import recipes, searched
from .recipes.order import Costs
from .recipes.recipe import NotTried, Recipe, RecipeRequest, gentler, with_texts, with_usual_cache
from .report.command import command_line
from .report.page import PAGE, write_page
from .request import OptimizeRequest
from .result import Optimization
from .search import Search
from .stage_options import without_effect

SOURCE_NAME = "source"
_ON_DATA = "running the source on the data"

# The number of samples on which the model runs before it is measured, if there are no calibration samples.
_CHECKED_SAMPLES = 64
# The number of samples on which a model of at least ``LARGE_MEGABYTES`` runs before any candidate is made. The model
# runs on the other samples before the first candidate that is calibrated on them, because it may take a minute for
# them. A first result then comes earlier.
_CHECKED_FIRST = 2


class Opened(Protocol):
    """The ONNX model to optimize, and the source that the ONNX model was exported from, if any."""

    @property
    def artifact(self) -> Artifact:
        """Returns the ONNX artifact."""

    @property
    def source(self) -> Artifact | None:
        """Returns the source of the export, or None if the user gives an ONNX file."""

    def check(self, data: Path, samples: int, cache: StageCache) -> tuple[str, str]:
        """Runs the source and the exported model on ``samples`` samples of ``data``. Returns a warning if the outputs
        differ, and a warning if an output has NaN. Each warning may be empty."""


@dataclass(kw_only=True)
class Outcome:
    """The chosen candidate and the results that led to it. ``varied`` holds the results of candidates that were
    measured again with different session options."""

    chosen: CandidateResult
    varied: list[CandidateResult] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run(
    request: OptimizeRequest, opened: Opened, metric: str | Metric | None, cache: StageCache, budget: Budget
) -> Optimization:
    """Makes, judges and measures the candidates for ``request``, and publishes the fastest candidate that passes.

    Raises ``NothingPassed`` if the target can't run on this machine and no candidate passes.
    """
    src = opened.artifact
    stream = SampleStream(request.data, src.signature) if request.data else None
    samples = calibration_samples(request, stream, megabytes(src))
    for_recipes = request.recipe_request(samples)
    work = timed_workload(request, src, stream)
    if Cache.of(src.signature) is not None:
        for_recipes = replace(
            for_recipes, context=max(contexts_to_judge(request.contexts, special_tokens(src).context))
        )
    made, left_out = recipes(src, for_recipes)
    costs = Costs(src, cache)
    if not request.thorough:
        made = costs.in_order(made)
    judge, request = judge_for(request, src, metric, samples)
    data_check = DataCheck(
        request=request, opened=opened, judge=judge, samples=samples or _CHECKED_SAMPLES, cache=cache, budget=budget
    )
    data_check.begin()
    source = source_row(src, judge, request.cores)
    search = Search(
        source=source, workload=work, threads=request.cores, rounds=request.rounds, cache=cache, budget=budget
    )

    def publish_first(row: CandidateResult) -> None:
        measured = "measured briefly" if row.measured else "not measured yet"
        note = f"the first result of a search, {measured}; {work.note}, {search.threads} threads"
        published_choice(request, src, row, [source, *rows], search.environment, [note])
        row.status = Status.PASSED

    rows: list[CandidateResult] = []
    first = FirstResult(search=search, budget=budget, publish=publish_first, expected=costs.expectations(made))
    _attempts(request, src, made, for_recipes, judge, cache, budget, rows, first, data_check)
    data_check.finish()
    notes = notes_on_making(rows, samples, for_recipes.quantize.get("samples"))
    outcome = _choose(request, search, rows, judge, for_recipes.targets[0].name)
    costs.remember(rows)
    rows += outcome.varied
    candidates = [source, *rows, *(not_tried(item) for item in left_out)]
    late = budget.note([row.name for row in rows if row.out_of_time])
    warnings = [
        *data_check.warnings(),
        seen_note(rows, judge),
        "" if budget.chosen_by_accel else late,
        without_effect(src, for_recipes.quantize),
        not_as_asked(source, outcome.chosen, candidates, for_recipes.precisions),
    ]
    said = [text for text in warnings if text]
    chosen = outcome.chosen.judgement
    notes += [f"{outcome.chosen.name}: {chosen.details}"] if chosen is not None and chosen.details else []
    notes += [*outcome.notes, *said, *data_notes(request, src), *source_notes(src), *filter(None, [training_note(src)])]
    notes += [late] if late and budget.chosen_by_accel else []
    return published_choice(request, src, outcome.chosen, candidates, outcome.environment, notes, said)


def published_choice(
    request: OptimizeRequest,
    src: Artifact,
    chosen: CandidateResult,
    candidates: Sequence[CandidateResult],
    environment: Mapping[str, Any],
    notes: Sequence[str],
    warnings: Sequence[str] = (),
) -> Optimization:
    """Publishes the candidate ``chosen``, and returns the result of the run."""
    chosen.status = Status.CHOSEN
    result = Optimization(
        artifact=chosen.artifact or src,
        chosen=chosen.name,
        candidates=tuple(candidates),
        max_drop=request.max_drop,
        environment=environment,
        notes=tuple(notes),
        warnings=tuple(warnings),
        objective=request.objective,
        command=command_line(request),
    )
    return published(result, chosen, request.out, request.source.folder)


def judge_for(
    request: OptimizeRequest, src: Artifact, metric: str | Metric | None, samples: int
) -> tuple[Judge, OptimizeRequest]:
    """Returns the judge of the candidates, and the request with the limit of the judge's measure. A decoder is judged
    by its next-token distributions, unless the user gives samples.

    Raises ``UsageError`` if an option is for decoders only.
    """
    if Cache.of(src.signature) is None or request.judged_on is not None:
        for name in ("text", "max_kl", "contexts"):
            if getattr(request, name):
                raise UsageError(
                    f"{option(name)} is for a decoder with a KV cache that is judged without samples; leave out "
                    f"{option(name)}"
                )
        return Judge(src, request.judged_on, metric, skip=0 if request.eval_data else samples), request
    if callable(metric):
        raise UsageError(
            f"a decoder is judged by {', '.join(MEASURES)}; give one of them with {option('metric')}, or samples with "
            f"{option('data')}"
        )
    measure, limit = measure_and_limit(metric, request.max_drop, request.max_kl)
    return DecoderJudge(src, request.text, measure, request.source.folder, request.contexts), replace(
        request, max_drop=limit
    )


def timed_workload(request: OptimizeRequest, src: Artifact, stream: SampleStream | None) -> Workload:
    """Returns the requests that the candidates are timed on. A decoder is timed on one token after each context."""
    if Cache.of(src.signature) is not None and not (request.judged_on or request.sizes or request.lengths):
        most = special_tokens(src).context
        return decode_steps(src.signature, request.contexts, request.batch or 1, request.objective, request.cores, most)
    return workload(
        src.signature,
        stream,
        objective=request.objective,
        sizes=request.sizes or {},
        batch=request.batch,
        lengths=request.lengths,
        cores=request.cores,
    )


@dataclass(kw_only=True)
class DataCheck:
    """Runs the source on ``samples`` samples of the data.

    Every call may raise ``BadData`` if the source can't run on a sample, and ``UsageError`` if the metric fails.
    """

    request: OptimizeRequest
    opened: Opened
    judge: Judge
    samples: int
    cache: StageCache
    budget: Budget
    _found: tuple[str, str] = ("", "")
    _nan: str = ""
    _checked: int = 0

    def begin(self) -> None:
        """Runs the source on the data before any candidate is made. Leaves out most calibration samples if the model is
        large, unless the search is thorough."""
        large = megabytes(self.opened.artifact) >= LARGE_MEGABYTES and not self.request.thorough
        self._run(min(self.samples, _CHECKED_FIRST) if large else self.samples)
        # In addition, every source runs on the samples for judging. Random inputs say nothing about the user's data, so
        # the source's runs on them end with the budget.
        given = self.request.judged_on is not None
        ended: tuple[type[OutOfTime], ...] = () if given else (OutOfTime,)
        with self.budget.spending(_ON_DATA), suppress(*ended), self.budget.within(math.inf if given else 1.0):
            self.judge.check(self.cache)
            self._nan = self.judge.nan_note()

    def finish(self) -> None:
        """Runs the source on the samples that ``begin`` left out."""
        if self._checked < self.samples:
            self._run(self.samples)

    def warnings(self) -> list[str]:
        """Returns warnings, some of which may be empty."""
        apart, nan = self._found
        return [apart, self._nan or nan]

    def _run(self, samples: int) -> None:
        # Without ``data``, an exported model is compared with its source on ``eval_data``. An ONNX file that the user
        # gives has no source to compare with.
        real = self.request.data or (self.request.eval_data if self.opened.source else None)
        with self.budget.spending(_ON_DATA):
            self._found = self.opened.check(real, samples, self.cache) if real else ("", "")
        self._checked = samples


def _attempts(
    request: OptimizeRequest,
    src: Artifact,
    made: Sequence[Recipe],
    for_recipes: RecipeRequest,
    judge: Judge,
    cache: StageCache,
    budget: Budget,
    rows: list[CandidateResult],
    first: FirstResult,
    data_check: DataCheck,
) -> None:
    """Makes and judges every candidate, and adds them to ``rows``. If the outputs of a candidate differ too much
    (``over_budget``), tries gentler recipes for int4, and starts a mixed-precision search for int8. ``first`` publishes
    a first result. ``data_check`` runs the source on all calibration samples before the first candidate that is
    calibrated."""

    def tried(recipe: Recipe) -> None:
        recipe = with_texts(recipe, texts)
        if recipe.search or any(getattr(step.config, "data", None) is not None for step in recipe.stages):
            data_check.finish()
        rows.append(attempt(recipe, src, request.data, judge, request.max_drop, cache, budget))
        if not request.thorough:
            first.look(rows)

    def texts() -> Path | None:
        try:
            with budget.spending("choosing texts to calibrate on"):
                return judge.texts_to_calibrate(cache)
        except KeyboardInterrupt as error:
            budget.interrupt(error)
            return None

    for recipe in made:
        usual = with_usual_cache(recipe)
        if any(row.name == usual and row.over_budget for row in rows):
            reason = f"{usual} loses too much without it"
            about = {"target": recipe.target.name, "precision": recipe.precision, "variant": recipe.variant}
            rows.append(not_tried(NotTried(**about, reason=reason)))
            continue
        following: Recipe | None = recipe
        while following is not None:
            tried(following)
            following = gentler(following, texts, request.data) if rows[-1].over_budget else None
    for row in list(rows):
        if row.recipe and row.over_budget and (again := searched(src, row.recipe, for_recipes)) is not None:
            tried(again)


def source_row(src: Artifact, judge: Judge, threads: int) -> CandidateResult:
    """Returns the row of the source, which is the baseline for every candidate."""
    runtime = default_runtime(src).name
    row = CandidateResult(
        name=SOURCE_NAME,
        target="ort-cpu" if src.kind == "onnx" else "",
        precision=str(src.properties.get("precision", "")),
        megabytes=megabytes(src),
        artifact=src,
        runtime="onnxruntime" if src.kind == "onnx" and runtime != ROUNDED else runtime,
        options={"threads": threads},
    )
    if judge.metric is not None:
        value = judge.reference_metric()
        row.judgement = Judgement(drop=0.0, metric=value, reference_metric=value, max_abs_diff=0.0, judged_on="itself")
    return row


def _choose(
    request: OptimizeRequest, search: Search, rows: list[CandidateResult], judge: Judge, target: str
) -> Outcome:
    """Chooses a candidate by measurement, or by its precision if this machine can't run ``target``."""
    runnable = [row for row in rows if row.recipe is not None and row.recipe.runnable]
    if rows and not runnable:
        return Outcome(chosen=likeliest(rows), notes=[f"{target} can't run on this machine: built, not measured"])
    outcome = _choose_measured(request, search, runnable, judge)
    outcome.notes += noise_notes([*rows, *outcome.varied], outcome.chosen, outcome.environment)
    return outcome


def _choose_measured(
    request: OptimizeRequest, search: Search, runnable: list[CandidateResult], judge: Judge
) -> Outcome:
    """Measures the candidates that this machine can run, and then measures the best candidates with other session
    options."""
    source = search.source
    outcome = Outcome(chosen=search.best(runnable))
    if request.vary_session and search.environment and not (request.kernels and outcome.chosen is source):
        outcome.chosen, outcome.varied = search.vary_sessions(
            outcome.chosen, runnable, judge, request.max_drop, vary_threads=not request.threads
        )
    if request.kernels and outcome.chosen is source:
        outcome.chosen = fused(source, [*runnable, *outcome.varied], outcome.notes)
    outcome.environment = search.environment
    if search.environment and source.runtime == ROUNDED:
        outcome.notes.append(
            f"the source is timed in the runtime {ROUNDED}, which is slow: ONNX Runtime can't compute in bfloat16 on "
            "a CPU"
        )
    done = f"{search.workload.note}, {search.threads} threads"
    if search.environment:
        outcome.notes.append(done)
    elif any(row.passed or row.out_of_time for row in (*runnable, *outcome.varied)):
        outcome.notes.append(search.budget.reason("anything was measured: the source itself was taken"))
    else:
        outcome.notes.append("no candidate was left to measure: the source itself was taken")
    return outcome


def published(result: Optimization, chosen: CandidateResult, folder: Path, configs: Path | None = None) -> Optimization:
    """Publishes the chosen model with its session, figures and report. Returns ``result`` with the published artifact.
    ``configs`` is the folder with the configs and the tokenizer of a decoder."""
    with_page = find_spec("jinja2") is not None
    if not with_page:
        result = replace(result, notes=(*result.notes, f"no {PAGE}: {MissingExtra('jinja2', 'report')}"))
    session = {
        "runtime": chosen.runtime,
        "options": chosen.options,
        "objective": result.objective,
        "judgement": chosen.judgement.to_json() if chosen.judgement else None,
        "measured": dict(chosen.measured) if chosen.measured else None,
        **({"mixed": chosen.trajectory.to_json()} if chosen.trajectory else {}),
    }
    published = publish(
        result.artifact,
        session,
        folder,
        lambda artifact: replace(result, artifact=artifact).to_json(),
        (lambda path, artifact: _write_page(path, replace(result, artifact=artifact))) if with_page else None,
        configs,
    )
    return replace(result, artifact=published)


def _write_page(path: Path, result: Optimization) -> None:
    write_page(
        path,
        title=f"{Path(str(result.artifact.source.get('spec', result.artifact.path.name))).name}: {result.chosen}",
        artifact=result.artifact,
        candidates=result.candidates,
        max_drop=result.max_drop,
        environment=result.environment,
        notes=result.notes,
        command=result.command,
        objective=result.objective,
    )
