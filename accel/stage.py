"""Runs a stage or takes its result from the cache, checks its contract and gates, and records the result.

A stage is a pure function that takes an ``Artifact``, a ``StageConfig`` and the path ``out``, and returns an
``Artifact``. A stage writes only ``out`` and the companion files of ``out``. ``run_stage`` does the checks, the caching
and the recording in the same way for all stages.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from accel.artifact import (
    ADAPTER_SUFFIX,
    Artifact,
    Manifest,
    canonical_json,
    file_sha256,
    manifest_path,
    text_sha256,
)
from accel.cache import StageCache
from accel.cancel import check_interrupted, interruptible
from accel.child import resolve
from accel.contract import check_contract
from accel.errors import (
    NO_SPACE,
    CannotWrite,
    ChildCrashed,
    GateFailed,
    InvalidModel,
    RunFailed,
    StageFailed,
    UnsupportedHere,
    no_space,
)
from accel.folders.writing import make_folder
from accel.machine import trim_memory
from accel.progress import report
from accel.spelling import option
from accel.tables.kinds import KINDS
from accel.tables.stage_table import Stage, get_stage
from accel.version import __version__

# A disk with less than 1 MiB of free space counts as full, even if the file to write is smaller.
_LITTLE_ROOM = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """The options of a stage. Every option that can change the result is a field. If a field is a ``Path``, the cache
    key covers the name and the content of the file.

    A field that is added to an existing config has ``omit_default`` in its metadata. A field with ``omit_default``
    joins the cache key only if its value differs from the default. Results in the cache therefore stay valid when a
    field is added.
    """


# Replaces a relative error that isn't finite, because JSON has no infinity. The note of the result gives the reason.
NOT_FINITE = 1e30


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One comparison. ``passed`` is None if this machine could not run the comparison (``note`` gives the reason)."""

    gate: str
    case: str
    output: str
    metric: str
    value: float | None
    limit: float | None
    passed: bool | None
    note: str = ""

    @property
    def finding(self) -> str:
        """Returns the value and the limit as text, or the note if the comparison gave no finite value."""
        if self.value is None or self.limit is None or self.value >= NOT_FINITE:
            return self.note or "the reference is all zeros, and this is not"
        why = f" ({self.note})" if self.note and not self.limit else ""
        return f"{self.metric} is {self.value:.3g}, the limit is {self.limit:.3g}{why}"


class Gate(Protocol):
    """A check of a stage's output against its input. ``to_json`` describes the gate for the cache key and the
    manifest."""

    def to_json(self) -> dict[str, Any]: ...

    def check(self, src: Artifact, out: Artifact) -> Sequence[GateResult]: ...


class Proof:
    """Checks a file that the stage made from ``src``: first the contract, then every gate of the run.

    A stage that tries several files gets the ``Proof`` of its run and checks each file. In the stage table, ``proves``
    marks the stages that try several files. ``run_stage`` also checks the returned file. If the stage returns the file
    that it checked last, ``run_stage`` reuses the gate results instead of running the model again.
    """

    def __init__(self, stage: Stage, src: Artifact, config: StageConfig, gates: Sequence[Gate] = ()) -> None:
        self.gates = tuple(gates)
        self._stage, self._src = stage, src
        self._opset: int | None = getattr(config, "opset", None)
        self._hashes: dict[str, str] = {}
        self._proven: Artifact | None = None
        self._results: tuple[GateResult, ...] = ()

    def of(self, result: Artifact) -> tuple[Artifact, tuple[GateResult, ...]]:
        """Returns ``result`` with the signature read from its file, and the results of the gates.

        Raises ``SignatureDrift`` if the contract is broken. A failed gate raises no error here, because the results
        name the failed gate.
        """
        if (
            self._proven is None
            or result != replace(self._proven, notes=result.notes)
            or result.hashes() != self._hashes
        ):
            self._proven = None
            proven = check_contract(self._stage, self._src, result, opset=self._opset)
            self._results = tuple(found for gate in self.gates for found in gate.check(self._src, proven))
            self._hashes, self._proven = proven.hashes(), proven
        return replace(self._proven, notes=result.notes), self._results


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of accel, of Python, and of the installed distributions among ``packages``."""
    found = {"accel": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def config_json(config: StageConfig) -> dict[str, Any]:
    """Returns the options as JSON values, for the cache key and the record. Replaces a path by its name and sha256."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return {"file": value.name, "sha256": path_sha256(value)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            said = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if not _omitted(value, f)}
            return {name: plain(of) for name, of in said.items()}
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, frozenset | set):
            return sorted(plain(v) for v in value)
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        return value

    return plain(config)  # type: ignore[no-any-return]


