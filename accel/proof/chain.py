"""Checks the chain of hashes from an artifact back to its source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accel.artifact import Artifact, Manifest, combined_sha256, file_sha256, manifest_path
from accel.cache import StageCache
from accel.errors import ChainBroken
from accel.runtimes.pipeline.file import parts_of
from accel.tables.kinds import kind_of

Status = Literal["ok", "changed", "absent"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A file or step with a recorded sha256. A ``status`` of ``absent`` means that this machine doesn't have the
    file."""

    what: str
    path: str
    recorded: str
    found: str | None
    status: Status

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_chain(artifact: Artifact, cache: StageCache | None = None) -> list[Link]:
    """Returns a ``Link`` with a newly computed hash for every file from the artifact back to the weights. The links
    cover the files of the artifact and the source, each stage's output (in the cache), and the files that the user gave
    to stages. Further links tell whether each stage's input is the output of the previous stage. For a pipeline, also
    returns the links of all parts.

    Raises ``ChainBroken`` if the artifact has no manifest.
    """
    manifest = artifact.manifest
    if manifest is None:
        raise ChainBroken(
            f"{artifact.path} has no manifest to check; put its manifest beside it, or make the artifact again with "
            "accel export or accel optimize"
        )
    cache = cache or StageCache()
    links = [_file("artifact", artifact.path.parent / name, sha) for name, sha in manifest.files.items()]
    links.append(_sidecar("manifest", artifact.path))
    links += _continuity(manifest)
    for record in reversed(manifest.stages):
        links += _made(record, cache)
        links += _given(record, cache)
    for entry in manifest.source.get("files", ()):
        links.append(_file("source", Path(entry["path"]), entry["sha256"]))
    if artifact.kind == "pipeline" and all(file.is_file() for file in artifact.files):
        links += [link for part in parts_of(artifact).values() for link in check_chain(part, cache)]
    return _distinct(links)


def _file(what: str, path: Path, recorded: str) -> Link:
    if not path.is_file():
        return Link(what=what, path=str(path), recorded=recorded, found=None, status="absent")
    found = file_sha256(path)
    status: Status = "ok" if found == recorded else "changed"
    return Link(what=what, path=str(path), recorded=recorded, found=found, status=status)


def _sidecar(what: str, main: Path) -> Link:
    """Compares the manifest of ``main`` with the digest that is recorded in the manifest, and returns the ``Link``."""
    path = manifest_path(main)
    if not path.is_file():
        return Link(what=what, path=str(path), recorded="its own digest", found=None, status="absent")
    try:
        digest = str(Manifest.read(path).to_json()["digest"])
    except ChainBroken:
        return Link(what=what, path=str(path), recorded="its own digest", found=None, status="changed")
    return Link(what=what, path=str(path), recorded=digest, found=digest, status="ok")


def _continuity(manifest: Manifest) -> list[Link]:
    links = []
    outputs = [combined_sha256(list(record["output"])) for record in manifest.stages]
    follows = [(r["name"], r["input"]) for r in manifest.stages[1:]] + [("the artifact", manifest.digest)]
    for (name, given), made in zip(follows, outputs, strict=True) if manifest.stages else ():
        status: Status = "ok" if given == made else "changed"
        links.append(Link(what=f"input of {name}", path="", recorded=made, found=given, status=status))
    if manifest.stages and manifest.source.get("sha256"):
        first, source = manifest.stages[0], str(manifest.source["sha256"])
        status = "ok" if first["input"] == source else "changed"
        links.append(
            Link(what=f"input of {first['name']}", path="", recorded=source, found=first["input"], status=status)
        )
    return links


def _made(record: Any, cache: StageCache) -> list[Link]:
    """Returns the links of a stage's output in the cache."""
    folder = cache.entry(record["key"])
    name = folder / "main"
    what = f"output of {record['name']}"
    if not name.is_file():
        return [Link(what=what, path=str(folder), recorded=record["output"][0], found=None, status="absent")]
    main = folder / Path(name.read_text(errors="replace").strip()).name
    links = [_sidecar(f"manifest of {record['name']}", main)]
    try:
        names = list(Manifest.read(manifest_path(main)).files)
    except (ChainBroken, OSError):
        names = [main.name]
    return links + [_file(what, folder / n, sha) for n, sha in zip(names, record["output"], strict=False)]


def _given(record: Any, cache: StageCache) -> list[Link]:
    """Returns the links of a file that the user passed to a stage, or no links if the stage read its input from the
    cache."""
    path = Path(record["input_path"])
    if path.is_relative_to(cache.root) or kind_of(path) is None or not path.is_file():
        return []
    what = f"given to {record['name']}"
    if not manifest_path(path).is_file():
        return [_file(what, path, record["input"])]
    links = [_sidecar(f"manifest of {path.name}", path)]
    try:
        files = list(Artifact.open(path).files)
    except ChainBroken:
        files = [path]
    found = combined_sha256([file_sha256(f) if f.is_file() else "" for f in files])
    status: Status = "ok" if found == record["input"] else "changed"
    return [*links, Link(what=what, path=str(path), recorded=record["input"], found=found, status=status)]


def _distinct(links: list[Link]) -> list[Link]:
    seen: dict[tuple[str, str, str], Link] = {}
    for link in links:
        seen.setdefault((link.what, link.path, link.recorded), link)
    return list(seen.values())
