"""Exports a source to ONNX, and converts ONNX to other formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack, cast

from accel.artifact import Artifact
from accel.cache import StageCache, users_cache
from accel.child import resolve
from accel.errors import AccelError, BadInputSpec, CannotWrite, GateFailed, UnknownName, UnsupportedHere, UsageError
from accel.folders.writing import writing
from accel.optimizer.publish import check_no_decoder
from accel.progress import shows_progress
from accel.signature import new_names
from accel.signature.decoder import Cache
from accel.sources.source import Model, Source, SourceOptions, check_name, known_keywords
from accel.spelling import option, options
from accel.stage import Gate, StageConfig, run_stage
from accel.tables.kinds import Kind, export_formats
from accel.tables.limits import EXPORT_LIMITS, ROUNDING
from accel.tables.stage_table import route

if TYPE_CHECKING:
    from accel.converters.graph.preprocess import PreprocessConfig
    from accel.signature import DimRange
    from accel.sources.declare import Dims, Inputs

MIN_OPSET, MAX_OPSET, DEFAULT_OPSET = 13, 23, 20
CHANNELS = ("auto", "first", "last")
# Maps each kind of source to the stage that converts the source to ONNX.
TO_ONNX = {"torch": "onnx_from_torch", "tensorflow": "onnx_from_tensorflow", "tflite": "onnx_from_tflite"}


@shows_progress
@known_keywords
def export(
    source: Model,
    *,
    out: str | Path | None = None,
    opset: int | None = None,
    simplify: bool = True,
    use_cache: bool = True,
    channels: str = "auto",
    to: str = "onnx",
    preprocess: PreprocessConfig | None = None,
    limit: float | None = None,
    adapters_as: str = "merged",
    **about: Unpack[SourceOptions],
) -> Artifact:
    """Exports ``source`` to the ONNX file ``out``, writes the file's manifest beside the file, and proves that the file
    computes the same outputs as ``source``. Without ``out``, the file stays in the cache for a week. An
    ``accel.Pipeline`` is exported to the folder ``out``, with a subfolder for each part, and is verified end to end. A
    model of transformers that generates text is exported to the folder ``out`` with its KV cache, in the form that
    onnxruntime-genai and optimum read, or with ``to="openvino"`` in the form of openvino-genai. ``decoder=False``
    exports one pass without a cache instead, and ``decoder=True`` exports a module of your own (see
    ``accel.sources.torch.decoder``).

    ``to`` is the format of the result (``onnx``, ``saved_model``, ``tflite``, ``ncnn``, ``openvino`` or ``torch``).
    Formats other than ``onnx`` are converted from the ONNX model and written to the folder ``out``.

    ``accel.Source`` describes ``source`` and the arguments that aren't listed here (``inputs``, ``example``,
    ``dims``...). The source may also be an ONNX file, to change its opset, shapes, preprocessing or postprocessing.
    With a ``preprocess`` that resizes images, the dims ``height`` and ``width`` are the sizes of the images before
    resizing. ``opset`` is the opset of the file (default: 20, or the opset of a source that is ONNX already).
    ``preprocess`` describes the preprocessing and postprocessing that are added to the graph. ``channels`` is the
    position of the channels (``first``, ``last`` or ``auto``) inside the graph of a TensorFlow model. The inputs keep
    TensorFlow's layout. ``auto`` chooses the position that needs fewer transposes. ``limit`` is the largest allowed
    relative error of an output after each stage. Pass a larger limit for a model whose rounding errors in float32 are
    above the default limit of 1e-4. With ``adapters_as="inputs"``, the matrices of one or more ``adapters`` stay inputs
    of a decoder, which a run may leave out, and their files are beside it.

    Raises ``BadSource`` or ``BadInputSpec`` if the source can't be opened. Raises ``ExportFailed`` if no exporter makes
    a correct model, and ``GateFailed`` if a stage changes the outputs by more than the limit.
    """
    formats = export_formats()
    _check_arguments(to, opset, channels, limit)
    if out is not None:
        _check_out(Path(out), to, formats[to].main_file)
    from .decoder.adapters import apart, check_form

    named, adapters = apart(Source.of(source, **about), adapters_as)
    inputs = named.inputs
    dims, preprocess = _dims_of_each(named.dims, preprocess)
    path = named.path if named.hub_model else Path(named.text)
    is_onnx = path.suffix == ".onnx"
    if is_onnx and path.is_file() and not (to != "onnx" or opset or inputs or dims or preprocess):
        raise UsageError(
            f"{named.text} is ONNX already; use accel optimize to make it faster, or request a change with "
            f"{options('opset', 'inputs', 'to', 'preprocess')}"
        )

    def to_folder(write: Callable[..., Artifact], what: str, *models: Artifact | Source) -> Artifact:
        folder = _folder_of(out, what, preprocess)
        with ExitStack() as stack, _limit_named(limit):
            return write(
                *models,
                opset=opset or DEFAULT_OPSET,
                simplify=simplify,
                limit=limit,
                cache=open_cache(stack, use_cache),
                folder=folder,
            )

    from .decoder.export import export_decoder, export_stateful, is_decoder

    as_decoder = (
        not is_onnx and to in ("onnx", "openvino") and is_decoder(named, Path(out) if out is not None else None)
    )
    if adapters:
        check_form(named, to, as_decoder=as_decoder)
    if as_decoder:
        named = replace(named, decoder=True)
    from .decoder.pair import export_pair
    from .decoder.parts import is_pair

    if not is_onnx and to == "onnx" and is_pair(named, Path(out) if out is not None else None):
        return to_folder(export_pair, "an encoder and a decoder", named)
    src = replace(named, inputs=_of_open(path, inputs) if is_onnx else inputs, dims=None if is_onnx else dims).open()
    if as_decoder or (to == "openvino" and named.decoder is not False and Cache.of(src.signature) is not None):
        write = partial(export_decoder, adapters=adapters) if to == "onnx" else export_stateful
        return to_folder(write, "a decoder with a KV cache", src, named)
    if out is not None and "decoder" not in src.source:
        given = Path(out)
        if given.name == formats["onnx"].main_file or not given.suffix:  # another file doesn't replace the decoder
            check_no_decoder(given.parent if given.suffix else given)
    if "pipeline" in src.source and src.kind == "torch":
        from .pipeline.export import export_pipeline

        if to != "onnx":
            raise UsageError(
                f"this source is a pipeline of several models, but {option('to', to)} is for a single model; leave out "
                f"{option('to', to)}"
            )
        return to_folder(export_pipeline, "a pipeline of several models", src)
    if src.kind not in (*TO_ONNX, "onnx"):
        raise UnsupportedHere(
            f"{named.text} is of kind {src.kind}, which can't be converted back to ONNX; export the source that it was "
            "made from"
        )
    if out is None:
        folder = StageCache().result_folder()
        out = folder / "model.onnx" if to == "onnx" else folder
    out = Path(out)
    if to == "onnx" and out.suffix != ".onnx":
        tokens = f", or pass {option('decoder', True)} for a model that generates text" if src.kind == "torch" else ""
        raise UsageError(f"the output file {out} has to end in .onnx; rename the file{tokens}")
    if channels != "auto" and src.kind not in ("tensorflow", "tflite"):
        raise UsageError(
            f"the model {named.text} is of kind {src.kind}, but {option('channels')} is for TensorFlow models; leave "
            f"out {option('channels')}, or give the layout of images with {option('layout')}"
        )
    with ExitStack() as stack, _limit_named(limit):
        cache = open_cache(stack, use_cache)
        # Only the last stage writes to ``out``.
        first = out if to == "onnx" and preprocess is None else None
        if src.kind == "onnx":
            made = _as_asked(src, opset, inputs, dims, limit, cache, first)
        else:
            layout = {} if channels == "auto" else {"layout": f"channels_{channels}"}
            config = to_onnx_config(src.kind, opset=opset or DEFAULT_OPSET, **layout)
            made = to_onnx(src, config, simplify, limit, cache, first)
        if preprocess is not None:
            made = _preprocessed(made, preprocess, limit, cache, out if to == "onnx" else None)
        return made if to == "onnx" else _from_onnx(made, formats[to], limit, cache, out)


def _of_open(path: Path, inputs: Inputs | None) -> Inputs | None:
    """Returns those of ``inputs`` whose shapes the ONNX file leaves open. The other shapes change after it is
    opened."""
    from accel.sources.declare import parse_inputs
    from accel.sources.onnx.file import undeclared_inputs

    if not inputs or not path.is_file():
        return None
    undeclared = undeclared_inputs(path)
    return [spec for spec in parse_inputs(inputs) if spec.name in undeclared] or None


def _check_arguments(to: str, opset: int | None, channels: str, limit: float | None) -> None:
    """Checks the arguments of ``export`` that don't depend on the source."""
    if to not in export_formats():
        raise UnknownName(f"unknown format {to!r}; {option('to')} takes {', '.join(export_formats())}")
    if limit is not None and not 0 < limit < 1:
        raise UsageError(f"{limit:g} is not a valid limit; give a relative error such as 1e-3")
    if opset is not None and not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedHere(
            f"accel can't export opset {opset}; pass an opset from {MIN_OPSET} to {MAX_OPSET} with {option('opset')}"
        )
    if channels not in CHANNELS:
        raise UnknownName(f"unknown position of channels {channels!r}; pass one of {', '.join(CHANNELS)}")


