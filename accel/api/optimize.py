"""From a model to the fastest form of it that is still right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.as_onnx import as_onnx
from accel.api.export import check_writable, open_cache
from accel.artifact import Artifact
from accel.cpu import available_cores
from accel.errors import MissingExtra, UsageError
from accel.optimizer.budget import Budget
from accel.optimizer.candidate import CandidateResult, attempt, megabytes, not_tried
from accel.optimizer.choice import fused, likeliest
from accel.optimizer.command import command_line
from accel.optimizer.judge import Judge, Judgement, Metric
from accel.optimizer.label_metric import read_labels
from accel.optimizer.noise import noise_notes
from accel.optimizer.publish import check_out, publish
from accel.optimizer.recipes import Request, likelihood, precisions_for, recipes, searched, targets_for
from accel.optimizer.report_page import PAGE, write_page
from accel.optimizer.search import Search
from accel.optimizer.stage_options import parse_cast_options, parse_quantize_options, without_effect
from accel.optimizer.workload import workload
from accel.runtimes.engine_options import parse_engine_options
from accel.sources import REPORT, renaming_note, training_note
from accel.verify.data import widened
from accel.verify.stream import SampleStream

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs

SOURCE_NAME = "source"

_CALIBRATION_SAMPLES = 128
# On so many samples what was exported is compared with its source where none calibrate.
_COMPARED_SAMPLES = 64
_READ_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """``artifact``: what was taken, published. ``candidates``: all, the source first. ``max_drop``: the budget.
    ``command``: what asks for the same again. ``warnings``: those of the ``notes`` that say how to get more."""

    artifact: Artifact
    chosen: str
    candidates: tuple[CandidateResult, ...]
    max_drop: float
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    objective: str = "latency"
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "chosen": {"name": self.chosen, "file": self.artifact.path.name},
            "max_drop": self.max_drop,
            "objective": self.objective,
            "command": self.command,
            "candidates": [c.to_json() for c in self.candidates],
            "environment": dict(self.environment),
            "notes": list(self.notes),
        }


def optimize(
    model: str | Path | Artifact,
    *,
    out: str | Path,
    target: str = "auto",
    precision: str | Sequence[str] | None = None,
    data: str | Path | None = None,
    eval_data: str | Path | None = None,
    metric: str | Metric | None = None,
    labels: str | Path | None = None,
    label_metric: str | None = None,
    max_drop: float = 0.01,
    profiles: Sequence[str] = (),
    compute_capabilities: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    objective: str = "latency",
    batch: int | None = None,
    lengths: str | Sequence[int] | None = None,
    threads: int = 0,
    vary_session: bool = True,
    rounds: int = 9,
    budget_seconds: float | None = None,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    kernels: bool = False,
    engine: Sequence[str] = (),
    quantize: Sequence[str] = (),
    cast: Sequence[str] = (),
    use_cache: bool = True,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
    strip_training_ops: bool = False,
) -> Optimization:
    """Make the candidates for ``target``, gate each, measure each, and publish the fastest within the budget to the
    folder ``out``: ``model.onnx``, ``model.xml`` or ``model.engine`` with its manifest, ``optimize.json``
    and ``report.html`` (with the extra ``report``).

    ``model``: an ONNX file, an artifact, or anything that ``accel.export`` takes (exported first), with ``inputs``,
    ``weights``, ``dims``, ``graph_inputs``, ``graph_outputs``, ``signature`` and ``strip_training_ops`` as there.
    ``target``: ``auto`` (whatever this
    machine can run) or a name from ``Target``. ``precision``: only these. ``data``: samples (.npz, or a folder of them)
    for calibration and comparison. ``metric``: ``module:function`` or a function, ``f(outputs, data) -> float``, higher
    is better, computed on ``eval_data`` (default ``data``). ``labels``: instead of a metric, .npz with the labels of
    each sample; ``label_metric``: see ``read_labels``. ``max_drop``: how much worse than the source it may be: relative
    loss of the metric, or without one how badly the outputs agree (``accel.verify.concordance.discordance``).
    ``profiles``: optimization profiles for engines, ``input_ids=1x8,8x128,64x512``. ``compute_capabilities``: such as
    ``8.6``. ``engine``: of its build, such as ``builder-level=5`` (see ``accel.runtimes.engine_options``).
    ``quantize``, ``cast``: of these stages, such as ``calibration=entropy`` and ``keep-fp32=Softmax`` (see
    ``accel.optimizer.stage_options``).

    ``sizes``: the shape to measure at (default: a sample of the data, else the dims' usual sizes, batch 1); ``batch``:
    its batch; ``lengths``: a mix of lengths instead of one (``8,16,128``, a file of whole numbers, ``data``).
    ``objective``: ``latency`` (one request after the other) or ``throughput`` (as many at once as the session takes).
    ``vary_session``: the best candidates are also tried with other threads, streams, graph level and spinning; what is
    taken is recorded and used by ``accel.load``, ``accel bench`` and ``accel serve``. ``threads``: these and no other.
    ``budget_seconds``: how long it all may take, building included: the likeliest candidates first, then successive
    halving; what wasn't tried, or given up where it left no time to measure, has a row that says so, and nothing is
    taken unmeasured. Exporting the model is finished whatever it takes.
    ``kernels``: only candidates whose products are fused into accel's operators; the best of them is taken also where
    it isn't measurably faster than the source, and a note says so.

    Nothing slower than the source is ever chosen: where no candidate is measurably faster, the source itself is. For a
    target that can't run here nothing is measured: then the first of fp16, int8, fp8, bf16, fp32 within the budget is
    taken.
    Raises ``NothingPassed`` where a target that can't run here has no candidate within the budget.
    """
    asked = {name: value for name, value in locals().items() if name != "model"}
    folder = Path(out)
    check_out(folder, str(model.path if isinstance(model, Artifact) else model))
    check_writable(folder / REPORT)
    if not 0 <= max_drop < 1:
        raise UsageError(f"a drop of {max_drop} makes no sense; give a fraction such as 0.01 for one percent")
    if labels is None and label_metric is not None:
        raise UsageError(f"{label_metric} compares with labels; pass --labels")
    if labels is not None:
        if metric is not None:
            raise UsageError("labels bring their own metric; give either --metric or --labels")
        metric = read_labels(Path(labels), label_metric)
    if budget_seconds is not None and not budget_seconds > 0:
        raise UsageError(f"nothing can be tried in {budget_seconds:g} s; give --budget-seconds 60, say")
    budget = Budget(budget_seconds)
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        tensorflow = {
            "graph_inputs": graph_inputs,
            "graph_outputs": graph_outputs,
            "signature": signature,
            "strip_training_ops": strip_training_ops,
        }
        with budget.spending("opening the model"):
            exported = as_onnx(model, inputs, Path(weights) if weights else None, dims, tensorflow, cache)
            src = exported.artifact
        calibration = Path(data) if data else None
        for given in (calibration, Path(eval_data) if eval_data else None):
            src = widened(src, given, dict(dims or {}))
        stream = SampleStream(calibration, src.signature) if calibration else None
        count = _checked(stream) if stream else 0
        quantizing = parse_quantize_options(quantize)
        samples = _calibration_samples(count, quantizing.get("samples"), apart=bool(eval_data)) if count else 0
        request = Request(
            targets=targets_for(target),
            precisions=precisions_for([precision] if isinstance(precision, str) else precision),
            data=calibration,
            samples=samples,
            threads=threads or available_cores(),
            profiles=tuple(profiles),
            compute_capabilities=tuple(compute_capabilities),
            kernels=kernels,
            engine=parse_engine_options(engine),
            quantize=quantizing,
            cast=parse_cast_options(cast),
        )
        work = workload(
            src.signature,
            stream,
            objective=objective,
            sizes=sizes or {},
            batch=batch,
            lengths=lengths,
            cores=request.threads,
        )
        made, left_out = recipes(src, request)
        if budget.limited:
            made = sorted(made, key=likelihood)
        judge = Judge(src, Path(eval_data) if eval_data else calibration, metric, skip=0 if eval_data else samples)
        with budget.spending("running the source on the data"):
            # What has no source is run on the data that judge by the judge.
            real = calibration or (Path(eval_data) if eval_data and exported.source else None)
            check = replace(exported, artifact=src).check
            apart, nan = check(real, samples or _COMPARED_SAMPLES, cache) if real else ("", "")
            judge.check()
            nan = judge.nan_note() or nan
        rows = [attempt(recipe, src, calibration, judge, max_drop, cache, budget) for recipe in made]
        for recipe in [searched(src, row.recipe, request) for row in rows if row.recipe and row.over_budget]:
            if recipe is not None:
                rows.append(attempt(recipe, src, calibration, judge, max_drop, cache, budget))
        source = CandidateResult(
            name=SOURCE_NAME,
            target="ort-cpu",
            precision=str(src.properties.get("precision", "")),
            megabytes=megabytes(src),
            artifact=src,
            runtime="onnxruntime",
            options={"threads": request.threads},
        )
        if judge.metric is not None:
            wanted = judge.reference_metric()
            source.judgement = Judgement(
                drop=0.0, metric=wanted, reference_metric=wanted, max_abs_diff=0.0, judged_on="itself"
            )
        notes = _notes(rows, samples, quantizing.get("samples"))
        environment: Mapping[str, Any] = {}
        runnable = [row for row in rows if row.recipe is not None and row.recipe.runnable]
        if runnable or not rows:
            search = Search(
                source=source, workload=work, threads=request.threads, rounds=rounds, cache=cache, budget=budget
            )
            chosen = search.best(runnable)
            varied: list[CandidateResult] = []
            if vary_session and search.environment and not (kernels and chosen is source):
                chosen, varied = search.vary_sessions(chosen, runnable, judge, max_drop, vary_threads=not threads)
                rows += varied
            if kernels and chosen is source:  # also where it only seemed slower before the options were timed
                chosen = fused(source, [*runnable, *varied], notes)
            environment = search.environment
            done = f"{work.note}, {request.threads} threads"
            notes.append(done if environment else budget.reason("anything was measured: the source itself was taken"))
            notes += noise_notes(rows, chosen, environment)
        else:
            notes.append(f"{request.targets[0].name} can't run on this machine: built, not measured")
            chosen = likeliest(rows)
        seen = seen_note(rows, judge)
        late = budget.note([row.name for row in rows if row.out_of_time])
        idle = without_effect(src, quantizing)
        other = _not_as_asked(source, chosen, request.precisions)
        warnings = tuple(filter(None, [apart, nan, seen, late, idle, other]))
        notes += warnings
        notes += filter(None, [renaming_note(src), training_note(src)])
        chosen.status = "chosen"
        with_page = find_spec("jinja2") is not None
        if not with_page:
            notes.append(f"no {PAGE}: {MissingExtra('jinja2', 'report')}")
        candidates = (source, *rows, *(not_tried(item) for item in left_out))
        result = Optimization(
            artifact=chosen.artifact or src,
            chosen=chosen.name,
            candidates=candidates,
            max_drop=max_drop,
            environment=environment,
            notes=tuple(notes),
            warnings=warnings,
            objective=objective,
            command=command_line(model, asked, _defaults(optimize)),
        )
        session = {
            "runtime": chosen.runtime,
            "options": chosen.options,
            "objective": objective,
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
        )
        return replace(result, artifact=published)


def _checked(stream: SampleStream) -> int:
    """How many samples there are, each read once: one that can't be used is named before any work is done."""
    for _ in stream.batches(_READ_AT_ONCE):
        pass
    return len(stream)


def _calibration_samples(count: int, asked: int | None, *, apart: bool) -> int:
    """How many of ``count`` samples calibrate: at most half of them, so that the other half can judge, unless others
    do (``apart``) and a number was asked for."""
    return min(asked or _CALIBRATION_SAMPLES, count if asked and apart else max(1, count // 2))


def _notes(rows: Sequence[CandidateResult], samples: int, asked: int | None) -> list[str]:
    """What was done otherwise than somebody may think."""
    found = []
    if asked is not None and samples < asked:
        found.append(f"calibrated on {samples} samples, not {asked}: there are no more that others don't judge by")
    found += dict.fromkeys(filter(None, map(_plugin_note, rows)))
    for reason in dict.fromkeys(row.trajectory.not_confirmed for row in rows if row.trajectory is not None):
        found += [f"mixed: the layers left float were not confirmed on a held-out half: {reason}"] if reason else []
    return found


def _not_as_asked(source: CandidateResult, chosen: CandidateResult, asked: Sequence[str] | None) -> str:
    """What to say where a precision was asked for and the source, which has another, was taken."""
    if chosen is not source or not asked or source.precision in asked:
        return ""
    return (
        f"nothing in {' or '.join(asked)} is right and measurably faster: what was taken is the source itself"
        f"{f', in {source.precision}' if source.precision else ''}; the table says why"
    )


def seen_note(rows: Sequence[CandidateResult], judge: Judge) -> str:
    """What to say where int8 was judged on what it was calibrated on."""
    quantized = any(row.judgement is not None and row.precision.startswith(("int8", "fp8", "mixed")) for row in rows)
    if not judge.saw_all or not quantized:
        return ""
    return (
        f"what is quantized is judged on the samples that calibrated it, as {judge.data} has no others, so its drop "
        "says little; give more samples, or others with --eval-data"
    )


def _plugin_note(row: CandidateResult) -> str:
    """Which of accel's operators an engine doesn't run as plugins."""
    from accel.converters.tensorrt_plugins import bodies_note

    last = row.artifact.history[-1] if row.artifact is not None and row.artifact.history else {}
    note = bodies_note(last.get("notes", {}).get("plugins", ()))
    return f"{row.name}: {note}" if note else ""


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


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
