"""Reads and writes the file of a pipeline, which names the pipeline's function and the main file of each part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from accel.artifact import Artifact, manifest_path
from accel.errors import InvalidModel

# The maximum size of a pipeline's file in bytes. accel never writes a larger file.
_MOST_BYTES = 1 << 20
_MANIFEST = manifest_path(Path("x")).name.removeprefix("x")


@dataclass(frozen=True, kw_only=True)
class PipelineFile:
    """``function`` is the function's name, which is shown in messages, and ``sha256`` identifies the function.
    ``parts`` holds the path of each part's main file, relative to the folder of the pipeline's file."""

    function: str
    sha256: str
    parts: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Writes the file as JSON."""
        body = {"function": self.function, "sha256": self.sha256, "parts": dict(self.parts)}
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> PipelineFile:
        """Reads the file. Raises ``InvalidModel`` if accel didn't write the file or if a part is outside the folder."""
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError
            body = json.loads(path.read_bytes().decode("utf-8"))
            parts = {str(name): str(file) for name, file in body["parts"].items()}
            found = cls(function=str(body["function"]), sha256=str(body["sha256"]), parts=parts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidModel(f"{path} is not a pipeline that accel wrote; export the pipeline again") from error
        outside = any(PurePosixPath(file).is_absolute() or ".." in Path(file).parts for file in parts.values())
        if outside or not parts:
            raise InvalidModel(f"{path} names parts outside its folder, which accel refuses; export the pipeline again")
        return found


def parts_of(pipeline: Artifact) -> dict[str, Artifact]:
    """Returns the artifacts of a pipeline's parts by name. Raises ``InvalidModel`` if the file of a part is missing."""
    found = {}
    for name, file in PipelineFile.read(pipeline.path).parts.items():
        path = pipeline.path.parent / file
        if not path.is_file():
            raise InvalidModel(
                f"the part {name!r} of {pipeline.path} is missing; copy the whole folder, including the file {file}"
            )
        found[name] = Artifact.open(path)
    return found


def files_of(part: Artifact) -> list[Path]:
    """Returns the paths of a part's files and of its manifest, relative to the part's folder."""
    return [file.relative_to(part.path.parent) for file in (*part.files, manifest_path(part.path))]


def artifact_of(manifest: Path) -> Artifact:
    """Returns the artifact that ``manifest`` belongs to."""
    return Artifact.open(manifest.with_name(manifest.name.removesuffix(_MANIFEST)))
