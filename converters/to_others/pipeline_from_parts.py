"""Puts the exported or optimized parts of a pipeline into one folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.runtimes.pipeline.file import PipelineFile, artifact_of, files_of
from accel.stage import StageConfig


@dataclass(frozen=True, kw_only=True)
class PipelineFromPartsConfig(StageConfig):
    """``function`` is the name of the pipeline's function, and ``sha256`` is the function's hash. ``parts`` maps the
    name of each part to the path of the part's manifest. A manifest has the hashes of all files of its part."""

    function: str
    sha256: str
    parts: Mapping[str, Path]


def pipeline_from_parts(src: Artifact, config: PipelineFromPartsConfig, out: Path) -> Artifact:
    """Copies each part to a folder with the part's name beside ``out``, and writes the pipeline file ``out``."""
    files: dict[str, str] = {}
    companions: list[str] = []
    for name, manifest in config.parts.items():
        part = artifact_of(manifest)
        files[name] = f"{name}/{part.path.name}"
        for file in files_of(part):
            target = out.parent / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part.path.parent / file, target)
            companions.append(target.relative_to(out.parent).as_posix())
    PipelineFile(function=config.function, sha256=config.sha256, parts=files).write(out)
    return Artifact(path=out, kind="pipeline", signature=src.signature, companions=tuple(companions), source=src.source)
