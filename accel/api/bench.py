"""How fast are they, beside one another?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import KINDS, Artifact, manifest_path
from accel.bench.blocks import Candidate
from accel.bench.paired import measure
from accel.bench.report import BenchReport, Sweep
from accel.errors import BadData, BadInputSpec, BadSource, ChildCrashed, RunFailed, UnknownName, UsageError
from accel.progress import report
from accel.runtimes.base import RUNTIMES, default_runtime, get_runtime
from accel.signature import DimRange
from accel.sources import is_source, main_file, open_source
from accel.sources.tensorflow_source import options_of_each, saved_model_file
from accel.verify.data import widened
from accel.verify.runs import failed_on_data

if TYPE_CHECKING:
    import numpy as np

    from accel.signature import Signature
    from accel.sources.declare import Dims, Inputs

# Batches of the user's data that are run in turn: enough to average over their contents.
_DATA_BATCHES = 8
# These sessions keep their library out of this process; one that is timed is in a process of its own already.
_OPENERS = dict.fromkeys(("tensorflow", "tflite"), "accel.runtimes.tensorflow:open_here")
_NAMES = {"torch": "eager", "torch-compile": "torch.compile"}

_SOURCE_KINDS = ("torch", "tensorflow", "tflite")

Model = str | Path | Artifact


def bench(
    candidates: Sequence[Model],
    *,
    against: Model | None = None,
    also: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    data: str | Path | None = None,
    rounds: int = 9,
    block_seconds: float = 0.2,
    budget_seconds: float = 30.0,
    threads: int | None = None,
    streams: int | None = None,
    cuda_graph: bool = False,
    seed: int = 0,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    dims: Dims | None = None,
    tensorflow: Mapping[str, Any] | None = None,
) -> BenchReport:
    """Time ``candidates`` beside ``against`` (default: the first of them), each in a process of its own.

    A candidate is an artifact, the folder it is in, an ONNX file from anywhere or a source; each runs on the
    runtime it was chosen with. ``also``: runtimes that PyTorch sources are run with besides eager (``torch-compile``).
    ``sizes``: of the dynamic dims (default: the most usual ones of ``against``). ``data``: .npz whose first batches are
    the inputs instead of random ones. ``threads``, ``streams`` (runs of a candidate under way at once): the
    same for all; without either what each was found fastest with, or every core this process may use and one stream.
    Where a candidate has several streams throughputs are compared.
    ``cuda_graph``: launch the kernels of engines as CUDA graphs.
    ``inputs``, ``weights``, ``dims``: of the sources, as in ``accel.export``; one that doesn't say what it takes gets
    what the first artifact takes. ``tensorflow``: of TensorFlow's, by their names there:
    ``graph_inputs``, ``graph_outputs``, ``signature``, ``strip_training_ops``; each goes to the
    models that it concerns. The rest: see ``accel.bench.paired.measure``.

    Outputs are compared with those of ``against`` before anything is timed. A candidate that can't be compared or run
    has a row that says why. Raises ``BadSource`` for what can't be found, ``BadData`` where the data doesn't fit,
    ``BadInputSpec`` for a size outside the range that was declared for ``against``.

    >>> report = accel.benchmark(["out/"], against="accel.examples.minilm:model")  # doctest: +SKIP
    >>> report.row("out/model.xml (openvino)").speedup                             # doctest: +SKIP
    """
    ready = _candidates(candidates, against, also, cuda_graph, inputs, weights, dims, tensorflow or {})
    samples = Path(data) if data else None
    first = widened(ready[0].artifact, samples, dict(dims or {}))
    _check_declared(ready[0].artifact, sizes or {})
    feeds = _feeds(first, sizes or {}, samples, seed)
    try:
        return measure(
            ready,
            feeds,
            rounds=rounds,
            block_seconds=block_seconds,
            budget_seconds=budget_seconds,
            threads=threads,
            streams=streams,
            seed=seed,
        )
    except (RunFailed, ChildCrashed) as error:
        if samples is None:
            raise
        raise failed_on_data(error, samples, _in_one(feeds), first.signature.inputs) from error


def sweep(
    candidates: Sequence[Model],
    *,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
    against: Model | None = None,
    also: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    data: str | Path | None = None,
    cuda_graph: bool = False,
    seed: int = 0,
    inputs: Inputs | None = None,
    weights: Path | None = None,
    dims: Dims | None = None,
    tensorflow: Mapping[str, Any] | None = None,
    **how: Any,
) -> Sweep:
    """``bench`` at every pair of ``batches`` and ``lengths``: a report for each, batches first.

    The length is the one dynamic dim besides the batch. With ``data`` its samples are cut or repeated to each shape.
    ``how``: ``rounds``, ``block_seconds``, ``budget_seconds``, ``threads``, ``streams``; the budget is for each shape.

    >>> accel.api.bench.sweep(["out/"], batches=[1, 8], lengths=[32, 128]).write("sweep.html")  # doctest: +SKIP
    """
    ready = _candidates(candidates, against, also, cuda_graph, inputs, weights, dims, tensorflow or {})
    samples = Path(data) if data else None
    first = widened(ready[0].artifact, samples, dict(dims or {}))
    reports = []
    shapes = _shapes(first.signature, batches, lengths, sizes or {})
    for shape in shapes:
        _check_declared(ready[0].artifact, shape)
    for shape in shapes:
        report(f"bench: {', '.join(f'{dim} {size}' for dim, size in shape.items())}")
        if samples is None:
            feeds = first.signature.example_inputs(seed=seed, **shape)
        else:
            from accel.verify.data import Dataset

            feeds = Dataset.load(samples, first.signature).shaped(first.signature.sizes(**shape))
        reports.append(measure(ready, feeds, seed=seed, **how))
    return Sweep(reports=tuple(reports))


def _shapes(
    signature: Signature, batches: Sequence[int], lengths: Sequence[int], sizes: Mapping[str, int]
) -> list[dict[str, int]]:
    """The sizes of the dynamic dims at each point of a sweep. ``UsageError`` where the model has no such dim."""
    batch = signature.batch_dim
    others = [dim for dim in signature.dims if dim != batch and dim not in sizes]
    if batches and batch is None:
        raise UsageError("the model has a fixed batch; leave out --batch")
    if lengths and len(others) != 1:
        has = f"has {', '.join(others)}" if others else "has none"
        raise UsageError(f"--length is for a model with one dynamic dim besides the batch, this {has}; use --sizes")
    axes = [(batch, batches), *([(others[0], lengths)] if lengths else [])]
    asked = [[(dim, value) for value in values] for dim, values in axes if dim is not None and values]
    found = [{**sizes, **dict(point)} for point in product(*asked)]
    for shape in found:
        signature.known(shape)
    return found


def _check_declared(artifact: Artifact, sizes: Mapping[str, int]) -> None:
    """``BadInputSpec`` for a size beyond the range that somebody declared for its dim (a table of positions may end
    there), or that an engine was built for. Ranges that nobody declared, accel's own, bind nobody."""
    for dim, size in sizes.items():
        known = artifact.signature.dims.get(dim)
        if known is None or known.min <= size <= known.max:  # a dim that there isn't is named later
            continue
        if known == DimRange.default(dim) and artifact.kind != "engine":
            continue
        wider = f"--dim {dim}={known.to_hold(size)}"
        how = {"engine": "build it with a --profile that has it", **dict.fromkeys(_SOURCE_KINDS, f"pass {wider}")}
        raise BadInputSpec(
            f"{dim} {size} is outside {known.min}..{known.max}, which is the range of {dim} in {artifact.path.name}; "
            f"give sizes within, or {how.get(artifact.kind, f'export it again with {wider}')}"
        )


