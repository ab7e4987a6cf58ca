"""Defines a model on disk and the record of how the model was made."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel.errors import BadInputSpec, ChainBroken, InvalidModel
from accel.folders.writing import beside, make_folder
from accel.signature import DimRange, IntegerRanges, Signature, TensorSpec
from accel.signature.conditions import Condition
from accel.tables.kinds import KINDS, kind_of

__all__ = ["Artifact", "DimRange", "Manifest", "Signature", "TensorSpec", "beside", "file_sha256", "manifest_path"]

FORMAT = 1


# The hashes of large files by path, inode, size and time of the last change. The stages of a run hash a file several
# times. A small file can change twice within the resolution of the file system's clock, so it is always read.
_LARGE_FILE_BYTES = 1 << 24
_hashes: dict[tuple[str, int, int, int], str] = {}

# The ending of the file of a LoRA adapter, as onnxruntime-genai and Olive name it.
ADAPTER_SUFFIX = ".onnx_adapter"

# The dtypes of indices. Integers of 8 bits are mostly pixels, which may hold any number.
_INDICES = ("int16", "int32", "int64", "uint16", "uint32", "uint64")


def file_sha256(path: Path) -> str:
    """Returns the sha256 of a file's bytes as a hex string. Reads a large file only if it has changed."""
    with path.open("rb") as stream:
        about = os.fstat(stream.fileno())
        key = (str(path.absolute()), about.st_ino, about.st_size, about.st_mtime_ns)
        if key in _hashes:
            return _hashes[key]
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if about.st_size >= _LARGE_FILE_BYTES:
        _hashes[key] = found
    return found


def text_sha256(text: str) -> str:
    """Returns the sha256 of the UTF-8 bytes of ``text`` as a hex string."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(body: Any) -> str:
    """Returns the JSON text of ``body`` with sorted keys and no spaces, so that equal values give equal texts.

    Raises ``ValueError`` if ``body`` holds an infinity or NaN.
    """
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def finite_json(value: Any) -> Any:
    """Returns ``value`` with None in place of every infinity and NaN, because JSON can't express infinities and NaN."""
    if isinstance(value, Mapping):
        return {str(name): finite_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def manifest_path(path: Path) -> Path:
    """Returns the path of the manifest that belongs to the main file ``path``."""
    return path.with_name(path.name + ".manifest.json")


@dataclass(frozen=True)
class Manifest:
    """Records how an artifact was made and verified. A manifest is stored as ``<file>.manifest.json``.

    ``files`` maps the name of each file to its sha256. The main file comes first. ``source`` holds the spec of the
    source and the sha256 of every file that the source was read from. ``stages`` has a record for each stage, oldest
    first. A record has the stage's name, options, versions, sha256 of the input and output, seconds, gates and notes.
    The class ``Artifact`` explains ``properties``. ``session`` holds the runtime and the options that ``accel
    optimize`` chose, and the figures measured with these options.
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
        """Returns one sha256 for the bytes of all files (see ``combined_sha256``)."""
        return combined_sha256(list(self.files.values()))

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values. The field ``digest`` holds the sha256 of all other values."""
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
        """Writes the manifest to a temporary file, then renames the file to ``path``."""
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
        """Returns the manifest in ``path``. Raises ``ChainBroken`` if a byte of the file was changed after accel wrote
        the manifest."""
        broken = ChainBroken(f"{path} was changed after accel wrote it; make the artifact again")
        try:
            text = path.read_bytes().decode("utf-8")
            body = json.loads(text)
            manifest = cls.from_json(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadInputSpec) as error:
            raise broken from error
        # The digest covers only the values. To detect changes of white space and escape sequences, the code also
        # compares the whole text.
        if body.get("format") != FORMAT:
            raise ChainBroken(
                f"{path} has manifest format {body.get('format')}, but this version of accel reads format {FORMAT}; "
                "export the model again"
            )
        if manifest.to_text() != text:
            raise broken
        # The digest isn't signed, so an attacker can change a file name and recompute the digest. The file names are
        # checked, because accel later copies files by these names.
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest.files):
            raise ChainBroken(f"the manifest {path} names files outside its folder; make the artifact again")
        return manifest


