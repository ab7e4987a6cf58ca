"""Turns a model into the fastest candidate whose outputs are still correct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from accel.cache import StageCache
from accel.optimizer.budget import Budget
from accel.optimizer.earlier import Earlier
from accel.optimizer.judge.comparison import Metric
from accel.optimizer.publish import check_no_decoder, check_out
from accel.optimizer.request import OptimizeRequest
from accel.optimizer.run import run
from accel.optimizer.stage_options import CastOptions, QuantizeOptions, options_given
from accel.progress import shows_progress
from accel.proof.data import widened
from accel.sources.main_file import REPORT
from accel.sources.source import Model, Source, SourceOptions, known_keywords

from .as_onnx import Exported, as_onnx
from .decoder.export import is_decoder
from .export import check_writable, open_cache
from .optimized import Optimized
from .samples import Data, as_files, labels_as_file, path_of

__all__ = ["CastOptions", "Optimized", "QuantizeOptions", "optimize"]


@shows_progress
@known_keywords
def optimize(
    model: Model,
    *,
    out: str | Path | None = None,
    target: str | Sequence[str] = "auto",
    precision: str | Sequence[str] | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    metric: str | Metric | None = None,
    labels: str | PathLike[str] | Sequence[float] | Any = None,
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
    thorough: bool = False,
    text: str | Path | None = None,
    max_kl: float | None = None,
    contexts: Sequence[int] = (),
    kernels: bool = False,
    engine: Sequence[str] = (),
    quantize: QuantizeOptions | Mapping[str, Any] | Sequence[str] = (),
    cast: CastOptions | Mapping[str, Any] | Sequence[str] = (),
    use_cache: bool = True,
    **about: Unpack[SourceOptions],
) -> Optimized:
    """Makes, checks, judges and measures the candidates for ``target``, and publishes the fastest candidate that
    passes.

    Writes ``model.onnx``, ``model.xml`` or ``model.engine``, its manifest and ``optimize.json`` to the folder ``out``.
    Also writes ``report.html`` if the extra ``report`` is installed.

    The model:

    - ``model``: an ONNX file, an artifact, or any source that ``accel.export`` takes. A source is exported first.
    - an ``accel.Pipeline``, or the folder of an exported pipeline. Each part is optimized on the inputs that the part
      gets when the pipeline's function runs on ``data``. The metric, the sizes and the measured speed are those of the
      whole pipeline, not of a part. If the pipeline's outputs aren't correct with an optimized part, the original part
      is kept.
    - the fields of ``accel.Source``, such as ``example``, ``inputs``, ``weights`` and ``dims``.

    The candidates:

    - ``target``: the name of a ``Target``, several names, or ``auto`` for every target that this machine can run.
    - ``precision``: the only precisions to try.
    - ``profiles``: optimization profiles of an engine, such as ``input_ids=1x8,8x128,64x512``.
    - ``compute_capabilities``: the GPUs to build an engine for, such as ``8.6``.
    - ``engine``: options of an engine's build, such as ``builder-level=5`` (see ``accel.runtimes.engine_options``).
    - ``quantize``, ``cast``: dicts of options, such as ``{"calibration": "entropy"}`` and ``{"keep_fp32":
      ["Softmax"]}``, or strings as on the command line, such as ``calibration=entropy``.
    - ``kernels``: if True, tries only candidates whose matrix products are fused into accel's operators. Publishes the
      fastest fused candidate, with a note if this candidate isn't measurably faster than the source.

    Quality:

    - ``data``: samples for calibration and comparison: an .npz file, a folder of .npz files, a batch, or an iterable of
      batches such as a ``DataLoader``. A batch is an array, a dict of arrays, or a tuple of arrays in the order of the
      inputs.
    - ``metric``: a function ``f(outputs, data) -> float``, or the function's name as ``module:function``. Higher is
      better. The metric is computed on ``eval_data`` (default: ``data``).
    - ``labels``: the label of each sample, as an .npz file, an array, a tensor or a list, instead of a metric.
    - ``label_metric``: the metric that compares outputs with labels (see ``read_labels``).
    - ``max_drop``: the largest allowed relative loss of the metric. Without a metric, ``max_drop`` is the largest
      allowed distance between a candidate's outputs and the source's outputs (``accel.proof.concordance.discordance``).

    Decoders with a KV cache are judged by their next-token distributions instead:

    - ``text``: a text file that no calibration used. Without it, the decoder samples texts by itself.
    - ``metric``: ``kl`` (the mean divergence in nats a token), ``perplexity`` (its relative rise) or ``top1`` (the
      share of the most likely tokens that change). ``max_drop`` is the limit.
    - ``max_kl``: short for the metric ``kl`` and its limit.
    - ``contexts``: the numbers of tokens in the cache to measure one new token with, by default 128.

    Speed:

    - ``sizes``: the sizes of the dims for the measurement. By default the dims have the sizes of a sample of the data.
      Without data, the batch is 1 and the other dims have their usual sizes.
    - ``batch``: the batch size for the measurement.
    - ``lengths``: a mix of lengths to measure (``8,16,128``), a file of integers, or ``data`` for the lengths of the
      samples.
    - ``objective`` is ``latency`` (one request after the other) or ``throughput`` (as many requests as the session
      takes at once).
    - ``vary_session``: if True, also tries the best candidates with other numbers of threads and streams, with other
      graph optimization levels, and without spinning threads. The manifest records the chosen options for
      ``accel.load``, ``accel bench`` and ``accel serve``.
    - ``threads``: the only number of threads to measure with. 0 means one thread for each core, or fewer threads if
      fewer are faster.
    - ``rounds``: the number of measurement rounds, at least 5.
    - ``budget_seconds``: the time for the whole call, including the builds. By default, the search takes as long as it
      needs for a first result, and goes on for twice as long, but at least for a minute. A first result is published as
      soon as a candidate is right and measurably faster than the source, unless the other candidates take little time.
      A candidate that is surely faster is published before it is measured.
      If time is short, the candidates are measured by successive halving, and the candidate that is probably the
      fastest is measured first. The result lists each candidate that is skipped or abandoned to save time. Only a
      measured candidate can be chosen. An export isn't stopped when the budget is used up.
    - ``thorough``: if True, makes and measures all candidates, however long that takes.
    - ``use_cache``: if False, all stages and measurements run again.

    If no candidate is measurably faster than the source, the source itself is chosen. For a target that can't run here,
    nothing is measured, and the first candidate with correct outputs is chosen. If nothing is measured, the precisions
    are tried in the order fp16, int8, fp8, bf16, fp32.

    Raises ``UsageError`` or a subclass if the arguments contradict each other, the model or the capabilities of this
    machine. Raises ``NothingPassed`` if the target can't run here and no candidate has correct outputs.
    """
    named = Source.of(model, **about)
    if data is None and eval_data is None and is_decoder(named, None):
        named = replace(named, decoder=True)
    with ExitStack() as stack:
        cache = open_cache(stack, use_cache)
        samples = Path(stack.enter_context(TemporaryDirectory(prefix="accel-")))
        request = OptimizeRequest(
            source=named,
            out=Path(out) if out is not None else StageCache().result_folder(),
            target=target if isinstance(target, str) else tuple(target),
            precision=(precision,) if isinstance(precision, str) else tuple(precision or ()),
            data=as_files(data, named, samples / "data"),
            eval_data=as_files(eval_data, named, samples / "eval_data"),
            metric=metric,
            labels=labels_as_file(labels, samples / "labels"),
            label_metric=label_metric,
            max_drop=max_drop,
            text=path_of(text),
            max_kl=max_kl,
            contexts=tuple(contexts),
            profiles=tuple(profiles),
            compute_capabilities=tuple(compute_capabilities),
            sizes=sizes,
            objective=objective,
            batch=batch,
            lengths=lengths if lengths is None or isinstance(lengths, str) else tuple(lengths),
            threads=threads,
            vary_session=vary_session,
            rounds=rounds,
            budget_seconds=budget_seconds,
            thorough=thorough,
            kernels=kernels,
            engine=tuple(engine),
            quantize=options_given(QuantizeOptions, "quantize", quantize),
            cast=options_given(CastOptions, "cast", cast),
            use_cache=use_cache,
        )
        check_out(request.out, named.text)
        if not _makes_decoder(named):
            check_no_decoder(request.out)
        check_writable(request.out / REPORT)
        earlier = Earlier.of(request, cache)
        if (done := earlier.publish()) is not None:
            return Optimized.of(*done)
        chosen_metric = request.loaded_metric()
        budget = Budget(request.budget_seconds, thorough=thorough)
        opened = _opened(request, cache, budget)
        if opened.artifact.kind == "pipeline":
            from .pipeline.optimize import optimize_pipeline

            return Optimized.of(
                optimize_pipeline(request, opened.artifact, chosen_metric, cache, budget), opened.source
            )
        budget.exported = opened.source is not None
        result = run(request, opened, chosen_metric, cache, budget)
        earlier.remember(result, opened.source, budget)
        return Optimized.of(result, opened.source)


def _makes_decoder(source: Source) -> bool:
    """Tells whether the result has a KV cache, because ``source`` is opened with a cache or was exported with one."""
    if source.decoder is not None or source.native:
        return bool(source.decoder)
    return not source.path.is_dir() and "decoder" in source.open().source


def _opened(request: OptimizeRequest, cache: StageCache, budget: Budget) -> Exported:
    """Opens the model and exports it to ONNX if necessary. Widens the ranges of the dims to include the sizes of the
    user's samples."""
    given = [path for path in (request.data, request.eval_data) if path is not None]
    with budget.spending("opening the model"):
        exported = as_onnx(request.source, cache, given)
    src = exported.artifact
    for path in given:
        src = widened(src, path, dict(request.source.dims or {}))
    return replace(exported, artifact=src)
