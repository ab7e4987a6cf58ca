"""A model on disk and the record of how it came to be."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel.errors import BadInputSpec, ChainBroken, InvalidModel
from accel.signature import DimRange, Signature, TensorSpec

__all__ = ["Artifact", "DimRange", "Manifest", "Signature", "TensorSpec", "beside", "file_sha256", "manifest_path"]

FORMAT = 1

# What a file's ending says about its kind. A kind that is a folder is found by the main file in it.
KINDS = {
    ".onnx": "onnx",
    ".engine": "engine",
    ".xml": "openvino",
    ".param": "ncnn",
}


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(body: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def finite_json(value: Any) -> Any:
    """``value`` for JSON, which has no word for infinities and NaN: they become None, wherever they are in it."""
    if isinstance(value, Mapping):
        return {str(name): finite_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path in the same folder to write to; renamed to ``path`` at the end, removed if anything goes wrong."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def manifest_path(path: Path) -> Path:
    """The sidecar of an artifact's main file."""
    return path.with_name(path.name + ".manifest.json")


@dataclass(frozen=True)
class Manifest:
    """How an artifact came to be and what was proven about it; ``<file>.manifest.json`` on disk.

    ``files``: sha256 by file name, the main file first. ``source``: what the chain starts from (spec, and the sha256
    of every file it was read from). ``stages``: one record a stage, oldest first: name, options, versions, sha256 in
    and out, seconds, gates, notes. ``session``: runtime and options the figures in it were measured with.
    """

    kind: str
    signature: Signature
    files: Mapping[str, str]
    source: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...] = ()
    properties: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """One sha256 for the artifact's bytes: the file's own where there is one, else over all of them."""
        return combined_sha256(list(self.files.values()))

    def to_json(self) -> dict[str, Any]:
        body = {
            "format": FORMAT,
            "kind": self.kind,
            "signature": self.signature.to_json(),
            "files": dict(self.files),
            "source": dict(self.source),
            "stages": [dict(s) for s in self.stages],
            "properties": dict(self.properties),
            "session": dict(self.session),
        }
        return body | {"digest": text_sha256(canonical_json(body))}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Beside ``path``, then renamed."""
        with beside(path) as temporary:
            temporary.write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Manifest:
        return cls(
            kind=body["kind"],
            signature=Signature.from_json(body["signature"]),
            files=body["files"],
            source=body["source"],
            stages=tuple(body["stages"]),
            properties=body["properties"],
            session=body["session"],
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in ``path``. ``ChainBroken`` where a single byte of it was changed after it was written."""
        broken = ChainBroken(f"{path} was changed after accel wrote it; make the artifact again")
        try:
            text = path.read_bytes().decode("utf-8")
            body = json.loads(text)
            manifest = cls.from_json(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadInputSpec) as error:
            raise broken from error
        # The digest covers the values; comparing the text covers white space and escapes as well.
        if body.get("format") != FORMAT:
            raise ChainBroken(
                f"{path} has manifest format {body.get('format')}, this accel reads {FORMAT}; export again"
            )
        if manifest.to_text() != text:
            raise broken
        # The digest is no signature: whoever changes a manifest can make it right, and files are copied by these names.
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest.files):
            raise ChainBroken(f"{path} names files outside its folder; refused: make the artifact again")
        return manifest


def combined_sha256(parts: list[str]) -> str:
    """One sha256 for several: the only one as it is, else the sha256 of their list (main file first)."""
    return parts[0] if len(parts) == 1 else text_sha256("\n".join(parts))


