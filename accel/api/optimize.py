"""From a model to the fastest form of it that is still right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.api.export import check_writable, open_cache
from accel.artifact import Artifact, beside, canonical_json, manifest_path, text_sha256
from accel.bench.environment import available_cores
from accel.cache import StageCache
from accel.errors import AccelError, CannotWrite, NothingPassed, UnsupportedHere, UsageError
from accel.optimizer.judge import Judge, Judgement, Metric
from accel.optimizer.label_metric import read_labels
from accel.optimizer.mixed_precision import Trajectory, assign
from accel.optimizer.recipes import UNMEASURED_ORDER, NotTried, Recipe, Request, precisions_for, recipes, targets_for
from accel.progress import report
from accel.sources import MAIN_FILES, REPORT, open_source
from accel.stage import run_stage, versions
from accel.verify.data import Dataset, widened
from accel.verify.gates import OutputGate, gate_runtime
from accel.verify.runs import check_runs

if TYPE_CHECKING:
    import numpy as np

    from accel.bench.paired import BenchReport
    from accel.sources.declare import Dims, Inputs

SOURCE_NAME = "source"

# Rounds go on for this long while an interval is wide: on a noisy machine nothing would seem faster otherwise.
_BENCH_SECONDS = 20.0


@dataclass(kw_only=True)
class CandidateResult:
    """One row of the table. ``status``: ``chosen``, ``passed`` (right, but not the one taken), ``rejected``,
    ``not tried``; ``reason`` says why it isn't chosen."""

    name: str
    target: str = ""
    precision: str = ""
    status: str = "passed"
    reason: str = ""
    megabytes: float | None = None
    judgement: Judgement | None = None
    measured: Mapping[str, Any] | None = None
    artifact: Artifact | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    trajectory: Trajectory | None = None  # of the search for the layers that stay float
    unsupported: bool = False  # it was refused for what was asked, not for what came out

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "target": self.target,
            "precision": self.precision,
            "status": self.status,
            "reason": self.reason,
            "megabytes": self.megabytes,
            "judgement": self.judgement.to_json() if self.judgement else None,
            "measured": dict(self.measured) if self.measured else None,
            **({"mixed": self.trajectory.to_json()} if self.trajectory else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """``artifact``: what was taken, published. ``candidates``: all, the source first. ``max_drop``: the budget."""

    artifact: Artifact
    chosen: str
    candidates: tuple[CandidateResult, ...]
    max_drop: float
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "chosen": {"name": self.chosen, "file": self.artifact.path.name},
            "max_drop": self.max_drop,
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
    threads: int = 0,
    rounds: int = 9,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    kernels: bool = False,
    use_cache: bool = True,
) -> Optimization:
    """Make the candidates for ``target``, gate each, measure each, and publish the fastest within the budget to the
    folder ``out``: ``model.onnx``, ``model.xml`` or ``model.engine`` with its manifest, and ``optimize.json``.

    ``model``: an ONNX file, an artifact, or a PyTorch source (exported first). ``target``: ``auto`` (whatever this
    machine can run) or a name from ``Target``. ``precision``: only these. ``data``: samples (.npz, or a folder of them)
    for calibration and comparison. ``metric``: ``module:function`` or a function, ``f(outputs, data) -> float``, higher
    is better, computed on ``eval_data`` (default ``data``). ``labels``: instead of a metric, .npz with one label for
    each sample; ``label_metric``: ``top1`` (default for integers), ``top5`` or ``spearman`` (default for floats).
    ``max_drop``: how much worse than the source it may be: relative loss of the metric, or without one 1 minus the mean
    cosine similarity of the outputs. ``profiles``:
    optimization profiles for engines, ``input_ids=1x8,8x128,64x512``. ``compute_capabilities``: such as ``8.6``.
    ``sizes``: the shape to measure at (default: a sample of the data, else the dims' usual sizes, batch 1).
    ``kernels``: only candidates whose products are fused into accel's operators; the best of them is taken also where
    it isn't measurably faster than the source, and a note says so.

    Nothing slower than the source is ever chosen: where no candidate is measurably faster, the source itself is. For a
    target that can't run here nothing is measured: then the first of fp16, int8, bf16, fp32 within the budget is taken.
    Raises ``NothingPassed`` where a target that can't run here has no candidate within the budget.
    """
    folder = Path(out)
    source_text = str(model.path if isinstance(model, Artifact) else model)
    _check_out(folder, source_text)
    if not 0 <= max_drop < 1:
        raise UsageError(f"a drop of {max_drop} makes no sense; give a fraction such as 0.01 for one percent")
    if labels is None and label_metric is not None:
        raise UsageError(f"{label_metric} compares with labels; pass --labels")
    if labels is not None:
        if metric is not None:
            raise UsageError("labels bring their own metric; give either --metric or --labels")
        metric = read_labels(Path(labels), label_metric)
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        src = _as_onnx(model, inputs, Path(weights) if weights else None, dims, cache)
        calibration = Path(data) if data else None
        for given in (calibration, Path(eval_data) if eval_data else None):
            src = widened(src, given, dict(dims or {}))
        samples = _calibration_samples(calibration, src)
        request = Request(
            targets=targets_for(target),
            precisions=precisions_for([precision] if isinstance(precision, str) else precision),
            data=calibration,
            samples=samples,
            threads=threads or available_cores(),
            profiles=tuple(profiles),
            compute_capabilities=tuple(compute_capabilities),
            kernels=kernels,
        )
        made, left_out = recipes(src, request)
        judge = Judge(src, Path(eval_data) if eval_data else calibration, metric, skip=0 if eval_data else samples)
        rows = [_attempt(recipe, src, calibration, judge, max_drop, cache) for recipe in made]
        source = CandidateResult(
            name=SOURCE_NAME,
            target="ort-cpu",
            precision=str(src.properties.get("precision", "")),
            megabytes=_megabytes(src),
            artifact=src,
        )
        if judge.metric is not None:
            wanted = judge.reference_metric()
            source.judgement = Judgement(
                drop=0.0, metric=wanted, reference_metric=wanted, max_abs_diff=0.0, judged_on="itself"
            )
        notes: list[str] = []
        environment: Mapping[str, Any] = {}
        runnable = [row for row in rows if row.recipe is not None and row.recipe.runnable]
        if runnable or not rows:
            feeds = _bench_feeds(src, calibration, sizes)
            environment = _measure(source, [r for r in runnable if r.status == "passed"], feeds, request, rounds, cache)
            chosen = _fastest(source, runnable)
            if kernels and chosen is source:
                chosen = _fused(source, runnable, notes)
            shape = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
            notes.append(f"measured at {shape}, {request.threads} threads")
        else:
            notes.append(f"{request.targets[0].name} can't run on this machine: built, not measured")
            chosen = _likeliest(rows)
        chosen.status = "chosen"
        candidates = (source, *rows, *(_not_tried(item) for item in left_out))
        result = Optimization(
            artifact=chosen.artifact or src,
            chosen=chosen.name,
            candidates=candidates,
            max_drop=max_drop,
            environment=environment,
            notes=tuple(notes),
        )
        return _publish(result, chosen, folder, request.threads)


