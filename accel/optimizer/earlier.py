"""Finds the result of an earlier run of the same request, so that the second run has nothing to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from accel.artifact import (
    Artifact,
    canonical_json,
    combined_sha256,
    file_sha256,
    finite_json,
    manifest_path,
    text_sha256,
)
from accel.cache import StageCache
from accel.errors import AccelError
from accel.progress import report
from accel.signature import Signature
from accel.spelling import option
from accel.stage import path_sha256, versions
from accel.timing.environment import environment

from .budget import Budget
from .candidate import CandidateResult, Status
from .judge.comparison import Judgement
from .measure.noise import outcome_is_open
from .mixed.trajectory import Trajectory
from .request import OptimizeRequest
from .result import Optimization
from .run import published

_PACKAGES = ("nncf", "onnxscript", "onnxsim", "timm", "transformers", "sentence-transformers", "tensorflow")
# The fields that a record can't hold. A row of an earlier run is complete, so it needs no recipe.
_NOT_KEPT = ("artifact", "recipe", "judgement", "trajectory")


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Remembers the result of ``request`` in ``cache`` under ``key``. Without a key, the result isn't remembered."""

    request: OptimizeRequest
    cache: StageCache
    key: str | None

    @classmethod
    def of(cls, request: OptimizeRequest, cache: StageCache) -> Earlier:
        """Returns the memory of ``request``. There is no key if code decides the result, such as the factory of a model
        or a metric, because the files that this code reads are unknown."""
        try:
            key = _key(request) if request.use_cache else None
        except (OSError, TypeError, ValueError, AccelError):  # the run itself says what is wrong
            key = None
        return cls(request=request, cache=cache, key=key)

    def remember(self, result: Optimization, source: Artifact | None, budget: Budget) -> None:
        """Stores ``result``, unless another run may find a better one: an interrupted search goes on, a choice that
        noise decided is measured again, and a search that the user's budget ended may find its stages in the cache."""
        late = any(row.out_of_time for row in result.candidates) and not budget.chosen_by_accel
        noisy = outcome_is_open([row.measured for row in result.candidates if row.measured is not None])
        made = next(row.artifact for row in result.candidates if row.status == Status.CHOSEN)
        if self.key is None or budget.interrupted or late or noisy or made is None or made.manifest is None:
            return
        if Artifact.open(made.path).signature != made.signature:  # the user's samples widened the signature
            return
        self.cache.put_record(
            "optimization",
            self.key,
            {
                "artifact": str(made.path),
                "digest": made.digest,
                "source": None if source is None else _source_json(source),
                "chosen": result.chosen,
                "candidates": [_row_json(row) for row in result.candidates],
                **{name: _plain(getattr(result, name)) for name in ("environment", "notes", "warnings", "command")},
            },
        )

    def publish(self) -> tuple[Optimization, Artifact | None] | None:
        """Publishes the result of an earlier run again, and returns it with the model in its own framework. Returns
        None if there is no earlier run, or if the cache lost the chosen file."""
        body = self.cache.get_record("optimization", self.key) if self.key is not None else None
        if body is None:
            return None
        path = Path(body["artifact"])
        try:
            made = Artifact.open(path)
            if made.digest != body["digest"] or made.manifest is None or made.hashes() != dict(made.manifest.files):
                return None
        except (OSError, AccelError):
            return None
        report("optimize: the result of an earlier run", 1.0)
        rows = tuple(_row(row, made if row["name"] == body["chosen"] else None) for row in body["candidates"])
        date = body["environment"].get("date")
        measured = f", measured {date}" if date else ""
        note = f"the result of an earlier run{measured}; {option('use_cache', False)} runs everything again"
        result = Optimization(
            artifact=made,
            chosen=body["chosen"],
            candidates=rows,
            max_drop=self.request.max_drop,
            environment=body["environment"],
            notes=(*body["notes"], note),
            warnings=tuple(body["warnings"]),
            objective=self.request.objective,
            command=body["command"],
        )
        chosen = next(row for row in rows if row.status == Status.CHOSEN)
        source = None if body["source"] is None else _source(body["source"])
        return published(result, chosen, self.request.out, self.request.source.folder), source


def _key(request: OptimizeRequest) -> str | None:
    """Returns the sha256 of everything that decides the result of ``request``, or None if code is a part of it.

    Raises ``TypeError`` or ``ValueError`` for an argument that has no JSON form.
    """
    source = request.source
    if request.metric is not None or isinstance(source.spec, Artifact):
        return None
    given = Path(source.text)
    files = _model_files(given if given.exists() else source.path)
    return files and text_sha256(
        canonical_json(
            {
                "model": [source.text, files],
                "source": {f.name: _plain(getattr(source, f.name)) for f in fields(source) if f.name != "spec"},
                "request": {
                    f.name: _plain(getattr(request, f.name)) for f in fields(request) if f.name not in ("source", "out")
                },
                "machine": environment(0, date=False),
                "versions": versions(_PACKAGES),
            }
        )
    )


def _model_files(place: Path) -> str | None:
    """Returns the sha256 of an ONNX file with its weights, or of a folder of transformers. Returns None for any other
    model, which may run code outside its files."""
    if place.suffix == ".onnx" and place.is_file():
        from accel.sources.onnx.file import external_files, read_without_weights

        weights = external_files(read_without_weights(place))
        beside = [place.with_name(name) for name in (*weights, manifest_path(place).name)]
        return combined_sha256([file_sha256(file) for file in (place, *beside) if file.is_file()])
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return path_sha256(place) if isinstance(config, dict) and config.get("architectures") else None


def _plain(value: Any) -> Any:
    """Returns an argument as JSON values. Replaces a path by the hash of its files."""
    if isinstance(value, Path):
        return path_sha256(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(type(value).__name__)


def _row_json(row: CandidateResult) -> dict[str, Any]:
    kept = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in _NOT_KEPT}
    judged = row.judgement.to_json() if row.judgement else None
    searched = row.trajectory.to_json() if row.trajectory else None
    return {**finite_json(kept), "judgement": judged, "trajectory": searched}


def _row(body: Mapping[str, Any], artifact: Artifact | None) -> CandidateResult:
    judged = body["judgement"]
    if judged is not None:
        judged = Judgement(**{**judged, "drop": math.inf if judged["drop"] is None else judged["drop"]})
    searched = body.get("trajectory")  # records of older versions have none
    trajectory = None if searched is None else Trajectory.from_json(searched)
    made = {**body, "judgement": judged, "status": Status(body["status"]), "trajectory": trajectory}
    return CandidateResult(**made, artifact=artifact)


def _source_json(source: Artifact) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "kind": source.kind,
        "signature": source.signature.to_json(),
        "properties": dict(source.properties),
        "source": dict(source.source),
    }


def _source(body: Mapping[str, Any]) -> Artifact:
    return Artifact(**{**body, "path": Path(body["path"]), "signature": Signature.from_json(body["signature"])})