def combined_sha256(parts: list[str]) -> str:
    """Returns one sha256 for several files. ``parts`` holds the hash of each file, the main file first. If ``parts``
    has only one hash, returns this hash."""
    return parts[0] if len(parts) == 1 else text_sha256("\n".join(parts))


@dataclass(frozen=True)
class Artifact:
    """Represents a model on disk or an opened source, with its main file, kind, signature and history.

    ``path`` is the main file. For a source, ``path`` is the path or name that the source was opened with.
    ``properties`` holds facts about the file, such as its opset, ir, precision or compute capability. ``notes`` holds
    facts about the stage that made the model, such as the exporter or the kernels. The manifest records these facts
    with the stage. ``companions`` lists the paths of the model's other files, such as ``.bin``, external data and
    variables, relative to the model's folder. The class ``Manifest`` explains ``source``.
    """

    path: Path
    kind: str
    signature: Signature
    manifest: Manifest | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        stages = f", made by {' > '.join(record['name'] for record in self.history)}" if self.history else ""
        return f"<accel {self.kind} artifact {self.path}: {self.signature}{stages}>"

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Returns the records of the stages that made this artifact, oldest first."""
        return self.manifest.stages if self.manifest else ()

    def proof(self) -> list[dict[str, Any]]:
        """Returns an entry for each stage with a gate. The entry holds the comparison that came closest to its limit,
        and a summary in words."""
        found = []
        for record in self.history:
            compared = [g for g in record["gates"] if g["value"] is not None and g["limit"]]
            skipped = [g for g in record["gates"] if g["passed"] is None]
            if compared:
                worst = max(compared, key=lambda g: g["value"] / g["limit"])
                cases = len({g["case"] for g in compared})
                what = f"{worst['metric']} {worst['value']:.2g} at {worst['case']} (limit {worst['limit']:g})"
                left_out = f", {len(skipped)} not run" if skipped else ""
                summary = f"{what}, {cases} shapes{left_out}"
                found.append({"stage": record["name"], "passed": True, "worst": worst, "summary": summary})
            elif skipped:
                found.append({"stage": record["name"], "passed": None, "worst": None, "summary": skipped[0]["note"]})
        return found

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Returns the conditions on sizes under which the graph equals its source. The gates ran the graph at sizes in
        the ranges of its dims, so the conditions matter for other sizes."""
        return tuple(
            Condition.parse(text, one.get("faults", {}).get(text, ""))
            for one in (record.get("notes", {}) for record in self.history)
            for text in one.get("conditions", ())
        )

    @property
    def not_empty(self) -> dict[str, str]:
        """Returns the dims that can't have the size 0, each with the reason, such as "the source fails (...)"."""
        found = {dim: f"the source fails ({reason})" for dim, reason in self.source.get("not_empty", {}).items()}
        for record in self.history:
            found |= record.get("notes", {}).get("not_empty", {})
        return found

    @property
    def integer_ranges(self) -> IntegerRanges:
        """Returns the ranges that the manifest declares for the integer inputs. A file of torch's own exporter, which
        has no manifest, has the ranges of the inputs that select rows of its tables. Other models without a manifest
        have no ranges.

        Models from PyTorch get exactly these ranges, because PyTorch's embeddings refuse negative indices. In other
        models, a declared range from 0 to N becomes the range from -N - 1 to N, because negative indices count from the
        end.
        """
        of_torch = self.source.get("producer") == "pytorch"
        strict = of_torch or self.source.get("kind") == "torch"
        found = []
        for spec in self.signature.inputs if self.manifest or of_torch else ():
            low, high = spec.range_at({}) or (1, 1)
            if spec.dtype not in _INDICES:
                found.append(replace(spec, values=None))
            elif low == 0 and not strict:
                found.append(replace(spec, values=(-high - 1, high)))
            else:
                found.append(spec)
        return IntegerRanges(tuple(found))

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the paths of the main file and its companions."""
        return (self.path, *(self.path.parent / name for name in self.companions))

    @property
    def adapters(self) -> dict[str, Path]:
        """Returns the files of the LoRA adapters that a run of this decoder may take, by the adapters' names."""
        files = (self.path.parent / name for name in self.companions if name.endswith(ADAPTER_SUFFIX))
        return {file.name.removesuffix(ADAPTER_SUFFIX): file for file in files}

    def hashes(self) -> dict[str, str]:
        """Reads all files. Returns the sha256 of each file by name, the main file first."""
        return {name: file_sha256(self.path.parent / name) for name in (self.path.name, *self.companions)}

    @property
    def digest(self) -> str:
        """Returns one sha256 for the artifact. Uses the sha256 in the source or in the manifest. Without a recorded
        sha256, computes the sha256 of the files."""
        kind = KINDS.get(self.kind)
        if "sha256" in self.source and self.manifest is None and kind is not None and kind.framework:
            return str(self.source["sha256"])
        return self.manifest.digest if self.manifest else combined_sha256(list(self.hashes().values()))

    @property
    def content_digest(self) -> str:
        """Returns one sha256 for the content of the files. Unlike ``digest``, this sha256 doesn't change when a stage
        records how the files were made."""
        return combined_sha256(list(self.manifest.files.values())) if self.manifest else self.digest

    def with_manifest(self, manifest: Manifest) -> Artifact:
        """Returns a copy of the artifact with ``manifest``. The properties and the source of the manifest replace the
        properties and the source of the artifact."""
        return replace(self, manifest=manifest, properties=manifest.properties, source=manifest.source)

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Reads the manifest beside the main file ``path`` and returns the artifact.

        Does not check the hashes. The files and the manifest may have been copied under another name.

        Raises ``InvalidModel`` if there is no manifest, and ``ChainBroken`` if the manifest is damaged or names a
        kind other than the file's kind. ``accel.sources`` opens models without a manifest.
        """
        sidecar = manifest_path(path)
        if not sidecar.is_file():
            raise InvalidModel(
                f"{path} has no manifest {sidecar.name}; make the model with accel export or accel optimize"
            )
        manifest = Manifest.read(sidecar)
        names = _names_beside(path, list(manifest.files), manifest.kind)
        manifest = replace(manifest, files=dict(zip(names, manifest.files.values(), strict=True)))
        if (kind_of(path) or manifest.kind) != manifest.kind:
            raise ChainBroken(
                f"the manifest {sidecar} is for a model of kind {manifest.kind}, but the file {path.name} is of "
                "another kind; make the artifact again"
            )
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
        """Copies the artifact, its companions and its manifest to ``out``. Renames each file once it is complete.

        Writes the manifest last, so an interrupted copy has no manifest, or an old manifest whose hashes don't match.
        Then removes the weights of an earlier artifact in ``out``. Raises ``CannotWrite`` if a file can't be written.
        """
        if self.manifest is None:
            raise InvalidModel(f"{self.path} has no manifest yet and can't be published")
        make_folder(out.parent)
        earlier = _weights_of(out)
        old_names = [self.path.name, *self.companions]
        names = dict(zip(old_names, _names_beside(out, old_names, self.kind), strict=True))
        for old, new in reversed(names.items()):
            target = out.parent / new
            make_folder(target.parent)
            with beside(target) as temporary:
                shutil.copyfile(self.path.parent / old, temporary)
        files = {names[name]: sha for name, sha in self.manifest.files.items()}
        manifest = replace(self.manifest, files=files)
        manifest.write(manifest_path(out))
        for name in earlier - set(names.values()):
            (out.parent / name).unlink(missing_ok=True)
        companions = tuple(names[name] for name in self.companions)
        return replace(self, path=out, manifest=manifest, companions=companions, properties=manifest.properties)


def _weights_of(out: Path) -> set[str]:
    """Returns the names of the files of weights and adapters that belong to the artifact in ``out`` alone. Another ONNX
    file in the folder may share weights, because these files are named by their content."""
    if [out] != list(out.parent.glob("*.onnx")):
        return set()
    try:
        files = Manifest.read(manifest_path(out)).files
    except (ChainBroken, OSError):
        return set()
    return {name for name in files if name.endswith((".weights", ADAPTER_SUFFIX))}


def _names_beside(path: Path, names: Sequence[str], kind: str) -> list[str]:
    """Returns the new names of an artifact's files if the main file is renamed to ``path``. ``names`` holds the old
    names, the main file first."""
    row = KINDS.get(kind)
    if row is not None and row.companions and names[:1] != [path.name]:
        # The runtime expects that the weights file has the name of the main file, with another suffix.
        names = [path.with_suffix(Path(name).suffix).name for name in names]
    return [path.name, *names[1:]][: len(names)]