def _check_out(out: Path, to: str, main_file: str) -> None:
    """Raises an error for a path that can't be written. Accepts a path without a suffix, which may be the folder of a
    pipeline. The source isn't opened yet, so it is unknown whether the source is a pipeline."""
    if to == "onnx" and (out.suffix not in (".onnx", "") or (not out.suffix and out.is_file())):
        raise UsageError(f"the output file {out} has to end in .onnx; rename the file")
    if to != "onnx" and (out.is_file() or out.suffix):
        raise UsageError(
            f"{option('to', to)} writes its files to a folder, but {out} "
            f"{'is a file' if out.is_file() else f'ends in {out.suffix}, like a file'}; pass a folder, e.g. "
            f"{option('out', f'{out.stem}_{to}/')}"
        )
    check_writable(out if out.suffix else out / main_file)


def _folder_of(out: str | Path | None, what: str, preprocess: PreprocessConfig | None) -> Path:
    """Returns the folder to export a source to that takes several files. ``what`` describes the source. Raises
    ``UsageError`` if an argument is for a single file."""
    if preprocess is not None:
        raise UsageError(
            f"this source is {what}, but {option('preprocess')} is for a single model; leave out {option('preprocess')}"
        )
    if out is not None and Path(out).suffix == ".onnx":
        raise UsageError(f"{what} is exported to a folder; pass e.g. {option('out', f'{Path(out).stem}/')}")
    return Path(out) if out is not None else StageCache().result_folder()


