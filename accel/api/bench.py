"""Times several versions of a model side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from accel.artifact import Artifact, manifest_path
from accel.errors import BadData, BadInputSpec, ChildCrashed, RunFailed, UnknownName, UsageError
from accel.machine import available_cores
from accel.progress import report, shows_progress
from accel.proof.data import rounding_note, widened
from accel.proof.runs import failed_on_data
from accel.runtimes.base import RUNTIMES, default_runtime, get_runtime
from accel.signature import DimRange
from accel.sources.declare import Dims, Inputs, parse_dims, parse_inputs
from accel.sources.main_file import main_file
from accel.sources.source import Model, Source, SourceOptions, declared_dims, is_live, known_keywords, shared
from accel.spelling import option
from accel.tables.kinds import KINDS, kind_of
from accel.timing.blocks import Candidate
from accel.timing.paired import measure, resolved
from accel.timing.report import BenchReport, Sweep

from .samples import Data, path_of, takes_samples

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Signature

# A benchmark uses at most ``_DATA_BATCHES`` batches of the user's data, in turn. The reported times are averages over
# the batches.
_DATA_BATCHES = 8
# A benchmark runs TensorFlow and TFLite models directly in the candidate's own process. Outside benchmarks, TensorFlow
# and TFLite models run in a separate TensorFlow process.
_OPENERS = dict.fromkeys(("tensorflow", "tflite"), "accel.runtimes.tensorflow:open_here")
_NAMES = {"torch": "eager", "torch-compile": "torch.compile"}


@shows_progress
@known_keywords
@takes_samples
def bench(
    candidates: Model | Sequence[Model],
    *,
    against: Model | None = None,
    also: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    data: Data | None = None,
    rounds: int = 9,
    block_seconds: float = 0.2,
    budget_seconds: float = 30.0,
    threads: int | None = None,
    streams: int | None = None,
    cuda_graph: bool = False,
    one_thread: bool = False,
    seed: int = 0,
    **about: Unpack[SourceOptions],
) -> BenchReport:
    """Times ``candidates`` side by side with the baseline ``against`` (default: the first candidate). Each model runs
    in its own process.

    ``candidates`` is one model or several. A candidate is an artifact, an artifact's folder, an ONNX file or a source.
    An artifact runs on the runtime it was optimized for. PyTorch sources are timed in eager mode and on the runtimes in
    ``also``, such as ``torch-compile``. ``sizes`` gives sizes of the dynamic dims (default: the usual sizes of
    ``against``). ``data`` has the inputs, as for ``accel.optimize``; its first batches are taken. By default the inputs
    are random.

    ``threads`` and ``streams`` are the numbers of threads and concurrent runs of every candidate. By default a
    candidate uses the threads and streams that its manifest records. If the manifest doesn't record them, the candidate
    uses one stream, and one thread for each core that this process may use. With several streams, the report compares
    throughputs. If a candidate uses fewer threads than the baseline, the baseline is also timed with as few threads.
    With ``one_thread``, the baseline is also timed with one thread, which may be faster for a small model, or beside
    other work. With ``cuda_graph``, the kernels of engines are launched as CUDA graphs. The docstring
    of ``accel.timing.paired.measure`` describes ``rounds``, ``block_seconds``, ``budget_seconds`` and ``seed``.

    The other arguments set the fields of ``accel.Source`` for all candidates that
    are sources. An option for one TensorFlow file format applies only to models of that format. A source that doesn't
    declare its inputs gets the inputs of the first artifact.

    Before timing, compares each candidate's outputs with the outputs of ``against``. A candidate that fails gets a row
    with the reason. Raises ``BadSource`` if a model is not found, and ``BadData`` if the data doesn't fit. Raises
    ``BadInputSpec`` if a size is outside the range that ``against`` declares.

    >>> report = accel.bench(["out/"], against="accel.examples.minilm:model")  # doctest: +SKIP
    >>> report.row("out/model.xml (openvino)").speedup                         # doctest: +SKIP
    """
    candidates = _several(candidates)
    ready = _candidates(candidates, against, also, cuda_graph, about)
    ready[1:1] = _with_fewer_threads(ready, threads, streams, one_thread)
    samples = path_of(data)
    declared = declared_dims(candidates[0] if against is None else against, about)
    _check_known(ready, declared)
    first = widened(_with_ranges(ready, declared, about.get("inputs")), samples, declared)
    _check_declared(ready, sizes or {})
    feeds = _feeds(first, sizes or {}, samples, seed)
    notes = (rounding_note(samples, first.signature), _unchecked(ready, [first.signature.sizes(**(sizes or {}))]))
    try:
        found = measure(
            ready,
            feeds,
            rounds=rounds,
            block_seconds=block_seconds,
            budget_seconds=budget_seconds,
            shorten="budget",
            threads=threads,
            streams=streams,
            seed=seed,
        )
    except (RunFailed, ChildCrashed) as error:
        if samples is None:
            raise
        raise failed_on_data(error, samples, _in_one(feeds), first.signature) from error
    return _noted(found, notes, rounds)


@shows_progress
@known_keywords
@takes_samples
def sweep(
    candidates: Model | Sequence[Model],
    *,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
    against: Model | None = None,
    also: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    data: Data | None = None,
    cuda_graph: bool = False,
    seed: int = 0,
    rounds: int = 9,
    block_seconds: float = 0.2,
    budget_seconds: float = 30.0,
    threads: int | None = None,
    streams: int | None = None,
    **about: Unpack[SourceOptions],
) -> Sweep:
    """Runs ``bench`` for every pair of a batch from ``batches`` and a length from ``lengths``. Returns a report for
    each pair, ordered by batch.

    The length is the size of the only dynamic dim other than the batch. Samples of ``data`` are cut or repeated to each
    shape. ``budget_seconds`` applies to each shape separately. All other arguments are the same as in ``bench``. Raises
    ``UsageError`` if the model doesn't have the dims to vary.

    >>> accel.api.bench.sweep(["out/"], batches=[1, 8], lengths=[32, 128]).write("sweep.html")  # doctest: +SKIP
    """
    candidates = _several(candidates)
    ready = _candidates(candidates, against, also, cuda_graph, about)
    samples = path_of(data)
    declared = declared_dims(candidates[0] if against is None else against, about)
    _check_known(ready, declared)
    first = widened(_with_ranges(ready, declared, about.get("inputs")), samples, declared)
    ready[1:1] = _with_fewer_threads(ready, threads, streams, one_thread=False)
    reports = []
    shapes = _shapes(first.signature, batches, lengths, sizes or {})
    notes = (rounding_note(samples, first.signature), _unchecked(ready, shapes))
    for shape in shapes:
        _check_declared(ready, shape)
    for shape in shapes:
        report(f"bench: {', '.join(f'{dim} {size}' for dim, size in shape.items())}")
        if samples is None:
            feeds = first.signature.example_inputs(seed=seed, **shape)
        else:
            from accel.proof.data import Dataset

            feeds = Dataset.load(samples, first.signature).shaped(first.signature.sizes(**shape))
        reports.append(
            measure(
                ready,
                feeds,
                rounds=rounds,
                block_seconds=block_seconds,
                budget_seconds=budget_seconds,
                shorten="budget",
                threads=threads,
                streams=streams,
                seed=seed,
            )
        )
    return Sweep(reports=tuple(_noted(one, notes, rounds) for one in reports))


def _several(candidates: Model | Sequence[Model]) -> Sequence[Model]:
    """Returns the models to time. A path, a name or any other single model is one model."""
    if isinstance(candidates, Sequence) and not isinstance(candidates, str):
        return candidates
    return [candidates]


def _noted(found: BenchReport, notes: Sequence[str], rounds: int) -> BenchReport:
    """Returns the report with ``notes``, and with a note if the budget allowed fewer than ``rounds``."""
    done = len(found.order)
    fewer = f"{done} rounds instead of {rounds}, because a round takes long; {option('budget_seconds')} allows more"
    return replace(found, notes=tuple(filter(None, (*notes, fewer if done < rounds else ""))))


def _with_fewer_threads(
    ready: Sequence[Candidate], threads: int | None, streams: int | None, one_thread: bool
) -> list[Candidate]:
    """Returns copies of the baseline, which is the first of ``ready``, with the smaller numbers of threads that the
    other candidates use. An engine runs on a GPU, so its number of threads doesn't matter."""
    base, *others = (resolved(one, threads, streams) for one in ready)
    alone = [one for one in others if one.streams == 1 and one.artifact.kind != "engine"]
    counts = {one.options["threads"] for one in alone} | ({1} if one_thread else set())
    if base.streams > 1 or base.artifact.kind == "engine":
        return []
    return [
        replace(
            ready[0],
            name=f"{base.name}, {count} thread{'s' * (count > 1)}",
            options={**ready[0].options, "threads": count},
        )
        for count in sorted(counts)
        if 0 < count < (base.options["threads"] or available_cores())
    ]