def _as_onnx(
    model: str | Path | Artifact, inputs: Inputs | None, weights: Path | None, dims: Dims | None, cache: StageCache
) -> Artifact:
    from accel.converters.onnx_from_torch import LIMITS, OnnxFromTorchConfig

    src = open_source(model, inputs=inputs, weights=weights, dims=dims)
    if src.kind == "torch":
        gates = [OutputGate(limit=LIMITS[src.properties.get("precision", "fp32")])]
        return run_stage("onnx_from_torch", src, OnnxFromTorchConfig(), gates=gates, cache=cache)
    if src.kind in ("tensorflow", "tflite"):
        from accel.converters.onnx_from_tensorflow import TFLITE_INT8_LIMIT, OnnxFromTensorFlowConfig

        precision = src.properties.get("precision", "fp32")
        gates = [OutputGate(limit=TFLITE_INT8_LIMIT if precision == "int8" else LIMITS[precision])]
        return run_stage(f"onnx_from_{src.kind}", src, OnnxFromTensorFlowConfig(), gates=gates, cache=cache)
    if src.kind != "onnx":
        raise UsageError(f"{src.path} is {src.kind} already; give the ONNX file or the source that it was made from")
    if not src.history:
        check_runs(src)
    return src


def _attempt(
    recipe: Recipe, src: Artifact, data: Path | None, judge: Judge, max_drop: float, cache: StageCache
) -> CandidateResult:
    """Make one candidate and judge it. What goes wrong with it is its row's reason, not the end of the run."""
    row = CandidateResult(name=recipe.name, target=recipe.target.name, precision=recipe.precision, recipe=recipe)
    artifact = src
    last_runnable = src
    try:
        if recipe.search:
            recipe, row.trajectory = assign(recipe, src, judge, max_drop, cache)
            row.recipe = recipe
        for stage, config, limit in recipe.stages:
            report(f"{recipe.name}: {stage}")
            gates = [OutputGate(limit=limit, data=data)]
            artifact = run_stage(stage, artifact, config, gates=gates, cache=cache)
            if gate_runtime(artifact) is not None:
                last_runnable = artifact
        row.artifact = artifact
        row.megabytes = _megabytes(artifact)
        report(f"{recipe.name}: judging")
        options = recipe.options if last_runnable is artifact else {}
        row.judgement = _judged(judge, last_runnable, options, cache)
    except UnsupportedHere as error:  # this form of this model for this target; another may do
        row.status, row.reason, row.unsupported = "rejected", str(error), True
        return row
    except (UsageError, CannotWrite):
        raise
    except AccelError as error:
        row.status, row.reason = "rejected", str(error).partition("; the file is set aside")[0]
        return row
    if row.judgement.problem:
        row.status, row.reason = "rejected", row.judgement.problem
    elif row.judgement.drop > max_drop:
        row.status = "rejected"
        row.reason = f"drop {row.judgement.drop:.4f} is over the budget {max_drop:g}"
    return row


