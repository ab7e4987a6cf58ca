"""The few alternative session options that are tried for a candidate."""

from __future__ import annotations

from typing import Any

from ..candidate import CandidateResult
from ..measure.workload import Objective


def variants(row: CandidateResult, objective: Objective, *, cores: int, vary_threads: bool) -> list[CandidateResult]:
    """Returns copies of ``row`` with different session options, the likely faster copies first. Returns no copies if
    the runtime has no options to vary. For latency the options are fewer threads, graph optimizations that keep the
    layout, and idle threads that sleep. A small model spends most of its time on distributing work to threads. A layout
    change slows some convolutions. For throughput the options are several streams, which distribute work by request
    instead of by operator.
    """
    options = {"onnxruntime": _onnxruntime, "openvino": _openvino}.get(row.runtime)
    if options is None:
        return []
    found = options(objective, cores, vary_threads)
    return [
        CandidateResult(
            name=f"{row.name}, {words}",
            target=row.target,
            precision=row.precision,
            megabytes=row.megabytes,
            artifact=row.artifact,
            recipe=row.recipe,
            trajectory=row.trajectory,
            runtime=row.runtime,
            options={**row.options, **change},
            base=row.name,
        )
        for words, change in found
    ]


def _fewer_threads(cores: int, vary_threads: bool) -> list[tuple[str, dict[str, Any]]]:
    if cores < 2 or not vary_threads:
        return []
    half = cores // 2
    return [(f"{half} thread{'s' if half > 1 else ''}", {"threads": half})]


def _streams(cores: int, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    counts = [n for n in (cores, cores // 2) if n >= 2]
    return [(f"{n} streams", {"streams": n, **more}) for n in counts]


def _onnxruntime(objective: Objective, cores: int, vary_threads: bool) -> list[tuple[str, dict[str, Any]]]:
    if objective == "throughput":
        # Idle threads that spin would take cores from the streams that compute.
        return _streams(cores, spinning=False)
    found = [*_fewer_threads(cores, vary_threads), ("extended graph level", {"graph_level": "extended"})]
    return found + ([("no spinning", {"spinning": False})] if cores > 1 else [])


def _openvino(objective: Objective, cores: int, vary_threads: bool) -> list[tuple[str, dict[str, Any]]]:
    return _streams(cores) if objective == "throughput" else _fewer_threads(cores, vary_threads)