def _shapes(
    signature: Signature, batches: Sequence[int], lengths: Sequence[int], sizes: Mapping[str, int]
) -> list[dict[str, int]]:
    """Returns the sizes of the dynamic dims at each point of a sweep."""
    batch = signature.batch_dim
    others = [dim for dim in signature.dims if dim != batch and dim not in sizes]
    if batches and batch is None:
        raise UsageError(f"the model has a fixed batch; leave out {option('batches')}")
    if lengths and len(others) != 1:
        if not others:
            raise UsageError(f"this model has no dynamic dim besides the batch; leave out {option('lengths')}")
        raise UsageError(
            f"this model has the dynamic dims {', '.join(others)} besides the batch, but {option('lengths')} needs "
            f"exactly one dynamic dim; use {option('sizes', dict.fromkeys(others, lengths[0]))}"
        )
    axes = [(batch, batches), *([(others[0], lengths)] if lengths else [])]
    asked = [[(dim, value) for value in values] for dim, values in axes if dim is not None and values]
    found = [{**sizes, **dict(point)} for point in product(*asked)]
    for shape in found:
        signature.known(shape)
    return found


def _check_known(ready: Sequence[Candidate], declared: Dims) -> None:
    """Raises ``BadInputSpec`` if the user declared a range for a dim that no candidate has."""
    known = {dim: None for one in ready for dim in one.artifact.signature.dims}
    for dim in declared:
        if dim not in known:
            raise BadInputSpec(f"no input has a dim called {dim!r}; the dims are {', '.join(known) or 'none'}")


