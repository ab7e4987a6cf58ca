"""Reproduces an artifact by running the stages of its manifest again and comparing each stage's output with the
recorded output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accel.artifact import Artifact, Manifest
from accel.cache import StageCache
from accel.child import resolve
from accel.errors import AccelError, BadInputSpec, ChainBroken, GateFailed, UsageError
from accel.progress import report
from accel.signature import DimRange, TensorSpec
from accel.sources.source import Source
from accel.sources.tensorflow.source import source_options
from accel.spelling import option
from accel.stage import StageConfig, path_sha256, run_stage, versions
from accel.tables.stage_table import get_stage

from .gates import OutputGate, gate_runtime

Status = Literal["identical", "equivalent", "different"]


@dataclass(frozen=True, kw_only=True)
class Remade:
    """One stage, run again.

    ``status`` has one of these values:

    - ``identical`` if the new bytes equal the recorded bytes.
    - ``equivalent`` if the bytes changed but the new artifact passes the recorded gate. A new engine is also
      ``equivalent`` if it is built from the same ONNX file and has the same kernels.
    - ``different`` if the new artifact fails the gate or could not be compared.

    ``versions`` lists the libraries whose version changed, each as ``name old -> new``.
    """

    stage: str
    status: Status
    note: str
    versions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def remake(artifact: Artifact, given: Sequence[Path], cache: StageCache) -> tuple[Artifact, list[Remade]]:
    """Run every stage of the artifact's manifest again, beginning at the source. The outputs are stored in ``cache``,
    which should be empty.

    ``given`` lists the files and folders that the stages read, such as calibration data. Files are matched by their
    sha256.

    Raises ``ChainBroken`` if the manifest is missing, or if the source is missing or changed. Raises ``UsageError`` if
    a file that a stage read is not in ``given``.
    """
    manifest = artifact.manifest
    if manifest is None:
        raise ChainBroken(f"{artifact.path} has no manifest; put its manifest beside it")
    if not manifest.stages:
        raise ChainBroken(f"the manifest of {artifact.path} lists no stages, so there is nothing to reproduce")
    hashes = {path_sha256(path): path for path in given}
    configs = [config_of(record, hashes) for record in manifest.stages]  # fails early if a file is missing
    current = _source(manifest)
    rows = []
    for number, (record, config) in enumerate(zip(manifest.stages, configs, strict=True), start=1):
        report(f"reproduce: {record['name']}", (number - 1) / len(configs))
        before = current
        current = run_stage(record["name"], before, config, cache=cache)
        rows.append(_compared(record, before, current))
    return current, rows


def config_of(record: Mapping[str, Any], given: Mapping[str, Path]) -> StageConfig:
    """Reads the config of a stage from the stage's record. Finds files in ``given`` by their sha256."""
    kind: type[StageConfig] = resolve(get_stage(record["name"]).config)  # type: ignore[assignment]
    known = {f.name for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in record["options"].items():
        if name not in known:
            raise ChainBroken(
                f"stage {record['name']} has no option {name!r} any more; use the version of accel that made "
                f"the artifact ({record['versions'].get('accel', 'unknown')})"
            )
        values[name] = _value(record["name"], value, given)
    config: StageConfig = kind(**values)
    return config


def _value(stage: str, value: Any, given: Mapping[str, Path]) -> Any:
    if isinstance(value, list):
        return tuple(_value(stage, item, given) for item in value)
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"file", "sha256"}:
        if value["sha256"] not in given:
            raise UsageError(
                f"stage {stage} read the data {value['file']} (sha256 {value['sha256'][:12]}); "
                f"pass the same data with {option('data')}"
            )
        return given[value["sha256"]]
    if {"min", "opt", "max"} <= set(value):
        return DimRange(**value)
    if {"name", "dtype", "shape"} <= set(value):
        return TensorSpec(**value)
    return {name: _value(stage, item, given) if isinstance(item, Mapping) else item for name, item in value.items()}


