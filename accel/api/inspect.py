"""What a model is and how it came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.errors import UnsupportedHere, UsageError
from accel.sources import open_source
from accel.verify.chain import Link, check_chain


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """``chain`` is empty where it wasn't asked for; ``intact`` is None then, and False where a hash doesn't hold.
    ``kernels``: of an engine, in the order they run: name, type, dtypes, and the ONNX nodes that went into each."""

    artifact: Artifact
    bytes: int
    chain: tuple[Link, ...] = ()
    intact: bool | None = None
    graph: dict[str, Any] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()

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
            "chain": [link.to_json() for link in self.chain],
        }


def inspect(
    model: str | Path | Artifact,
    *,
    check: bool = False,
    page: str | Path | None = None,
    against: str | Path | Artifact | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Inspection:
    """Signature, properties, history and, of ONNX, operators, parameters, FLOPs at ``sizes`` (default: the usual ones)
    and warnings; with ``check`` every hash of its chain, from the file back to the weights, computed anew.

    ``page``: write an HTML file that shows the graph (ONNX), beside that of ``against`` if given.

    Raises ``BadSource`` where there is no such model; ``ChainBroken`` with ``check`` where it has no manifest;
    ``UnsupportedHere`` for the page of something else than ONNX.
    """
    if against is not None and page is None:
        raise UsageError("--against is for the page of two graphs; name it with --graph out.html")
    unchecked = check and not isinstance(model, Artifact)
    artifact = _open_unchecked(Path(str(model))) if unchecked else open_source(model)
    size = sum(f.stat().st_size for f in artifact.files if f.is_file())
    links = tuple(check_chain(artifact)) if check else ()
    intact = all(link.status != "changed" for link in links) if check else None
    if check and artifact.manifest and any(not f.is_file() for f in artifact.files):
        intact = False  # the artifact's own files have to be there
    graph = _operators(artifact, sizes) if artifact.kind == "onnx" and intact is not False else {}
    notes = artifact.history[-1]["notes"] if artifact.kind == "engine" and artifact.history else {}
    kernels = tuple(notes.get("kernels", ()))
    if page is not None:
        others = [open_source(against)] if against is not None else []
        _write_page([artifact, *others], Path(page), sizes)
    return Inspection(artifact=artifact, bytes=size, chain=links, intact=intact, graph=graph, kernels=kernels)


def _open_unchecked(path: Path) -> Artifact:
    """The artifact as its manifest describes it, damaged or not: the check is to say what is damaged."""
    from accel.artifact import manifest_path
    from accel.sources import main_file

    main = main_file(path) if path.is_dir() else path
    if main is not None and manifest_path(main).is_file():
        return Artifact.open(main)
    return open_source(path)


def _operators(artifact: Artifact, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    from collections import Counter

    from accel.graph.cost import graph_cost
    from accel.sources.onnx_file import read_proto

    model = read_proto(artifact.path)
    counts = Counter(node.op_type for node in model.graph.node)
    cost = graph_cost(model, artifact.signature, sizes)
    return {
        "nodes": len(model.graph.node),
        "parameters": cost.parameters,
        "operators": dict(counts.most_common()),
        **cost.to_json(),
    }


def _write_page(artifacts: Sequence[Artifact], page: Path, sizes: Mapping[str, int] | None) -> None:
    from accel.graph.cost import graph_cost
    from accel.graph.page import graph_data, write_page
    from accel.sources.onnx_file import read_proto

    models = []
    for artifact in artifacts:
        if artifact.kind != "onnx":
            raise UnsupportedHere(f"{artifact.path} is {artifact.kind}; --graph draws ONNX: accel export it first")
        model = read_proto(artifact.path)
        known = {name: size for name, size in (sizes or {}).items() if name in artifact.signature.dims}
        models.append(graph_data(artifact.path.name, model, graph_cost(model, artifact.signature, known)))
    write_page(models, page)