def _with_ranges(ready: Sequence[Candidate], declared: Dims, inputs: Inputs | None) -> Artifact:
    """Returns the baseline, which is the first of ``ready``, with the ranges that the user declared for its dims and
    for the values of its inputs. An engine keeps the ranges that it was built for."""
    artifact = ready[0].artifact
    if artifact.kind == "engine":
        return artifact
    signature = artifact.signature
    values = {(spec.name, spec.dtype): spec.values for spec in parse_inputs(inputs or ()) if spec.values}
    specs = tuple(replace(spec, values=values.get((spec.name, spec.dtype), spec.values)) for spec in signature.inputs)
    ranges = {dim: limits for dim, limits in parse_dims(declared).items() if dim in signature.dims}
    return replace(artifact, signature=replace(signature, inputs=specs).with_dims(ranges))


def _check_declared(ready: Sequence[Candidate], sizes: Mapping[str, int]) -> None:
    """Raises ``BadInputSpec`` if a size is outside the range that the user declared for a dim of any candidate, or
    outside the range that an engine was built for. A dim without a declared range takes any size, unless the model is
    an engine.

    A source may get its range from an artifact among the candidates. In this case, the error names the artifact,
    because the user has to export the artifact again with a wider range.
    """
    sources = [kind.name for kind in KINDS.values() if kind.framework]
    for (dim, size), artifact in product(sizes.items(), [one.artifact for one in ready]):
        known = artifact.signature.dims.get(dim)
        if known is None or known.holds(size):  # later code raises an error for an unknown dim
            continue
        if known == DimRange.default(dim) and artifact.kind != "engine":
            continue
        if artifact is ready[0].artifact:
            made = [one.artifact for one in ready if one.artifact.kind not in sources]
            artifact = next((one for one in made if one.signature.dims.get(dim) == known), artifact)
        name = artifact.path.name if artifact is ready[0].artifact else str(artifact.path)
        wider = option("dims", {dim: str(known.to_hold(size))})
        how = {
            "engine": f"build the engine again with {option('profiles')} that has it",
            **dict.fromkeys(sources, f"pass {wider}"),
        }
        again = f"export or optimize the model again with {wider}"
        raise BadInputSpec(
            f"size {size} of dim {dim} is outside the range {known.min}..{known.max} of the model {name}; "
            f"give a size within the range, or {how.get(artifact.kind, again)}"
        )


def _unchecked(ready: Sequence[Candidate], sizes: Sequence[Mapping[str, int]]) -> str:
    """Returns a note if a size is outside the default range of a made file's dim. No gate compared the file with its
    source at this size, and a benchmark only compares the candidates with one another."""
    for one in ready:
        if one.artifact.manifest is None or not one.artifact.history:
            continue
        for dim, known in one.artifact.signature.dims.items():
            beyond = [given[dim] for given in sizes if dim in given and not known.holds(given[dim])]
            if beyond:
                wider = option("dims", {dim: str(known.to_hold(max(beyond)))})
                return (
                    f"{one.name} was compared with its source at {dim} {known.min}..{known.max}, not at {beyond[0]}; "
                    f"export or optimize it again with {wider} to have that checked"
                )
    return ""


