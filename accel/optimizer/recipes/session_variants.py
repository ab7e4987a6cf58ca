"""Lists the alternative session options that are tried for a candidate."""

from __future__ import annotations

from typing import Any

from ..candidate import CandidateResult
from ..measure.workload import Objective


def variants(row: CandidateResult, objective: Objective, *, cores: int, vary_threads: bool) -> list[CandidateResult]:
    """Returns copies of ``row`` with different session options. The copies that are probably faster come first. Returns
    no copies if the runtime has no options to vary. If the objective is latency, the copies have fewer threads, graph
    optimizations that keep the tensor layout, or idle threads that sleep. Fewer threads help small models, which spend
    most of their time on distributing work to threads. Some convolutions are faster if graph optimizations keep the
    tensor layout. For throughput, the copies use several streams, and each stream runs whole requests.
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
        # Idle threads that spin would take CPU time from the streams that compute.
        return _streams(cores, spinning=False)
    found = [*_fewer_threads(cores, vary_threads), ("extended graph level", {"graph_level": "extended"})]
    return found + ([("no spinning", {"spinning": False})] if cores > 1 else [])


def _openvino(objective: Objective, cores: int, vary_threads: bool) -> list[tuple[str, dict[str, Any]]]:
    return _streams(cores) if objective == "throughput" else _fewer_threads(cores, vary_threads)
