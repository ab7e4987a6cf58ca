"""Describes a model and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from accel.artifact import Artifact, manifest_path
from accel.child import run_in_child
from accel.errors import RandomOps, UnsupportedHere, UsageError
from accel.proof.chain import Link, check_chain
from accel.runtimes.base import recorded_options
from accel.sources.source import Model, Source, SourceOptions, known_keywords
from accel.spelling import option

if TYPE_CHECKING:
    from accel.graph.read import ReadGraph


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Holds the result of an inspection.

    ``chain`` holds the checked hashes, and is empty without ``check``. ``intact`` tells whether all hashes are
    unchanged, and is None without ``check``. ``kernels`` lists the name, type, dtypes and ONNX nodes of each kernel of
    an engine, in the order in which the kernels run. If the TensorRT toolkit refuses the engine, ``problem`` is the
    toolkit's reason. Otherwise ``problem`` is empty.
    """

    artifact: Artifact
    bytes: int
    chain: tuple[Link, ...] = ()
    intact: bool | None = None
    graph: dict[str, Any] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()
    problem: str = ""

    @property
    def precision(self) -> str:
        """Returns the precision that the model computes in, or "" if it is unknown.

        The session that ``accel optimize`` chose may compute in another precision than the file has. The precision of a
        quantized model names both, as in ``int8+bf16``.
        """
        own = str(self.artifact.properties.get("precision", ""))
        asked = str(recorded_options(self.artifact).get("precision", "fp32"))
        if asked == "fp32" or asked == own:
            return own
        return asked if own in ("", "fp32") else f"{own}+{asked}"

    @property
    def changed(self) -> list[Link]:
        return [link for link in self.chain if link.status == "changed"]

    def to_json(self) -> dict[str, Any]:
        artifact = self.artifact
        return {
            "path": str(artifact.path),
            "kind": artifact.kind,
            "bytes": self.bytes,
            "precision": self.precision,
            "signature": artifact.signature.to_json(),
            "properties": dict(artifact.properties),
            "graph": self.graph,
            "kernels": list(self.kernels),
            "source": dict(artifact.source),
            "stages": [dict(record) for record in artifact.history],
            "session": dict(artifact.manifest.session) if artifact.manifest else {},
            "intact": self.intact,
            "problem": self.problem,
            "chain": [link.to_json() for link in self.chain],
        }


@known_keywords
def inspect(
    model: Model,
    *,
    check: bool = False,
    page: str | Path | None = None,
    against: Model | None = None,
    sizes: Mapping[str, int] | None = None,
    **about: Unpack[SourceOptions],
) -> Inspection:
    """Returns the signature, properties and history of ``model``.

    For any model except an engine or a pipeline, also counts operators, parameters and FLOPs at ``sizes`` (default: the
    usual sizes) and lists warnings. To count the operators of a TensorFlow, TFLite or PyTorch model, exports the model
    to ONNX. With ``check`` and without ``page``, skips the counts of a TensorFlow, TFLite or PyTorch model. With
    ``check``, computes every hash in the model's history again, from the file back to the weights. For an engine,
    ``check`` also loads the engine with its toolkit, if the toolkit is installed.

    ``page`` is the path of an HTML file that shows the graph. If ``against`` is given, the HTML file shows both graphs
    side by side. The other arguments set the fields of ``accel.Source``. For a ``.pb`` or ``.meta`` file,
    ``graph_inputs`` and ``graph_outputs`` default to the likely inputs and outputs.

    Raises ``BadSource`` if the model is not found, and ``ChainBroken`` if ``check`` is given for a model without a
    manifest. Raises ``UnsupportedHere`` if ``page`` is given for an engine.
    """
    if against is not None and page is None:
        raise UsageError(
            f"{option('against')} needs an HTML file that shows the two graphs; name the file with "
            f"{option('page', 'out.html')}"
        )
    warnings: list[str] = []
    source = Source.of(model, **about)
    artifact = _open_unchecked(source) if check else _open(source, warnings)
    size = sum(f.stat().st_size for f in artifact.files if f.is_file())
    links = tuple(check_chain(artifact)) if check else ()
    intact = all(link.status != "changed" for link in links) if check else None
    if check and artifact.manifest and any(not f.is_file() for f in artifact.files):
        intact = False  # a file of the artifact is missing
    problem = _engine_problem(artifact) if intact and artifact.kind == "engine" else ""
    if problem:
        intact = False
    cheap = artifact.kind == "onnx" or (not check and artifact.kind not in ("engine", "pipeline"))
    read = cheap or (page and artifact.kind != "pipeline")
    found = _read(artifact, sizes) if intact is not False and read else None
    graph = found.to_json() if found else {}
    if found and warnings:
        graph["warnings"] = [*warnings, *graph["warnings"]]
    notes = artifact.history[-1]["notes"] if artifact.kind == "engine" and artifact.history else {}
    kernels = tuple(notes.get("kernels", ()))
    if page is not None:
        if artifact.kind == "pipeline":
            raise UnsupportedHere(
                f"the pipeline {artifact.path} has no graph of its own; draw one of its parts: {_first_part(artifact)}"
            )
        if found is None:
            raise UnsupportedHere(
                f"the artifact {artifact.path} was changed after it was made; make the artifact again to draw its graph"
            )
        drawn = [(artifact, found)]
        if against is not None:
            other = _open(Source.of(against), [])
            known = {name: size for name, size in (sizes or {}).items() if name in other.signature.dims}
            drawn.append((other, _read(other, known)))
        _write_page(drawn, Path(page))
    return Inspection(
        artifact=artifact, bytes=size, chain=links, intact=intact, graph=graph, kernels=kernels, problem=problem
    )