def _candidates(
    candidates: Sequence[Model],
    against: Model | None,
    also: Sequence[str],
    cuda_graph: bool,
    about: SourceOptions,
) -> list[Candidate]:
    """Opens and names every model to time, the baseline first."""
    for runtime in also:
        if "torch" not in get_runtime(runtime).kinds:
            allowed = ", ".join(name for name, r in RUNTIMES.items() if "torch" in r.kinds)
            raise UnknownName(f"runtime {runtime} doesn't run PyTorch sources; {option('also')} takes {allowed}")
    models = [*([against] if against is not None else []), *candidates]
    if not models:
        raise UsageError("there is nothing to time; give an artifact or a source")
    sources = shared([expanded for model in models for expanded in _expand(model)], about)
    made = next((source for source in sources if not source.native), None)
    like = partial(_signature, made) if made is not None else None
    artifacts = [_open(source, like) for source in sources]
    ready: list[Candidate] = []
    for artifact in artifacts:
        runtimes = [default_runtime(artifact).name, *(also if artifact.kind == "torch" else ())]
        for runtime in dict.fromkeys(runtimes):
            name = _name(artifact, runtime, {c.name for c in ready})
            opener = _OPENERS.get(artifact.kind, Candidate.opener)
            session = {"cuda_graph": True} if cuda_graph and artifact.kind == "engine" else {}
            ready.append(Candidate(name=name, artifact=artifact, runtime=runtime, options=session, opener=opener))
    if also and not any(a.kind == "torch" for a in artifacts):
        raise UsageError(
            f"the runtime {also[0]} runs PyTorch sources, but no source is given; name a source with "
            f"{option('against')}"
        )
    return ready


def _expand(model: Model) -> list[Model]:
    """If ``model`` is a folder without a main file, returns a source for each artifact in the folder. Returns any other
    model unchanged."""
    if is_live(model):
        return [model]
    source = Source.of(model)
    folder = Path(source.text)
    if isinstance(source.spec, Artifact) or not source.text or not folder.is_dir() or main_file(folder) is not None:
        return [source]
    files = sorted(p for p in folder.iterdir() if kind_of(p) and manifest_path(p).is_file())
    return [replace(source, spec=file) for file in files] or [source]


def _signature(source: Source) -> Signature:
    return source.open().signature


def _open(source: Source, like: Callable[[], Signature] | None) -> Artifact:
    if isinstance(source.spec, Artifact) or not source.text:
        return source.open()
    return source.open(like=like)


def _name(artifact: Artifact, runtime: str, taken: set[str]) -> str:
    """Returns a unique name for a candidate. The first source is named ``eager`` or ``torch.compile``. An artifact is
    named ``file (runtime)``."""
    if artifact.kind == "torch":
        short = _NAMES.get(runtime, runtime)
        names = [short, f"{artifact.source.get('spec', artifact.path)} ({short})"]
    else:
        path = artifact.path
        # All folders of accel optimize contain files of the same name, such as model.onnx, so the candidate's name
        # includes the folder.
        own = f"{path.absolute().parent.name}/{path.name}" if path.stem == "model" else path.name
        names = [f"{own} ({runtime})", f"{path} ({runtime})"]
    names += [f"{names[-1]} #{n}" for n in range(2, len(taken) + 3)]
    return next(name for name in names if name not in taken)


def _feeds(artifact: Artifact, sizes: Mapping[str, int], data: Path | None, seed: int) -> list[dict[str, np.ndarray]]:
    signature = artifact.signature
    if data is None:
        return [signature.example_inputs(seed=seed, **sizes)]
    from accel.proof.data import Dataset

    batch_dim = signature.batch_dim
    if others := [dim for dim in sizes if dim != batch_dim]:
        allowed = f"give only the size of {batch_dim}" if batch_dim else f"leave out {option('sizes')}"
        raise UsageError(f"the size of dim {others[0]!r} comes from the samples in {data}; {allowed}")
    batch = signature.sizes(**sizes)[batch_dim] if batch_dim else 1
    dataset = Dataset.load(data, signature)
    whole: list[Any] = [
        feeds
        for feeds in dataset.batches(batch, limit=_DATA_BATCHES * batch)
        if batch_dim is None or signature.check_feeds(feeds)[batch_dim] == batch
    ]
    if not whole:
        raise BadData(
            f"{data} holds {len(dataset)} samples, less than one batch of {batch}; give more samples or a smaller batch"
        )
    return whole


def _in_one(feeds: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Flattens the batches of each input and concatenates them. Batches of different shapes can only be concatenated if
    they are flat."""
    import numpy as np

    return {name: np.concatenate([one[name].ravel() for one in feeds]) for name in feeds[0]}
