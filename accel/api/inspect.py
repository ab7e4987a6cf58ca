"""What a model is and how it came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, manifest_path
from accel.child import run_in_child
from accel.errors import BadSource, UnsupportedHere, UsageError
from accel.sources import main_file, open_source
from accel.verify.chain import Link, check_chain

if TYPE_CHECKING:
    from accel.graph.read import ReadGraph


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """``chain`` is empty where it wasn't asked for; ``intact`` is None then, and False where a hash doesn't hold.
    ``kernels``: of an engine, in the order they run: name, type, dtypes, and the ONNX nodes that went into each.
    ``problem``: what an engine's own toolkit, where it is installed, has against it; "" for nothing."""

    artifact: Artifact
    bytes: int
    chain: tuple[Link, ...] = ()
    intact: bool | None = None
    graph: dict[str, Any] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()
    problem: str = ""

    @property
    def changed(self) -> list[Link]:
        return [link for link in self.chain if link.status == "changed"]

    def to_json(self) -> dict[str, Any]:
        artifact = self.artifact
        return {
            "path": str(artifact.path),
            "kind": artifact.kind,
            "bytes": self.bytes,
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


def inspect(
    model: str | Path | Artifact,
    *,
    check: bool = False,
    page: str | Path | None = None,
    against: str | Path | Artifact | None = None,
    sizes: Mapping[str, int] | None = None,
    graph_inputs: Sequence[str] = (),
    graph_outputs: Sequence[str] = (),
    signature: str = "",
) -> Inspection:
    """Signature, properties, history, and of everything but engines operators, parameters, FLOPs at ``sizes`` (default:
    the usual ones) and warnings; with ``check`` every hash of its chain, from the file back to the weights, computed
    anew, and an engine read by its toolkit, where that is installed. What is no graph in a file (TensorFlow, TFLite,
    PyTorch) is counted as the ONNX that accel makes of it, which a ``check`` alone doesn't ask for.

    ``page``: write an HTML file that shows the graph, beside that of ``against`` if given. ``graph_inputs``,
    ``graph_outputs``: tensors of a ``.pb`` or ``.meta`` (default: what looks like its ends). ``signature``: which one
    of a SavedModel.

    Raises ``BadSource`` where there is no such model; ``ChainBroken`` with ``check`` where it has no manifest;
    ``UnsupportedHere`` for the page of an engine.
    """
    if against is not None and page is None:
        raise UsageError("--against is for the page of two graphs; name it with --graph out.html")
    warnings: list[str] = []
    unchecked = check and not isinstance(model, Artifact)
    if unchecked:
        artifact = _open_unchecked(Path(str(model)))
    else:
        chosen = {"graph_inputs": graph_inputs, "graph_outputs": graph_outputs, "signature": signature}
        artifact = _open(model, chosen, warnings)
    size = sum(f.stat().st_size for f in artifact.files if f.is_file())
    links = tuple(check_chain(artifact)) if check else ()
    intact = all(link.status != "changed" for link in links) if check else None
    if check and artifact.manifest and any(not f.is_file() for f in artifact.files):
        intact = False  # the artifact's own files have to be there
    problem = _engine_problem(artifact) if intact and artifact.kind == "engine" else ""
    if problem:
        intact = False
    cheap = artifact.kind == "onnx" or (not check and artifact.kind != "engine")
    found = _read(artifact, sizes) if intact is not False and (cheap or page) else None
    graph = found.to_json() if found else {}
    if found and warnings:
        graph["warnings"] = [*warnings, *graph["warnings"]]
    notes = artifact.history[-1]["notes"] if artifact.kind == "engine" and artifact.history else {}
    kernels = tuple(notes.get("kernels", ()))
    if page is not None:
        if found is None:
            raise UnsupportedHere(f"{artifact.path} was changed after it was made; make it again before it is drawn")
        drawn = [(artifact, found)]
        if against is not None:
            other = _open(against, {}, [])
            known = {name: size for name, size in (sizes or {}).items() if name in other.signature.dims}
            drawn.append((other, _read(other, known)))
        _write_page(drawn, Path(page))
    return Inspection(
        artifact=artifact, bytes=size, chain=links, intact=intact, graph=graph, kernels=kernels, problem=problem
    )


def _engine_problem(engine: Artifact) -> str:
    """What the engine's toolkit has against the file; "" where nothing, or where it isn't installed."""
    from accel.converters.engine_from_onnx import check_engine
    from accel.runtimes.tensorrt_toolkit import toolkit_runtime

    if not toolkit_runtime(engine.properties["toolkit"]).installed:
        return ""
    return check_engine(engine.path) or ""


def _open(model: str | Path | Artifact, tensorflow: Mapping[str, Any], warnings: list[str]) -> Artifact:
    """Whatever can be looked at: also an IR or a net that accel didn't make, a bare graph whose ends nobody named, and
    one that has dropout in it."""
    if isinstance(model, Artifact):
        return model
    path = Path(model)
    if path.is_dir():
        path = main_file(path) or path
    if path.is_file() and not manifest_path(path).is_file():
        if path.suffix == ".xml":
            # In a child process: who wrote the file is not known, and OpenVINO's parser is native.
            signature, properties = run_in_child("accel.converters.openvino_from_onnx:describe", path=path)
            return Artifact(path, "openvino", signature, properties=properties, companions=(f"{path.stem}.bin",))
        if path.suffix == ".param":
            from accel.graph.ncnn_param import bare_signature

            return Artifact(path, "ncnn", bare_signature(path), companions=(f"{path.stem}.bin",))
        if path.suffix in (".pb", ".meta") and path.name != "saved_model.pb":
            return _open_bare_graph(path, tensorflow, warnings)
    return _open_stripped(model, tensorflow, warnings)


def _open_bare_graph(path: Path, tensorflow: Mapping[str, Any], warnings: list[str]) -> Artifact:
    """A frozen graph or TF1 checkpoint between the ends that were named, or else those it seems to have."""
    from accel.sources.tensorflow_process import in_tensorflow
    from accel.sources.tensorflow_source import TensorFlowSpec, form_of

    chosen = dict(tensorflow)
    if path.stat().st_size and not (chosen["graph_inputs"] and chosen["graph_outputs"]):
        spec = TensorFlowSpec(form=form_of(str(path)) or "", path=str(path.absolute()))
        starts, ends = in_tensorflow("accel.sources.tensorflow_forms:graph_ends", spec=spec)
        chosen["graph_inputs"] = chosen["graph_inputs"] or starts
        chosen["graph_outputs"] = chosen["graph_outputs"] or ends
    return _open_stripped(path, chosen, warnings)


def _open_stripped(model: str | Path, tensorflow: Mapping[str, Any], warnings: list[str]) -> Artifact:
    """The source, without its dropout where it still has one: a warning says so."""
    try:
        return open_source(model, tensorflow=tensorflow)
    except BadSource as error:
        if "pass --strip-training-ops" not in str(error):
            raise
        warnings.append(str(error))
        return open_source(model, tensorflow={**tensorflow, "strip_training_ops": True})


def _open_unchecked(path: Path) -> Artifact:
    """The artifact as its manifest describes it, damaged or not: the check is to say what is damaged."""
    main = main_file(path) if path.is_dir() else path
    if main is not None and manifest_path(main).is_file():
        return Artifact.open(main)
    return open_source(path)


def _read(artifact: Artifact, sizes: Mapping[str, int] | None) -> ReadGraph:
    from accel.api.export import to_onnx_unjudged
    from accel.graph.read import read_graph

    return read_graph(artifact, sizes, to_onnx_unjudged)


def _write_page(drawn: Sequence[tuple[Artifact, ReadGraph]], page: Path) -> None:
    from accel.graph.page import graph_data, write_page

    models = []
    for artifact, found in drawn:
        if found.model is None or found.cost is None:
            why = found.warnings[0].partition(": ")[2] if found.warnings else "it has no graph"
            raise UnsupportedHere(f"{artifact.path} can't be drawn: {why}")
        models.append(graph_data(artifact.path.name, found.model, found.cost))
    write_page(models, page)