def _first_part(pipeline: Artifact) -> Path:
    from accel.runtimes.pipeline.file import parts_of

    return next(iter(parts_of(pipeline).values())).path


def _engine_problem(engine: Artifact) -> str:
    """Returns the TensorRT toolkit's reason if the toolkit refuses the engine. Returns an empty text if the toolkit
    accepts the engine or is not installed."""
    from accel.converters.to_tensorrt.engine_from_onnx import check_engine
    from accel.runtimes.tensorrt_toolkit import toolkit_runtime

    if not toolkit_runtime(engine.properties["toolkit"]).installed:
        return ""
    return check_engine(engine.path) or ""


def _open(source: Source, warnings: list[str]) -> Artifact:
    """Opens any model that ``inspect`` can describe. Unlike ``Source.open``, ``_open`` takes an OpenVINO or ncnn model
    without a manifest, a frozen graph without named inputs and outputs, and a graph with dropout."""
    if isinstance(source.spec, Artifact):
        return source.spec
    path = source.path
    if path.is_file() and not manifest_path(path).is_file():
        if path.suffix == ".xml":
            # An untrusted file could crash OpenVINO's native parser, so the parser runs in a child process.
            signature, properties = run_in_child("accel.converters.graph.read_ir:describe", path=path)
            return Artifact(path, "openvino", signature, properties=properties, companions=(f"{path.stem}.bin",))
        if path.suffix == ".param":
            from accel.graph.ncnn_param import bare_signature

            return Artifact(path, "ncnn", bare_signature(path), companions=(f"{path.stem}.bin",))
        if path.suffix in (".pb", ".meta") and path.name != "saved_model.pb":
            return _open_bare_graph(source, path, warnings)
    return _open_stripped(source, warnings)


def _open_bare_graph(source: Source, path: Path, warnings: list[str]) -> Artifact:
    """Opens a frozen graph or TF1 checkpoint with the named inputs and outputs. If the user names no inputs or no
    outputs, uses the likely inputs or outputs."""
    from accel.sources.tensorflow.process import in_tensorflow
    from accel.sources.tensorflow.source import TensorFlowSpec, form_of

    source = replace(source, spec=path)
    if path.stat().st_size and not (source.graph_inputs and source.graph_outputs):
        spec = TensorFlowSpec(form=form_of(str(path)) or "", path=str(path.absolute()))
        starts, ends = in_tensorflow("accel.sources.tensorflow.bare_graph:graph_ends", spec=spec)
        source = Source.of(source, graph_inputs=starts, graph_outputs=ends)
    return _open_stripped(source, warnings)


def _open_stripped(source: Source, warnings: list[str]) -> Artifact:
    """Opens the source. If the model contains random operators, removes the dropout and adds a warning."""
    try:
        return source.open()
    except RandomOps as error:
        warnings.append(str(error))
        return replace(source, strip_training_ops=True).open()


def _open_unchecked(source: Source) -> Artifact:
    """Opens the artifact as its manifest describes it, without checking the hashes."""
    if not isinstance(source.spec, Artifact) and manifest_path(source.path).is_file():
        return Artifact.open(source.path)
    return source.open()


def _read(artifact: Artifact, sizes: Mapping[str, int] | None) -> ReadGraph:
    from accel.graph.read import read_graph

    from .export import to_onnx_unjudged

    return read_graph(artifact, sizes, to_onnx_unjudged)


def _write_page(drawn: Sequence[tuple[Artifact, ReadGraph]], page: Path) -> None:
    from accel.graph.page import graph_data, write_page

    models = []
    for artifact, found in drawn:
        if found.model is None or found.cost is None:
            raise UnsupportedHere(f"{artifact.path} can't be drawn: {found.problem or 'it has no graph'}")
        models.append(graph_data(artifact.path.name, found.model, found.cost))
    write_page(models, page)