def _dims_of_each(
    dims: Dims | None, preprocess: PreprocessConfig | None
) -> tuple[Dims | None, PreprocessConfig | None]:
    """Splits ``dims`` into the ranges of the model's dims and the size ranges of the images before resizing. Returns
    the ranges of the model's dims, and ``preprocess`` with the size ranges of the images."""
    if not dims or preprocess is None or preprocess.resize is None:
        return dims, preprocess
    from accel.sources.declare import parse_dims

    ranges = parse_dims(dims)
    coming: dict[str, DimRange] = {dim: ranges.pop(dim) for dim in ("height", "width") if dim in ranges}
    return ranges or None, replace(preprocess, dims={**preprocess.dims, **coming})


@contextmanager
def _limit_named(limit: float | None) -> Iterator[None]:
    """If a gate fails because the error of the outputs is only slightly above the usual limit, adds advice to the
    message. The advice is to raise the limit. The float32 rounding of a deep recurrent net alone may exceed the usual
    limit.
    """
    try:
        yield
    except GateFailed as error:
        if limit is not None or error.value is None or error.value > ROUNDING:
            raise
        more = option("limit", float(f"{2 * error.value:.0e}"))
        raise GateFailed(
            f"{error}; if float32 rounding alone gives this error and your metric stays the same, pass {more}"
        ) from error


