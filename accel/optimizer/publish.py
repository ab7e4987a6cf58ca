"""Writes the output folder of ``accel optimize``, with the chosen model, its manifest, ``optimize.json`` and the
report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, Manifest, beside, manifest_path
from accel.decoders.folder import GENAI_CONFIG, OPENVINO_GENAI, write_folder
from accel.errors import AccelError, CannotWrite
from accel.folders.writing import writing
from accel.signature.decoder import is_stateful
from accel.sources.main_file import REPORT
from accel.spelling import option
from accel.tables.kinds import KINDS, main_files

from .report.page import PAGE


def check_no_decoder(folder: Path) -> None:
    """Raises ``CannotWrite`` if ``folder`` holds a decoder, whose tokenizer and configs would stay beside a new model
    that is no decoder."""
    if (folder / GENAI_CONFIG).is_file():
        raise CannotWrite(
            f"{folder} holds a decoder ({GENAI_CONFIG}), but the new model is none; give another {option('out')}"
        )


def check_out(folder: Path, source: str) -> None:
    """Raises ``CannotWrite`` if the output would overwrite ``source``, or a file in ``folder`` that accel did not
    make."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise CannotWrite(f"{folder} is a file; give a folder with {option('out')}")
        for name in main_files():
            main = folder / name
            if main.exists() and not manifest_path(main).is_file():
                raise CannotWrite(
                    f"{main} was not made by accel and would be overwritten; give another {option('out')}"
                )
            if main.exists() and Path(source).exists() and main.samefile(source):
                raise CannotWrite(
                    f"{main} is the model to optimize and would be overwritten; give another {option('out')}"
                )
        if (folder / PAGE).exists() and not (folder / REPORT).exists():
            raise CannotWrite(
                f"{folder / PAGE} was not made by accel and would be overwritten; give another {option('out')}"
            )


def publish(
    artifact: Artifact,
    session: Mapping[str, Any],
    folder: Path,
    report: Callable[[Artifact], Mapping[str, Any]],
    page: Callable[[Path, Artifact], None] | None,
    configs: Path | None = None,
) -> Artifact:
    """Copies ``artifact`` into ``folder`` and returns the copy. After copying, removes the model of an earlier run.
    ``session`` holds the runtime, options and figures for the manifest. ``report`` is a function that takes the copy
    and returns the content of ``optimize.json``. ``page`` is a function that takes the copy and a path, and writes the
    report page to the path. If ``page`` is None, no page is written. ``configs`` is the folder with the configs and the
    tokenizer of a decoder.
    """
    if artifact.manifest is None:  # the chosen model is a source that accel did not make
        artifact = _recorded(artifact)
    assert artifact.manifest is not None
    artifact = artifact.with_manifest(replace(artifact.manifest, session=session))
    main = folder / (OPENVINO_GENAI if is_stateful(artifact.signature) else KINDS[artifact.kind].main_file)
    published = artifact.copy_to(main)
    if "decoder" in artifact.source:
        write_folder(published, configs)
    with beside(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(report(published), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for name in main_files():
        old = folder / name
        if old != main and manifest_path(old).is_file():
            for file in (*_files_of(old), manifest_path(old)):
                file.unlink(missing_ok=True)
    (folder / PAGE).unlink(missing_ok=True)
    if page is not None:
        page(folder / PAGE, published)
    return published


def _files_of(main: Path) -> tuple[Path, ...]:
    try:
        return Artifact.open(main).files
    except AccelError:
        return (main,)


def _recorded(artifact: Artifact) -> Artifact:
    manifest = Manifest(
        kind=artifact.kind,
        signature=artifact.signature,
        files=artifact.hashes(),
        source=artifact.source,
        properties=artifact.properties,
    )
    return artifact.with_manifest(manifest)
