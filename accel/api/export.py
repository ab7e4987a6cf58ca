"""From a source to ONNX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact
from accel.cache import StageCache
from accel.errors import BadInputSpec, GateFailed, UnknownName, UnsupportedHere, UsageError
from accel.sources import check_name, open_source
from accel.stage import StageConfig, run_stage
from accel.verify.compare import ROUNDING

if TYPE_CHECKING:
    from accel.converters.preprocess import PreprocessConfig
    from accel.signature import DimRange
    from accel.sources.declare import Dims, Inputs

MIN_OPSET, MAX_OPSET, DEFAULT_OPSET = 13, 23, 20
# What --to takes, with the main file of each in the folder -o.
FORMATS = {
    "onnx": "",
    "saved_model": "saved_model.pb",
    "tflite": "model.tflite",
    "ncnn": "model.ncnn.param",
    "openvino": "model.xml",
    "torch": "model.pt2",
}
CHANNELS = ("auto", "first", "last")
# The stage that makes ONNX of each kind of source.
TO_ONNX = {"torch": "onnx_from_torch", "tensorflow": "onnx_from_tensorflow", "tflite": "onnx_from_tflite"}


def export(
    source: str | Path,
    *,
    out: str | Path,
    inputs: Inputs | None = None,
    weights: str | Path | None = None,
    dims: Dims | None = None,
    opset: int | None = None,
    simplify: bool = True,
    use_cache: bool = True,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
    strip_training_ops: bool = False,
    channels: str = "auto",
    to: str = "onnx",
    preprocess: PreprocessConfig | None = None,
    limit: float | None = None,
) -> Artifact:
    """Export ``source`` to the ONNX file ``out`` (its manifest goes beside it) and prove that it computes the same.

    ``to``: ``onnx``, or what ONNX becomes in the folder ``out``: ``saved_model``, ``tflite``, ``ncnn``, ``openvino``,
    ``torch``.

    ``source``: ``package.module:factory``, ``file.py:factory``, an exported program (``.pt2``), a TorchScript file, a
    transformers folder; a SavedModel, a Keras file, a frozen ``.pb``, a TF1 ``.meta``, a ``.tflite``; an ONNX file, to
    change its opset, its shapes or what goes before and after it. ``inputs``: what the model takes, where the source
    doesn't say: ``{"x": ("float32", ("batch", 3, 32, 32))}`` or ``["x:float32[batch,3,32,32]"]``; a named dim is
    dynamic. ``weights``: a state dict or a training checkpoint for the factory's model (``docs/checkpoints.md``).
    ``dims``: ranges of dynamic dims as (min, opt, max), or (min, opt, max, step) where only multiples of the step fit;
    ``height`` and ``width`` of images that ``preprocess`` resizes are those that come in. ``opset``: what the file will
    have, exactly; by default 20, and of an ONNX file its own. ``preprocess``: what goes before and after the model,
    into the graph.
    ``graph_inputs``, ``graph_outputs``: tensor names (``x:0``) of a ``.pb`` or ``.meta``. ``signature``: which one of a
    SavedModel. ``strip_training_ops``: take dropout out of a graph that still holds it. ``channels``: where those of
    convolutions from TensorFlow are inside the graph: ``first``, ``last``, or ``auto`` for first where that leaves less
    to be transposed; images come in as in TensorFlow whichever it is. ``limit``: the largest relative error of an
    output after each stage, for a net that float32 itself doesn't hold to the usual 1e-4.

    Raises ``BadSource``, ``BadInputSpec``, ``ExportFailed`` (no exporter gave a right model), ``GateFailed``.
    """
    out = Path(out)
    if to not in FORMATS:
        raise UnknownName(f"unknown format {to!r}; --to takes {', '.join(FORMATS)}")
    if to == "onnx" and out.suffix != ".onnx":
        raise UsageError(f"{out} has to end in .onnx")
    if to != "onnx" and (out.is_file() or out.suffix):
        raise UsageError(f"-o names a folder with --to {to}, {out} is none; write e.g. -o {out.stem}_{to}/")
    if limit is not None and not 0 < limit < 1:
        raise UsageError(f"a limit of {limit:g} can't be; it is a relative error, e.g. 1e-3")
    if opset is not None and not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedHere(f"opset {opset} can't be exported; pass --opset {MIN_OPSET} to {MAX_OPSET}")
    if channels not in CHANNELS:
        raise UnknownName(f"unknown --channels {channels!r}; it takes {', '.join(CHANNELS)}")
    check_writable(out if to == "onnx" else out / FORMATS[to])
    dims, preprocess = _dims_of_each(dims, preprocess)
    is_onnx = Path(source).suffix == ".onnx"
    if is_onnx and not (to != "onnx" or opset or inputs or dims or preprocess):
        raise UsageError(
            f"{source} is onnx already; use accel optimize to make it faster, or say what is to change: --opset, "
            "--input, --normalize, --postprocess, --to"
        )
    src = open_source(
        source,
        inputs=None if is_onnx else inputs,
        weights=Path(weights) if weights else None,
        dims=None if is_onnx else dims,
        tensorflow={
            "graph_inputs": graph_inputs,
            "graph_outputs": graph_outputs,
            "signature": signature,
            "strip_training_ops": strip_training_ops,
        },
    )
    if src.kind not in (*TO_ONNX, "onnx"):
        raise UnsupportedHere(f"{source} is {src.kind}, which nothing leads back from; export what it was made of")
    if channels != "auto" and src.kind not in ("tensorflow", "tflite"):
        raise UsageError(
            f"--channels is for what comes from TensorFlow, {source} is {src.kind}; leave it out, or say with --layout "
            "how images come in"
        )
    with ExitStack() as stack, _limit_named(limit):
        cache = open_cache(stack, use_cache)
        # Only the last stage writes to the user's place.
        first = out if to == "onnx" and preprocess is None else None
        if src.kind == "onnx":
            made = _as_asked(src, opset, inputs, dims, limit, cache, first)
        else:
            layout = {} if channels == "auto" else {"layout": f"channels_{channels}"}
            config = to_onnx_config(src.kind, opset=opset or DEFAULT_OPSET, **layout)
            made = _to_onnx(src, config, simplify, limit, cache, first)
        if preprocess is not None:
            made = _preprocessed(made, preprocess, limit, cache, out if to == "onnx" else None)
        return made if to == "onnx" else _from_onnx(made, to, limit, cache, out / FORMATS[to])


def _dims_of_each(
    dims: Dims | None, preprocess: PreprocessConfig | None
) -> tuple[Dims | None, PreprocessConfig | None]:
    """The ranges of the model's dims, and the config with those of the pixels that come in to be resized."""
    if not dims or preprocess is None or preprocess.resize is None:
        return dims, preprocess
    from accel.sources.declare import parse_dims

    ranges = parse_dims(dims)
    coming: dict[str, DimRange] = {dim: ranges.pop(dim) for dim in ("height", "width") if dim in ranges}
    return ranges or None, replace(preprocess, dims={**preprocess.dims, **coming})