def _judged(judge: Judge, artifact: Artifact, options: Mapping[str, Any], cache: StageCache) -> Judgement:
    key = judge.key(artifact, options)
    found = cache.get_record("judgement", key)
    if found is not None:
        return Judgement(**{**found, "drop": float("inf") if found["drop"] is None else found["drop"]})
    made = judge.judge(artifact, options)
    if not made.problem:
        cache.put_record("judgement", key, made.to_json())
    return made


def _calibration_samples(data: Path | None, src: Artifact) -> int:
    """Half of the data at most, so that the other half can judge."""
    return 0 if data is None else min(128, max(1, len(Dataset.load(data, src.signature)) // 2))


def _bench_feeds(src: Artifact, data: Path | None, sizes: Mapping[str, int] | None) -> dict[str, np.ndarray]:
    if data is None:
        return src.signature.example_inputs(**(sizes or {}))
    dataset = Dataset.load(data, src.signature)
    first = next(iter(dataset.batches(1)))
    if not sizes:
        return first
    return dataset.shaped({**src.signature.check_feeds(first), **src.signature.known(sizes)})


def _measure(
    source: CandidateResult,
    rows: list[CandidateResult],
    feeds: Mapping[str, np.ndarray],
    request: Request,
    rounds: int,
    cache: StageCache,
) -> Mapping[str, Any]:
    """Time the source and the candidates beside one another; the figures of an identical run come from the cache."""
    from accel.bench.environment import environment as machine
    from accel.bench.paired import Candidate, measure

    candidates = []
    for row in (source, *rows):
        assert row.artifact is not None
        runtime = row.recipe.target.runtime if row.recipe else "onnxruntime"
        options = row.recipe.options if row.recipe else {"threads": request.threads}
        candidates.append(Candidate(name=row.name, artifact=row.artifact, runtime=runtime, options=options))
    key = text_sha256(
        canonical_json(
            {
                "candidates": [
                    [c.name, c.artifact.digest, c.runtime, str(sorted(c.options.items()))] for c in candidates
                ],
                "feeds": {name: text_sha256(value.tobytes().hex()) for name, value in feeds.items()},
                "rounds": [rounds, _BENCH_SECONDS],
                "machine": machine(threads=request.threads, date=False),
                "versions": versions(("torch", "onnxruntime", "openvino")),
            }
        )
    )
    found = cache.get_record("measurement", key)
    if found is None:
        result: BenchReport = measure(candidates, feeds, rounds=rounds, budget_seconds=_BENCH_SECONDS)
        found = result.to_json()
        cache.put_record("measurement", key, found)
    else:
        report("measure: cached", 1.0)
    by_name = {r["name"]: r for r in found["results"]}
    for row in (source, *rows):
        row.measured = by_name[row.name]
        if row.measured.get("error"):
            row.status, row.reason = "rejected", str(row.measured["error"])
    return {**found["environment"], "sizes": found.get("sizes"), "noise_floor": found.get("noise_floor")}


def _fastest(source: CandidateResult, rows: list[CandidateResult]) -> CandidateResult:
    best = source
    for row in rows:
        if row.status != "passed" or row.measured is None:
            continue
        if row.measured["verdict"] != "faster":
            row.reason = f"not measurably faster than the source ({row.measured['verdict']})"
            continue
        if best is source or row.measured["median_ms"] < (best.measured or {})["median_ms"]:
            best = row
    for row in rows:
        if row.status == "passed" and row is not best and not row.reason:
            row.reason = f"slower than {best.name}"
    return best


def _fused(source: CandidateResult, rows: list[CandidateResult], notes: list[str]) -> CandidateResult:
    """The fastest right candidate although it isn't faster than the source: its operators were asked for."""
    passed = [row for row in rows if row.status == "passed" and row.measured is not None]
    best = min(passed, key=lambda row: (row.measured or {})["median_ms"], default=source)
    if best is source:
        notes.append("no fused candidate is right: the source itself was taken")
    else:
        best.reason = "asked for with --kernels"
        notes.append("the fused form is not measurably faster than the source here; it was asked for")
    return best


def _likeliest(rows: list[CandidateResult]) -> CandidateResult:
    passed = [row for row in rows if row.status == "passed"]
    if rows and all(row.unsupported for row in rows):
        raise UnsupportedHere(rows[0].reason)
    if not passed:
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        raise NothingPassed(f"no candidate is within the budget ({reasons}); raise --max-drop or choose --precision")
    best = min(passed, key=lambda row: UNMEASURED_ORDER.index(row.precision))
    best.reason = "not measured here; the first of fp16, int8, bf16, fp32 that is within the budget"
    for row in passed:
        if row is not best:
            row.reason = "not measured here; built and within the budget"
    return best


def _not_tried(item: NotTried) -> CandidateResult:
    target, _, precision = item.name.rpartition(" ")
    return CandidateResult(name=item.name, target=target, precision=precision, status="not tried", reason=item.reason)


def _megabytes(artifact: Artifact) -> float:
    return round(sum(f.stat().st_size for f in artifact.files) / 1e6, 2)


def _check_out(folder: Path, source: str) -> None:
    """Refuse a folder in which something that accel did not make would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise CannotWrite(f"{folder} is a file; give a folder with -o")
    for name in MAIN_FILES:
        main = folder / name
        if main.exists() and not manifest_path(main).is_file():
            raise CannotWrite(f"{main} was not made by accel and would be overwritten; give another -o")
        if main.exists() and Path(source).exists() and main.samefile(source):
            raise CannotWrite(f"{main} is the model to optimize and would be overwritten; give another -o")
    check_writable(folder / REPORT)


def _publish(result: Optimization, chosen: CandidateResult, folder: Path, threads: int) -> Optimization:
    artifact = result.artifact
    if artifact.manifest is None:  # the source itself, from elsewhere, was the fastest
        artifact = _recorded(artifact)
    assert artifact.manifest is not None
    runtime = chosen.recipe.target.runtime if chosen.recipe else "onnxruntime"
    options = dict(chosen.recipe.options) if chosen.recipe else {"threads": threads}
    session = {
        "runtime": runtime,
        "options": options,
        "judgement": chosen.judgement.to_json() if chosen.judgement else None,
        "measured": dict(chosen.measured) if chosen.measured else None,
        **({"mixed": chosen.trajectory.to_json()} if chosen.trajectory else {}),
    }
    artifact = artifact.with_manifest(replace(artifact.manifest, session=session))
    main = folder / f"model{ {'onnx': '.onnx', 'openvino': '.xml', 'engine': '.engine'}[artifact.kind] }"
    published = artifact.copy_to(main)
    final = replace(result, artifact=published)
    with beside(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(final.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    # What an earlier run chose goes last, when the new choice is whole.
    for name in MAIN_FILES:
        old = folder / name
        if old != main and manifest_path(old).is_file():
            for file in (*_files_of(old), manifest_path(old)):
                file.unlink(missing_ok=True)
    return final


def _files_of(main: Path) -> tuple[Path, ...]:
    try:
        return Artifact.open(main).files
    except AccelError:
        return (main,)


def _recorded(artifact: Artifact) -> Artifact:
    from accel.artifact import Manifest

    manifest = Manifest(
        kind=artifact.kind,
        signature=artifact.signature,
        files=artifact.hashes(),
        source=artifact.source,
        properties=artifact.properties,
    )
    return artifact.with_manifest(manifest)