def _candidates(
    candidates: Sequence[Model],
    against: Model | None,
    also: Sequence[str],
    cuda_graph: bool,
    inputs: Inputs | None,
    weights: Path | None,
    dims: Dims | None,
    tensorflow: Mapping[str, Any],
) -> list[Candidate]:
    """All that is to be timed, opened and named, the baseline first."""
    for runtime in also:
        if "torch" not in get_runtime(runtime).kinds:
            allowed = ", ".join(name for name, r in RUNTIMES.items() if "torch" in r.kinds)
            raise UnknownName(f"runtime {runtime} doesn't run PyTorch sources; also takes {allowed}")
    models = [*([against] if against is not None else []), *candidates]
    if not models:
        raise UsageError("there is nothing to time; give an artifact or a source")
    models = [path for model in models for path in _expand(model)]
    each = options_of_each([str(m.path if isinstance(m, Artifact) else m) for m in models], tensorflow)
    like = next((partial(_signature, m) for m in models if isinstance(m, Artifact) or not is_source(m)), None)
    artifacts = [_open(m, inputs, weights, dims, said, like) for m, said in zip(models, each, strict=True)]
    ready: list[Candidate] = []
    for artifact in artifacts:
        runtimes = [default_runtime(artifact).name, *(also if artifact.kind == "torch" else ())]
        for runtime in dict.fromkeys(runtimes):
            name = _name(artifact, runtime, {c.name for c in ready})
            opener = _OPENERS.get(artifact.kind, Candidate.opener)
            options = {"cuda_graph": True} if cuda_graph and artifact.kind == "engine" else {}
            ready.append(Candidate(name=name, artifact=artifact, runtime=runtime, options=options, opener=opener))
    if also and not any(a.kind == "torch" for a in artifacts):
        raise UsageError(f"{also[0]} runs PyTorch sources and none was given; name one with --against")
    return ready