@contextmanager
def _limit_named(limit: float | None) -> Iterator[None]:
    """A gate that failed by little, at its usual limit, names the option that moves it: deep recurrent nets are further
    than that from themselves in float32."""
    try:
        yield
    except GateFailed as error:
        if limit is not None or error.value is None or error.value > ROUNDING:
            raise
        more = f"--limit {2 * error.value:.0e}"
        raise GateFailed(
            f"{error}; if float32 holds this net no closer and your metric is the same, pass {more}"
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
    """An ONNX file with the opset and the shapes that were asked for; as it is where none were."""
    from accel.converters.onnx_from_onnx import OnnxFromOnnxConfig
    from accel.converters.onnx_from_torch import LIMITS
    from accel.sources.declare import parse_dims, parse_inputs
    from accel.verify.gates import OutputGate

    if not (opset or inputs or dims or out):
        return src
    given = parse_inputs(inputs) if inputs else ()
    ranges = parse_dims(dims or {})
    known = {d for spec in (*given, *src.signature.inputs) for d in spec.shape if isinstance(d, str)}
    if unknown := set(ranges) - known:
        raise BadInputSpec(f"no input has a dim called {sorted(unknown)[0]!r}; the dims are {', '.join(sorted(known))}")
    # Which integers an input takes is no part of the file: gates and what comes after read it from the signature.
    values = {spec.name: spec.values for spec in given if spec.values}
    inputs_said = tuple(replace(s, values=values.get(s.name, s.values)) for s in src.signature.inputs)
    src = replace(src, signature=replace(src.signature, inputs=inputs_said))
    gate = OutputGate(limit=limit or LIMITS["fp32"])
    config = OnnxFromOnnxConfig(opset=opset, inputs=given, dims=ranges)
    return run_stage("onnx_from_onnx", src, config, gates=[gate], out=out, cache=cache)


def _preprocessed(
    src: Artifact, config: PreprocessConfig, limit: float | None, cache: StageCache, out: Path | None
) -> Artifact:
    from accel.converters.onnx_from_torch import LIMITS
    from accel.converters.preprocess import image_input
    from accel.verify.preprocess_gate import PreprocessGate

    spec, axis = image_input(src.signature) if config.on_the_input else (None, 1)
    gate = PreprocessGate(
        limit=limit or LIMITS.get(src.properties.get("precision", "fp32"), LIMITS["fp32"]),
        image=spec.name if spec else "",
        channels_axis=axis,
        mean=config.mean,
        std=config.std,
        layout=config.layout,
        resize=config.resize,
        postprocess=config.postprocess,
    )
    return run_stage("preprocess", src, config, gates=[gate], out=out, cache=cache)


def _to_onnx(
    src: Artifact, config: StageConfig, simplify: bool, limit: float | None, cache: StageCache, out: Path | None
) -> Artifact:
    from accel.converters.onnx_from_torch import LIMITS
    from accel.converters.simplify import SimplifyConfig
    from accel.verify.gates import OutputGate

    gates = [OutputGate(limit=limit or usual_limit(src))]
    stage = TO_ONNX[src.kind]
    if not simplify:
        return run_stage(stage, src, config, gates=gates, out=out, cache=cache)
    exported = run_stage(stage, src, config, gates=gates, cache=cache)
    if src.properties.get("precision") == "int8":  # what is compared from here on are two ONNX files
        gates = [OutputGate(limit=limit or LIMITS["fp32"])]
    return run_stage("simplify", exported, SimplifyConfig(), gates=gates, out=out, cache=cache)


def usual_limit(src: Artifact) -> float:
    """How far the ONNX form of a source may be off, by its precision."""
    from accel.converters.onnx_from_tflite import TFLITE_INT8_LIMIT
    from accel.converters.onnx_from_torch import LIMITS

    precision = src.properties.get("precision", "fp32")
    return TFLITE_INT8_LIMIT if precision == "int8" else LIMITS[precision]


def to_onnx_config(kind: str, **options: Any) -> StageConfig:
    """The config, with ``options``, of the stage that makes ONNX of a source of that kind."""
    from accel.converters.onnx_from_tensorflow import OnnxFromTensorFlowConfig
    from accel.converters.onnx_from_tflite import OnnxFromTfliteConfig
    from accel.converters.onnx_from_torch import OnnxFromTorchConfig

    configs: dict[str, type[StageConfig]] = {
        "torch": OnnxFromTorchConfig,
        "tensorflow": OnnxFromTensorFlowConfig,
        "tflite": OnnxFromTfliteConfig,
    }
    return configs[kind](**options)


def to_onnx_unjudged(src: Artifact) -> Artifact:
    """``src`` as ONNX to be looked at, not to be run: no gate compares what it computes. Kept in the cache."""
    from accel.converters.simplify import SimplifyConfig

    made = run_stage(TO_ONNX[src.kind], src, to_onnx_config(src.kind))
    return run_stage("simplify", made, SimplifyConfig())


def _from_onnx(src: Artifact, to: str, limit: float | None, cache: StageCache, out: Path) -> Artifact:
    from accel.converters.ncnn_from_onnx import NcnnFromOnnxConfig
    from accel.converters.onnx_from_torch import LIMITS
    from accel.converters.openvino_from_onnx import OpenVinoFromOnnxConfig
    from accel.converters.saved_model_from_onnx import SavedModelFromOnnxConfig
    from accel.converters.tflite_from_saved_model import TfliteFromSavedModelConfig
    from accel.converters.torch_from_onnx import TorchFromOnnxConfig
    from accel.verify.gates import OutputGate

    gates = [OutputGate(limit=limit or LIMITS.get(src.properties.get("precision", "fp32"), LIMITS["fp32"]))]
    if to == "ncnn":
        return run_stage("ncnn_from_onnx", src, NcnnFromOnnxConfig(), gates=gates, out=out, cache=cache)
    if to == "openvino":
        return run_stage("openvino_from_onnx", src, OpenVinoFromOnnxConfig(), gates=gates, out=out, cache=cache)
    if to == "torch":
        return run_stage("torch_from_onnx", src, TorchFromOnnxConfig(), gates=gates, out=out, cache=cache)
    saved_out = out if to == "saved_model" else None
    saved = run_stage("saved_model_from_onnx", src, SavedModelFromOnnxConfig(), gates=gates, out=saved_out, cache=cache)
    if to == "saved_model":
        return saved
    return run_stage("tflite_from_saved_model", saved, TfliteFromSavedModelConfig(), gates=gates, out=out, cache=cache)


def open_cache(stack: ExitStack, use_cache: bool) -> StageCache:
    """The user's cache, or one that is empty and goes away with ``stack``."""
    if use_cache:
        return StageCache()
    return StageCache(Path(stack.enter_context(TemporaryDirectory(prefix="accel-"))))


def check_writable(out: Path) -> None:
    """Find out before any work is done that ``out`` can't be written. Raises ``OSError`` as the system gives it."""
    from tempfile import NamedTemporaryFile

    check_name(out)
    if out.is_dir():
        raise IsADirectoryError(21, "is a folder", str(out))
    # The folder itself is made when there is something to put into it; not where such a link stands.
    for folder in out.absolute().parents:
        if folder.is_symlink() and not folder.exists():
            raise FileExistsError(17, "a link that leads nowhere", str(folder))
    there = next(folder for folder in out.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=there, prefix=".accel-"):
            pass
    except OSError as error:
        error.filename = str(out)
        raise