def _omitted(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Tells whether the record leaves out ``field``. A field with ``omit_default`` is left out if the field has its
    default value."""
    return bool(field.metadata.get("omit_default")) and getattr(value, field.name) == field.default


def path_sha256(path: Path) -> str:
    """Returns the sha256 of a file, or of the names and hashes of all files in a folder."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return text_sha256("\n".join(f"{p.relative_to(path)} {file_sha256(p)}" for p in files))
    return file_sha256(path)


def run_stage(
    name: str,
    src: Artifact,
    config: StageConfig,
    *,
    gates: Sequence[Gate] = (),
    out: Path | None = None,
    cache: StageCache | None = None,
    stage: Stage | None = None,
) -> Artifact:
    """Runs a stage or takes its result from the cache, and copies the result to ``out``. If ``out`` is None, the result
    stays in the cache.

    If a gate fails, saves the bad file as ``<out>.rejected`` and leaves ``out`` unchanged. Raises these errors:

    - ``UnsupportedHere`` if ``src`` is of the wrong kind, or has adapters that the new kind can't take.
    - ``StageFailed`` or a subclass if the stage fails.
    - ``SignatureDrift`` if the result breaks the contract.
    - ``GateFailed`` if the outputs of the result differ from the outputs of ``src`` by more than a limit.
    - ``CannotWrite`` if ``out`` or the cache can't be written.
    """
    stage = stage or get_stage(name)
    if src.kind not in stage.takes:
        takes = " or ".join(stage.takes)
        raise UnsupportedHere(
            f"the stage {stage.name} takes {takes} artifacts, but the artifact {src.path} has the kind {src.kind}"
        )
    if src.adapters and stage.gives != src.kind:
        raise UnsupportedHere(
            f"{src.path} takes its adapters ({', '.join(src.adapters)}) as inputs that a run may leave out, and a "
            f"model of the kind {stage.gives} has no such inputs; start from the base model, or from an export that "
            "merges one adapter"
        )
    cache = cache or StageCache()
    options = config_json(config)
    used = versions(stage.packages)
    key = text_sha256(
        canonical_json(
            {
                "stage": stage.name,
                "version": stage.version,
                "options": options,
                "versions": used,
                "input": src.digest,
                "signature": src.signature.to_json(),
                "history": [record["key"] for record in (src.manifest.stages if src.manifest else ())],
                "gates": [gate.to_json() for gate in gates],
            }
        )
    )
    made = cache.find(key)
    if made is None:
        with cache.scratch() as folder:
            try:
                made = _make(stage, src, config, options, used, key, gates, folder, out, cache)
            except (StageFailed, RunFailed, InvalidModel, ChildCrashed) as error:
                _check_room(stage, src, folder, error)
                raise
            except OSError as error:
                if no_space(error) is not None:
                    raise _no_room(stage, folder) from error
                raise
    else:
        report(f"{stage.name}: cached", 1.0)
        made = _as_made_from(made, src)
    return made.copy_to(out) if out is not None else made


def _check_room(stage: Stage, src: Artifact, folder: Path, error: Exception | None = None) -> None:
    """Raises ``CannotWrite`` if ``folder`` has no room for a file as large as ``src``.

    A library that runs out of disk space may report a wrong cause, or write half a file without an error.
    """
    size = max(_LITTLE_ROOM, sum(file.stat().st_size for file in src.files if file.is_file()))
    allocate = getattr(os, "posix_fallocate", None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if allocate is not None:
                allocate(file.fileno(), 0, size)
    except OSError as full:
        if full.errno in NO_SPACE:
            raise _no_room(stage, folder) from (error or full)


def _no_room(stage: Stage, folder: Path) -> CannotWrite:
    """Returns the error that says that the disk of ``folder`` is full."""
    return CannotWrite(f"no space left for stage {stage.name} in {folder}; free some space, or set ACCEL_CACHE_DIR")


def _as_made_from(made: Artifact, src: Artifact) -> Artifact:
    """Returns a cached artifact with the current paths of its source and input instead of the recorded paths."""
    assert made.manifest is not None
    record = {**made.history[-1], "input_path": str(src.path.absolute())}
    manifest = replace(made.manifest, source=src.source, stages=(*src.history, record))
    return made.with_manifest(manifest)


def _make(
    stage: Stage,
    src: Artifact,
    config: StageConfig,
    options: dict[str, Any],
    used: dict[str, str],
    key: str,
    gates: Sequence[Gate],
    folder: Path,
    out: Path | None,
    cache: StageCache,
) -> Artifact:
    function: Callable[..., Artifact] = resolve(stage.function)
    report(stage.name, None)
    started = time.monotonic()
    inside = folder / KINDS[stage.gives].main_file
    proof = Proof(stage, src, config, gates)
    with cache.resuming(key):
        result: Artifact = interruptible(function, src, config, inside, *((proof,) if stage.proves else ()))
    check_interrupted()
    result = _with_adapters(src, result)
    trim_memory()
    if not result.path.is_file() or result.path.stat().st_size == 0:
        raise StageFailed(f"the stage {stage.name} wrote no output; run it again with {option('use_cache', False)}")
    seconds = time.monotonic() - started
    result, results = proof.of(result)
    for failed in (r for r in results if r.passed is False):
        _check_room(stage, src, folder)
        aside = _set_aside(result, out or cache.rejected / f"{stage.name}{KINDS[stage.gives].ending}")
        finding = f"stage {stage.name} changed the output {failed.output!r} at {failed.case}: {failed.finding}"
        error = GateFailed(f"{finding}; the file is set aside as {aside}")
        error.finding, error.value = finding, failed.value
        raise error
    hashes = result.hashes()
    previous = src.manifest.stages if src.manifest else ()
    record = {
        "name": stage.name,
        "key": key,
        "options": options,
        "versions": used,
        "input": src.digest,
        "input_path": str(src.path.absolute()),
        "output": list(hashes.values()),
        "seconds": round(seconds, 3),
        "gates": [dataclasses.asdict(r) for r in results],
        "notes": dict(result.notes),
    }
    manifest = Manifest(
        kind=result.kind,
        signature=result.signature,
        files=hashes,
        source=src.source,
        stages=(*previous, record),
        properties=result.properties,
    )
    manifest.write(manifest_path(result.path))
    return cache.store(key, folder, result.path.name)


def _with_adapters(src: Artifact, result: Artifact) -> Artifact:
    """Copies the adapters of ``src`` beside the result, because no stage changes them."""
    names = [name for name in src.companions if name.endswith(ADAPTER_SUFFIX) and name not in result.companions]
    for name in names:
        make_folder((result.path.parent / name).parent)
        shutil.copyfile(src.path.parent / name, result.path.parent / name)
    return replace(result, companions=(*result.companions, *names)) if names else result


def _set_aside(result: Artifact, out: Path) -> Path:
    """Copies the main file of a rejected result to a path beside ``out``. Returns the path of the copy."""
    aside = out.with_name(out.name + ".rejected")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(result.path, aside)  # a rename fails if the scratch folder is on another disk
    except OSError as error:
        raise CannotWrite(f"can't write {aside} ({error.strerror}); choose another {option('out')}") from error
    return aside