@dataclass(frozen=True)
class Artifact:
    """A model on disk: its main file (or, for a source, what names it), its kind, its signature, its history.

    ``properties`` holds what the kind declares about the file (opset, ir, precision, compute capability);
    ``notes`` what the stage that just made it wants recorded (which rung, which kernels).
    """

    path: Path
    kind: str
    signature: Signature
    manifest: Manifest | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    companions: tuple[
        str, ...
    ] = ()  # other files of the model, relative to its folder (.bin, external data, variables)
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """The records of the stages that made this, oldest first."""
        return self.manifest.stages if self.manifest else ()

    def proof(self) -> list[dict[str, Any]]:
        """For each stage that was gated: the comparison that came closest to its limit, and how many there were."""
        found = []
        for record in self.history:
            compared = [g for g in record["gates"] if g["value"] is not None and g["limit"]]
            skipped = [g for g in record["gates"] if g["passed"] is None]
            if compared:
                worst = max(compared, key=lambda g: g["value"] / g["limit"])
                cases = len({g["case"] for g in compared})
                what = f"{worst['metric']} {worst['value']:.2g} at {worst['case']} (limit {worst['limit']:g})"
                summary = f"{what}, {cases} shapes"
                found.append({"stage": record["name"], "passed": True, "worst": worst, "summary": summary})
            elif skipped:
                found.append({"stage": record["name"], "passed": None, "worst": None, "summary": skipped[0]["note"]})
        return found

    @property
    def files(self) -> tuple[Path, ...]:
        """The main file, then its companions."""
        return (self.path, *(self.path.parent / name for name in self.companions))

    def hashes(self) -> dict[str, str]:
        """sha256 by file name, main file first, read now."""
        return {name: file_sha256(self.path.parent / name) for name in (self.path.name, *self.companions)}

    @property
    def digest(self) -> str:
        """One sha256 for what this is made of: a source names its own, a file is hashed."""
        if "sha256" in self.source and self.manifest is None and self.kind in ("torch", "tensorflow", "tflite"):
            return str(self.source["sha256"])
        return self.manifest.digest if self.manifest else combined_sha256(list(self.hashes().values()))

    def with_manifest(self, manifest: Manifest) -> Artifact:
        return replace(self, manifest=manifest, properties=manifest.properties, source=manifest.source)

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """The artifact whose main file is ``path``, with the sidecar beside it. The hashes are not checked here. Files
        that were copied under another name, sidecar and all, are the same artifact.

        Raises ``InvalidModel`` where there is no sidecar: an artifact without one is a source (``accel.sources``).
        """
        sidecar = manifest_path(path)
        if not sidecar.is_file():
            raise InvalidModel(f"{path} has no {sidecar.name} beside it; make it with accel export or accel optimize")
        manifest = Manifest.read(sidecar)
        names = _names_beside(path, list(manifest.files), manifest.kind)
        manifest = replace(manifest, files=dict(zip(names, manifest.files.values(), strict=True)))
        if KINDS.get(path.suffix, manifest.kind) != manifest.kind:
            raise ChainBroken(f"{sidecar} is of kind {manifest.kind}, {path.name} is not; make the artifact again")
        return cls(
            path=path,
            kind=manifest.kind,
            signature=manifest.signature,
            manifest=manifest,
            properties=manifest.properties,
            companions=tuple(list(manifest.files)[1:]),
            source=manifest.source,
        )

    def copy_to(self, out: Path) -> Artifact:
        """This artifact under another name, companions and sidecar with it, each written beside and renamed.

        The sidecar goes last: a copy that was interrupted has none, or one whose hashes don't hold.
        """
        if self.manifest is None:
            raise InvalidModel(f"{self.path} has no manifest yet and can't be published")
        out.parent.mkdir(parents=True, exist_ok=True)
        old_names = [self.path.name, *self.companions]
        names = dict(zip(old_names, _names_beside(out, old_names, self.kind), strict=True))
        for old, new in reversed(names.items()):
            target = out.parent / new
            target.parent.mkdir(parents=True, exist_ok=True)
            with beside(target) as temporary:
                shutil.copyfile(self.path.parent / old, temporary)
        files = {names[name]: sha for name, sha in self.manifest.files.items()}
        manifest = replace(self.manifest, files=files)
        manifest.write(manifest_path(out))
        companions = tuple(names[name] for name in self.companions)
        return replace(self, path=out, manifest=manifest, companions=companions, properties=manifest.properties)


def _names_beside(path: Path, names: Sequence[str], kind: str) -> list[str]:
    """What the files ``names`` of an artifact are called where its main file, the first of them, is ``path``."""
    if kind in ("openvino", "ncnn") and names[:1] != [path.name]:
        # The runtime finds the weights by the name of the main file.
        names = [path.with_suffix(Path(name).suffix).name for name in names]
    return [path.name, *names[1:]][: len(names)]