def _as_asked(
    src: Artifact,
    opset: int | None,
    inputs: Inputs | None,
    dims: Dims | None,
    limit: float | None,
    cache: StageCache,
    out: Path | None,
) -> Artifact:
    """Returns an ONNX model with the opset and the shapes that the caller requested.

    Returns ``src`` unchanged if the caller requested no change and no ``out``, unless the file has functions of its
    own, which only ONNX Runtime reads.
    """
    from accel.converters.graph.onnx_from_onnx import OnnxFromOnnxConfig
    from accel.proof.gates import OutputGate
    from accel.sources.declare import parse_dims, parse_inputs
    from accel.sources.onnx.file import OWN_FUNCTIONS

    if not (opset or inputs or dims or out or src.properties.get(OWN_FUNCTIONS)):
        return src
    given = parse_inputs(inputs) if inputs else ()
    ranges = parse_dims(dims or {})
    known = {d for spec in (*given, *src.signature.inputs) for d in spec.shape if isinstance(d, str)}
    if unknown := set(ranges) - known:
        has = ", ".join(sorted(known)) or "none"
        raise BadInputSpec(f"no input has a dim called {sorted(unknown)[0]!r}; the dims are {has}")
    # An ONNX file can't record the range of an integer input, so gates and later stages read the range from the
    # signature.
    own = new_names(given, src.signature.inputs)  # a bound may name a dim by its new name
    values = {spec.name: spec.with_dims(own).values for spec in given if spec.values}
    inputs_said = tuple(replace(s, values=values.get(s.name, s.values)) for s in src.signature.inputs)
    src = replace(src, signature=replace(src.signature, inputs=inputs_said))
    gate = OutputGate(limit=limit or EXPORT_LIMITS["fp32"])
    config = OnnxFromOnnxConfig(opset=opset, inputs=given, dims=ranges)
    return run_stage("onnx_from_onnx", src, config, gates=[gate], out=out, cache=cache)


def _preprocessed(
    src: Artifact, config: PreprocessConfig, limit: float | None, cache: StageCache, out: Path | None
) -> Artifact:
    from accel.converters.graph.preprocess import image_input
    from accel.proof.preprocess_gate import PreprocessGate

    spec, axis = image_input(src.signature) if config.on_the_input else (None, 1)
    gate = PreprocessGate(
        limit=limit or EXPORT_LIMITS.get(src.properties.get("precision", "fp32"), EXPORT_LIMITS["fp32"]),
        image=spec.name if spec else "",
        channels_axis=axis,
        mean=config.mean,
        std=config.std,
        layout=config.layout,
        resize=config.resize,
        postprocess=config.postprocess,
    )
    return run_stage("preprocess", src, config, gates=[gate], out=out, cache=cache)


def to_onnx(
    src: Artifact,
    config: StageConfig,
    simplify: bool,
    limit: float | None,
    cache: StageCache,
    out: Path | None = None,
    gates: Sequence[Gate] = (),
) -> Artifact:
    """Converts the source ``src`` to an ONNX artifact. ``gates`` are further checks of the artifact, after the
    comparison of its outputs with the outputs of ``src``. Of a PyTorch model, only the simplified file is compared."""
    from accel.converters.graph.simplify import SimplifyConfig
    from accel.proof.gates import OutputGate

    first: list[Any] = [OutputGate(limit=limit or usual_limit(src)), *gates]
    stage = TO_ONNX[src.kind]
    if not simplify:
        return run_stage(stage, src, config, gates=first, out=out, cache=cache)
    if (made := proven_once(src, config, first, cache)) is not None:
        return made.copy_to(out) if out is not None else made
    exported = run_stage(stage, src, config, gates=first, cache=cache)
    if src.properties.get("precision") == "int8":  # the next gate compares the exported file with the simplified file
        first = [OutputGate(limit=limit or EXPORT_LIMITS["fp32"])]
    return run_stage("simplify", exported, SimplifyConfig(), gates=first, out=out, cache=cache)