def _expand(model: Model) -> list[Model]:
    """A folder without a main file stands for every artifact in it."""
    if isinstance(model, Artifact) or model == "" or not Path(model).is_dir() or main_file(Path(model)) is not None:
        return [model]
    files = sorted(p for p in Path(model).iterdir() if p.suffix in KINDS and manifest_path(p).is_file())
    return [*files] or [model]


# What marks a folder as a source: one written by save_pretrained, one written by accel train.
_SOURCES = ("config.json", "final/config.json")


def _signature(model: Model) -> Signature:
    return open_source(model).signature


def _open(
    model: Model,
    inputs: Inputs | None,
    weights: Path | None,
    dims: Dims | None,
    tensorflow: Mapping[str, Any],
    like: Callable[[], Signature] | None,
) -> Artifact:
    if isinstance(model, Artifact) or model == "":
        return open_source(model)
    path = Path(model)
    known = any((path / name).is_file() for name in _SOURCES) or saved_model_file(path) is not None
    if path.is_dir() and main_file(path) is None and not known:
        raise BadSource(f"{path} holds no artifact; make one with accel optimize -o {path}")
    # What says what goes into a source has nothing to say to a file that knows.
    if not is_source(path):
        return open_source(path)
    return open_source(model, inputs=inputs, weights=weights, dims=dims, tensorflow=tensorflow, like=like)


def _name(artifact: Artifact, runtime: str, taken: set[str]) -> str:
    """``eager`` and ``torch.compile`` for the first source, ``file (runtime)`` for an artifact; unique."""
    if artifact.kind == "torch":
        short = _NAMES.get(runtime, runtime)
        names = [short, f"{artifact.source.get('spec', artifact.path)} ({short})"]
    else:
        path = artifact.path
        # Every folder of accel optimize has its model.onnx or model.xml: the folder says which one it is.
        own = f"{path.absolute().parent.name}/{path.name}" if path.stem == "model" else path.name
        names = [f"{own} ({runtime})", f"{path} ({runtime})"]
    names += [f"{names[-1]} #{n}" for n in range(2, len(taken) + 3)]
    return next(name for name in names if name not in taken)


def _feeds(artifact: Artifact, sizes: Mapping[str, int], data: Path | None, seed: int) -> list[dict[str, np.ndarray]]:
    signature = artifact.signature
    if data is None:
        return [signature.example_inputs(seed=seed, **sizes)]
    from accel.verify.data import Dataset

    batch_dim = signature.batch_dim
    if others := [dim for dim in sizes if dim != batch_dim]:
        raise UsageError(f"the size of {others[0]!r} comes from {data}; give only that of {batch_dim or 'no dim'}")
    batch = signature.sizes(**sizes)[batch_dim] if batch_dim else 1
    dataset = Dataset.load(data, signature)
    whole: list[Any] = [
        feeds
        for feeds in dataset.batches(batch, limit=_DATA_BATCHES * batch)
        if batch_dim is None or signature.check_feeds(feeds)[batch_dim] == batch
    ]
    if not whole:
        raise BadData(
            f"{data} holds {len(dataset)} samples, less than one batch of {batch}; give more or a smaller batch"
        )
    return whole


def _in_one(feeds: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """All the numbers of each input, in one row: the shapes of several files may differ."""
    import numpy as np

    return {name: np.concatenate([one[name].ravel() for one in feeds]) for name in feeds[0]}
