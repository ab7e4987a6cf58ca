"""``accel.optimize`` turns a model into the fastest candidate whose outputs are still right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.cache import StageCache
from accel.optimizer.budget import Budget
from accel.optimizer.judge.comparison import Metric
from accel.optimizer.publish import check_out
from accel.optimizer.request import OptimizeRequest
from accel.optimizer.result import Optimization
from accel.optimizer.run import run
from accel.optimizer.stage_options import CastOptions, QuantizeOptions
from accel.proof.data import widened
from accel.sources.main_file import REPORT
from accel.sources.source import Model, Source

from .as_onnx import Exported, as_onnx
from .export import check_writable, open_cache

if TYPE_CHECKING:
    from accel.sources.declare import Dims, Inputs

__all__ = ["CastOptions", "Optimization", "QuantizeOptions", "optimize"]


def optimize(
    model: Model,
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
    quantize: QuantizeOptions | Sequence[str] = (),
    cast: CastOptions | Sequence[str] = (),
    use_cache: bool = True,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
    strip_training_ops: bool = False,
) -> Optimization:
    """Makes, checks, judges and measures the candidates for ``target``, and publishes the fastest one that passes.

    The folder ``out`` gets ``model.onnx``, ``model.xml`` or ``model.engine`` with its manifest, ``optimize.json``, and
    ``report.html`` if the extra ``report`` is installed.

    The model:

    - ``model``: an ONNX file, an artifact, or any source that ``accel.export`` takes, which is exported first.
    - ``inputs``, ``weights``, ``dims``, ``graph_inputs``, ``graph_outputs``, ``signature``, ``strip_training_ops``: as
      ``accel.export`` takes them.

    The candidates:

    - ``target``: the name of a ``Target``, or ``auto`` for every target that this machine can run.
    - ``precision``: the only precisions to try.
    - ``profiles``: optimization profiles of an engine, such as ``input_ids=1x8,8x128,64x512``.
    - ``compute_capabilities``: the GPUs to build an engine for, such as ``8.6``.
    - ``engine``: options of an engine's build, such as ``builder-level=5`` (see ``accel.runtimes.engine_options``).
    - ``quantize``, ``cast``: a ``QuantizeOptions`` and a ``CastOptions``, or texts as on the command line, such as
      ``calibration=entropy`` and ``keep-fp32=Softmax``.
    - ``kernels``: try only candidates whose matrix products are fused into accel's operators. Publishes the fastest of
      these candidates, with a note if it isn't measurably faster than the source.

    Quality:

    - ``data``: samples for calibration and comparison, an .npz file or a folder of them.
    - ``metric``: a function ``f(outputs, data) -> float``, or its ``module:function``. Higher is better. The metric is
      computed on ``eval_data``, by default ``data``.
    - ``labels``: an .npz file with the label of each sample, instead of a metric.
    - ``label_metric``: the metric that compares outputs with labels, see ``read_labels``.
    - ``max_drop``: the largest allowed relative loss of the metric, or without a metric the largest allowed distance of
      the outputs (``accel.proof.concordance.discordance``).

    Speed:

    - ``sizes``: the sizes of the dims to measure at. The default is the sizes of a sample of the data, or without data
      the dims' usual sizes with batch 1.
    - ``batch``: the batch to measure at. ``lengths``: a mix of lengths to measure (``8,16,128``), a file of whole
      numbers, or ``data`` for the lengths of the samples.
    - ``objective`` is ``latency`` (one request after the other) or ``throughput`` (as many requests as the session
      takes at once).
    - ``vary_session``: try the best candidates with other threads, streams, graph levels and spinning, too. The
      manifest records the chosen options for ``accel.load``, ``accel bench`` and ``accel serve``.
    - ``threads``: measure with this number of threads only. 0 means all cores, or fewer if fewer are faster.
    - ``rounds``: rounds of the measurement, at least 5.
    - ``budget_seconds``: the time for everything, building included. Successive halving measures the candidates, and
      begins with the candidates that are likely fastest. The result lists each candidate that is skipped or abandoned
      to save time. No candidate is chosen unmeasured. The budget doesn't stop an export.
    - ``use_cache``: if False, all stages and measurements run again.

    If no candidate is measurably faster than the source, the source itself is chosen. For a target that can't run here,
    nothing is measured. The first candidate with right outputs is then chosen, in the order fp16, int8, fp8, bf16,
    fp32.

    Raises ``UsageError`` or a subclass if the arguments contradict each other, the model or this machine. Raises
    ``NothingPassed`` if the target can't run here and no candidate is right.
    """
    named = Source.of(
        model,
        inputs=inputs,
        weights=weights,
        dims=dims,
        graph_inputs=graph_inputs,
        graph_outputs=graph_outputs,
        signature=signature,
        strip_training_ops=strip_training_ops,
    )
    request = OptimizeRequest(
        source=named,
        out=Path(out),
        target=target,
        precision=(precision,) if isinstance(precision, str) else tuple(precision or ()),
        data=_path(data),
        eval_data=_path(eval_data),
        metric=metric,
        labels=_path(labels),
        label_metric=label_metric,
        max_drop=max_drop,
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
        kernels=kernels,
        engine=tuple(engine),
        quantize=quantize if isinstance(quantize, QuantizeOptions) else tuple(quantize),
        cast=cast if isinstance(cast, CastOptions) else tuple(cast),
        use_cache=use_cache,
    )
    check_out(request.out, named.text)
    check_writable(request.out / REPORT)
    chosen_metric = request.loaded_metric()
    budget = Budget(request.budget_seconds)
    with ExitStack() as stack:
        cache = open_cache(stack, request.use_cache)
        opened = _opened(request, cache, budget)
        return run(request, opened, chosen_metric, cache, budget)


def _path(given: str | Path | None) -> Path | None:
    return Path(given) if given else None


def _opened(request: OptimizeRequest, cache: StageCache, budget: Budget) -> Exported:
    """Opens the model, exports it unless it is ONNX, and widens its dims to the sizes of the user's samples."""
    with budget.spending("opening the model"):
        exported = as_onnx(request.source, cache)
    src = exported.artifact
    for given in (request.data, request.eval_data):
        src = widened(src, given, dict(request.source.dims or {}))
    return replace(exported, artifact=src)