def proven_once(src: Artifact, config: StageConfig, gates: Sequence[Gate], cache: StageCache) -> Artifact | None:
    """Exports and simplifies the PyTorch model ``src``, and compares only the simplified file with ``src``, on all the
    inputs of the first gate, an ``OutputGate``, and by the further gates. Returns None if ``src`` is no PyTorch model,
    or if the outputs differ. The caller then compares the file of each stage, which tells the stage that is wrong, and
    tries the other exporter."""
    from accel.converters.graph.simplify import SimplifyConfig
    from accel.proof.gates import OutputGate

    gate, *others = gates
    if src.kind != "torch" or not isinstance(gate, OutputGate):
        return None
    exported = run_stage(TO_ONNX[src.kind], src, config, gates=[replace(gate, deferred=True)], cache=cache)
    compared: list[Gate] = [replace(gate, name="outputs, compared with the source", reference=src)]
    compared += [replace(cast("Any", one), reference=src) for one in others]
    with TemporaryDirectory() as rejected:  # the caller sets a wrong file aside
        try:
            return run_stage(
                "simplify",
                exported,
                SimplifyConfig(),
                gates=compared,
                cache=StageCache(cache.root, rejected=Path(rejected)),
            )
        except CannotWrite:
            raise
        except AccelError:
            return None


def usual_limit(src: Artifact) -> float:
    """Returns the largest relative error that the export of ``src`` may have, given the precision of ``src``."""

    precision = src.properties.get("precision", "fp32")
    return EXPORT_LIMITS["tflite-int8" if precision == "int8" else precision]


def to_onnx_config(kind: str, **fields: Any) -> StageConfig:
    """Returns the config of the stage that exports a source of this ``kind`` to ONNX. ``fields`` are the fields of the
    config."""
    from accel.converters.from_tensorflow.onnx_from_tensorflow import OnnxFromTensorFlowConfig
    from accel.converters.from_tensorflow.onnx_from_tflite import OnnxFromTfliteConfig
    from accel.converters.from_torch.onnx_from_torch import OnnxFromTorchConfig

    configs: dict[str, type[StageConfig]] = {
        "torch": OnnxFromTorchConfig,
        "tensorflow": OnnxFromTensorFlowConfig,
        "tflite": OnnxFromTfliteConfig,
    }
    return configs[kind](**fields)


def to_onnx_unjudged(src: Artifact) -> Artifact:
    """Exports ``src`` to ONNX without gates and keeps the result in the cache. The result is for display only."""
    from accel.converters.graph.simplify import SimplifyConfig

    made = run_stage(TO_ONNX[src.kind], src, to_onnx_config(src.kind))
    return run_stage("simplify", made, SimplifyConfig())


def _from_onnx(src: Artifact, kind: Kind, limit: float | None, cache: StageCache, folder: Path) -> Artifact:
    """Converts the ONNX artifact ``src`` to a model of ``kind``. Only the last stage writes to ``folder``."""
    from accel.proof.gates import OutputGate

    precision = src.properties.get("precision", "fp32")
    gates = [OutputGate(limit=limit or EXPORT_LIMITS.get(precision, EXPORT_LIMITS["fp32"]))]
    *before, last = route(src.kind, kind.name)
    for stage in before:
        src = run_stage(stage.name, src, resolve(stage.config)(), gates=gates, cache=cache)
    out = folder / kind.main_file
    return run_stage(last.name, src, resolve(last.config)(), gates=gates, out=out, cache=cache)


def open_cache(stack: ExitStack, use_cache: bool) -> StageCache:
    """Returns the user's cache, or an empty cache that is deleted when ``stack`` closes. Rejected files are always kept
    in the user's cache, because error messages name them."""
    if use_cache:
        return StageCache()
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="accel-")))
    return StageCache(folder, rejected=users_cache() / "rejected")


def check_writable(out: Path) -> None:
    """Raises ``CannotWrite`` if ``out`` can't be written. Callers call this function before any work starts."""
    from tempfile import NamedTemporaryFile

    check_name(out)
    with writing():
        if out.is_dir():
            raise IsADirectoryError(21, "is a folder", str(out))
        # A folder can't be created at the path of a broken symlink.
        for folder in out.absolute().parents:
            if folder.is_symlink() and not folder.exists():
                raise FileExistsError(17, "a link that leads nowhere", str(folder))
    with writing(out):
        there = next(folder for folder in out.absolute().parents if folder.exists())
        with NamedTemporaryFile(dir=there, prefix=".accel-"):
            pass
