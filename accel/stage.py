"""What a stage is, and how one is run: cached, checked against the signature, gated, recorded.

A stage is a pure function ``stage(src: Artifact, config: StageConfig, out: Path) -> Artifact``. It writes ``out`` (and
companions beside it) and nothing else; everything around that is here, the same for all of them.
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

import accel
from accel.artifact import Artifact, Manifest, canonical_json, file_sha256, manifest_path, text_sha256
from accel.cache import StageCache
from accel.child import resolve
from accel.errors import (
    NO_SPACE,
    CannotWrite,
    ChildCrashed,
    GateFailed,
    InvalidModel,
    RunFailed,
    SignatureDrift,
    StageFailed,
    UnsupportedHere,
)
from accel.memory import trim
from accel.progress import report
from accel.signature import Signature, TensorSpec
from accel.stage_table import READERS, Stage, get_stage

# With less than this many bytes left a disk is full, whatever is to be written.
_LITTLE_ROOM = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """The options of a stage. Everything that can change the result is a field; a ``Path`` counts by its content."""


# What a relative error that isn't finite is written as, since JSON has no infinity; the note says what is so.
NOT_FINITE = 1e30


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One comparison: ``passed`` is None where this machine could not run it (``note`` says why)."""

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
        """The numbers in words, or what there is in place of them."""
        if self.value is None or self.limit is None or self.value >= NOT_FINITE:
            return self.note or "the reference is all zeros, and this is not"
        return f"{self.metric} is {self.value:.3g}, the limit is {self.limit:.3g}"