def _source(manifest: Manifest) -> Artifact:
    """Open the recorded source. Raises ``ChainBroken`` if the source is missing or changed."""
    source = manifest.source
    spec, weights = source.get("spec"), source.get("weights")
    if not spec:
        raise ChainBroken("the manifest names no source, so the artifact can't be made again")
    arguments: dict[str, Any] = {"weights": Path(weights)} if weights else {}
    if rounded := source.get("weights_dtype"):
        arguments["weights_dtype"] = rounded
    if adapters := source.get("adapters"):
        arguments["adapters"] = adapters["path"]
    if "decoder" in source:
        arguments["decoder"] = True
    if loading := source.get("loading"):
        arguments |= source_options(loading)
    dims = manifest.signature.dims
    # The source may open only at dim sizes that are multiples of a step, so the recorded dims, which hold the step, are
    # passed.
    if any(found.step != 1 for found in dims.values()):
        arguments["dims"] = dims
    spec = _where_it_was(spec, [entry["path"] for entry in source.get("files", ())])
    named, part = Source(spec, **arguments), source.get("part", "")
    try:
        try:
            found = named.open(part=part)
        except BadInputSpec:  # the source doesn't declare its inputs
            found = replace(named, inputs=manifest.signature.inputs).open(part=part)
    except AccelError as error:
        raise ChainBroken(f"the source {spec} can't be opened any more ({error}); restore the source") from error
    files = [(entry["path"], entry["sha256"]) for entry in source.get("files", ())]
    now = {entry["path"]: entry["sha256"] for entry in found.source.get("files", ())}
    for path, sha256 in files:
        if now.get(path, sha256) != sha256:
            raise ChainBroken(
                f"{path} is not the file that the artifact was made from (its sha256 differs); restore the file"
            )
    # The sha256 that version 0.1.0 recorded leaves out a module's attributes, so only weights and files are compared.
    alike = source.get("covers") == found.source.get("covers")
    name = "sha256" if alike else "state_sha256"
    same_files = alike or [sha256 for _, sha256 in files] == list(now.values())
    if source.get(name) not in (None, found.source.get(name)) or not same_files:
        raise ChainBroken(f"{spec} makes a different model than the manifest records; restore the original code")
    if alike and found.digest != manifest.stages[0]["input"]:
        raise ChainBroken(
            f"{spec} is not the source that the first stage read (its sha256 differs); restore the source"
        )
    ranges: dict[str, DimRange] = {d: r for d, r in manifest.signature.dims.items() if d in found.signature.dims}
    return dataclasses.replace(found, signature=found.signature.with_dims(ranges))


def _where_it_was(spec: str, files: Sequence[str]) -> str:
    """Returns ``spec``. Replaces a relative path that doesn't exist in the current folder by the absolute path from
    ``files``."""
    path, colon, factory = spec.partition(".py:")
    name = Path(path + (".py" if colon else ""))
    if name.is_absolute() or name.exists():
        return spec
    for file in map(Path, files):
        if file.is_absolute() and file.parts[-len(name.parts) :] == name.parts:
            return f"{file}:{factory}" if colon else str(file)
    return spec


def _compared(record: Mapping[str, Any], before: Artifact, made: Artifact) -> Remade:
    others = _other_versions(record)
    if list(made.hashes().values()) == list(record["output"]):
        return Remade(stage=record["name"], status="identical", note="", versions=others)
    kernels = record["notes"].get("kernels")
    if kernels and record["input"] == before.digest and made.history[-1]["notes"].get("kernels") == kernels:
        # For some engines, TensorRT's build is not deterministic.
        note = f"other bytes, the same {len(kernels)} kernels from the same ONNX"
        return Remade(stage=record["name"], status="equivalent", note=note, versions=others)
    limits = [gate["limit"] for gate in record["gates"] if gate["limit"]]
    limits += filter(None, [record["notes"].get("deferred_limit")])
    if not limits or gate_runtime(made) is None or gate_runtime(before) is None:
        note = "other bytes, and no gate of it can run here"
        return Remade(stage=record["name"], status="different", note=note, versions=others)
    try:
        results = OutputGate(limit=max(limits)).check(before, made)
    except GateFailed as error:
        return Remade(stage=record["name"], status="different", note=str(error), versions=others)
    worst = max(results, key=lambda r: r.value or 0.0)
    passed = all(r.passed is not False for r in results)
    note = f"other bytes; {worst.metric} {worst.value or 0:.2g} at {worst.case}, the gate's limit is {worst.limit:g}"
    return Remade(stage=record["name"], status="equivalent" if passed else "different", note=note, versions=others)


def _other_versions(record: Mapping[str, Any]) -> tuple[str, ...]:
    then, now = record["versions"], versions(get_stage(record["name"]).packages)
    return tuple(f"{name} {old} -> {now.get(name, 'none')}" for name, old in then.items() if now.get(name) != old)