class Gate(Protocol):
    """A check of a stage's output against its input. ``to_json`` describes it for the cache key and the manifest."""

    def to_json(self) -> dict[str, Any]: ...

    def check(self, src: Artifact, out: Artifact) -> Sequence[GateResult]: ...


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of these distributions (those installed), of accel and of Python."""
    found = {"accel": accel.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def config_json(config: StageConfig) -> dict[str, Any]:
    """The options as recorded and keyed: a path by its name and sha256, so that only its content counts."""

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
    """Whether ``field`` came later than what was recorded without it, and says no more than that did."""
    return bool(field.metadata.get("omit_default")) and getattr(value, field.name) == field.default


def path_sha256(path: Path) -> str:
    """sha256 of a file, or of the names and hashes of all files in a folder."""
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
    """Run a stage, or take its result from the cache; publish it to ``out`` (None: it stays in the cache).

    Raises ``UnsupportedHere`` for the wrong kind of input, ``StageFailed`` (and below) where it can't be done,
    ``SignatureDrift`` where the result broke the contract, ``GateFailed`` where its outputs are off: then the bad file
    is left aside as ``<out>.rejected`` and nothing under the final name has changed.
    """
    stage = stage or get_stage(name)
    if src.kind not in stage.takes:
        raise UnsupportedHere(f"stage {stage.name} takes {' or '.join(stage.takes)}, {src.path} is {src.kind}")
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
    else:
        report(f"{stage.name}: cached", 1.0)
        made = _as_made_from(made, src)
    return made.copy_to(out) if out is not None else made


def _check_room(stage: Stage, src: Artifact, folder: Path, error: Exception | None = None) -> None:
    """``CannotWrite`` where a file as large as ``src`` can't be had in ``folder``: libraries that find no space give
    other reasons, or write half a file without a word."""
    size = max(_LITTLE_ROOM, sum(file.stat().st_size for file in src.files if file.is_file()))
    allocate = getattr(os, "posix_fallocate", None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if allocate is not None:
                allocate(file.fileno(), 0, size)
    except OSError as full:
        if full.errno in NO_SPACE:
            where = f"stage {stage.name} in {folder}"
            raise CannotWrite(f"no space left for {where}; free some, or set ACCEL_CACHE_DIR") from (error or full)


def _as_made_from(made: Artifact, src: Artifact) -> Artifact:
    """A cached artifact with the places where its source and input lie now: same bytes, maybe other paths."""
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
    inside = folder / f"model{stage.suffix}"
    with cache.resuming(key):
        result = function(src, config, inside)
    trim()
    if not result.path.is_file() or result.path.stat().st_size == 0:
        raise StageFailed(f"stage {stage.name} wrote no output; run it again with --no-cache")
    result = check_contract(stage, src, config, result)
    seconds = time.monotonic() - started
    results: list[GateResult] = []
    for gate in gates:
        results += gate.check(src, result)
    for failed in (r for r in results if r.passed is False):
        _check_room(stage, src, folder)
        aside = _set_aside(result, out or cache.root / "rejected" / f"{stage.name}{stage.suffix}")
        error = GateFailed(
            f"stage {stage.name} changed the output {failed.output!r} at {failed.case}: {failed.finding}; the file is "
            f"set aside as {aside}"
        )
        error.value = failed.value
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


def _set_aside(result: Artifact, out: Path) -> Path:
    aside = out.with_name(out.name + ".rejected")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(result.path, aside)  # the scratch folder may be on another disk: no rename
    except OSError as error:
        raise CannotWrite(f"can't write {aside} ({error.strerror}); choose another -o") from error
    return aside


def check_contract(stage: Stage, src: Artifact, config: StageConfig, result: Artifact) -> Artifact:
    """``result`` with the signature that its own bytes show, once it is known to keep the contract of ``src``."""
    where = f"stage {stage.name}"
    found, properties = result.signature, dict(result.properties)
    if result.kind in READERS:
        found, read = resolve(READERS[result.kind])(result.path, src.signature)
        properties |= read
    _compare_specs(where, "input", src.signature.inputs, found.inputs, stage.may_change)
    if src.signature.outputs:
        _compare_specs(where, "output", src.signature.outputs, found.outputs, stage.may_change)
    asked = getattr(config, "opset", None)
    for name, wanted in (("opset", asked or src.properties.get("opset")), ("ir", src.properties.get("ir"))):
        has = properties.get(name)
        asked_for = name == "opset" and bool(asked)
        if wanted is not None and has is not None and has != wanted and (asked_for or name not in stage.may_change):
            fix = f"ask for --opset {has}" if name == "opset" else f"save the model with ir_version {has}"
            raise SignatureDrift(f"{where} gave {name} {has} where {wanted} was to be; {fix} instead")
    # The stage may narrow the ranges (an engine's profile); a file's own bytes don't hold them.
    dims = {d: r for d, r in result.signature.dims.items() if d in found.dynamic_dims}
    known = result.signature if "interface" in stage.may_change else src.signature
    values = {spec.name: spec.values for spec in known.inputs}
    inputs = tuple(replace(spec, values=values.get(spec.name)) for spec in found.inputs)
    return replace(result, signature=Signature(inputs, found.outputs, dims), properties=properties)


def _compare_specs(
    where: str,
    role: str,
    wanted: Sequence[TensorSpec],
    found: Sequence[TensorSpec],
    may_change: frozenset[str],
) -> None:
    if "interface" in may_change:
        return
    have = {spec.name: spec for spec in found}
    for spec in wanted:
        if spec.name not in have:
            raise SignatureDrift(f"{where} lost the {role} {spec.name!r}; what is left: {', '.join(have) or 'nothing'}")
        other = have[spec.name]
        if spec.dtype != other.dtype and "dtypes" not in may_change:
            raise SignatureDrift(f"{where} made the {role} {spec.name!r} {other.dtype}, it has to stay {spec.dtype}")
        if "shapes" in may_change:
            continue
        if len(spec.shape) != len(other.shape):
            raise SignatureDrift(f"{where} changed the rank of the {role} {spec.name!r}: {spec} became {other}")
        for dim, now in zip(spec.shape, other.shape, strict=True):
            # An output dim may be called otherwise (a formula); dynamic has to stay dynamic and fixed to stay fixed.
            if isinstance(dim, str) != isinstance(now, str) or (isinstance(dim, int) and dim != now):
                raise SignatureDrift(f"{where} turned the dim {dim!r} of the {role} {spec.name!r} into {now!r}")
            if role == "input" and dim != now:
                raise SignatureDrift(f"{where} renamed the dim {dim!r} of the {role} {spec.name!r} to {now!r}")
    if extra := set(have) - {spec.name for spec in wanted}:
        raise SignatureDrift(f"{where} added the {role} {sorted(extra)[0]!r}, which the model did not have")
