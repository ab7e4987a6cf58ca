"""The candidates timed beside their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.artifact import canonical_json, text_sha256
from accel.cache import StageCache
from accel.optimizer.candidate import CandidateResult
from accel.optimizer.noise import outcome_is_open
from accel.optimizer.workload import Workload
from accel.progress import report
from accel.stage import versions

if TYPE_CHECKING:
    from accel.bench.paired import BenchReport

# Where a distribution is drawn or looked up: percentiles of all runs.
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long is measured: at least ``rounds`` rounds of blocks of ``block_seconds``, and more for up to ``seconds``
    while an interval is wide. ``limit``: seconds that all of it may take, loading included, fewer rounds then."""

    rounds: int
    block_seconds: float = 0.2
    seconds: float = 0.0
    limit: float | None = None


def measured(
    source: CandidateResult,
    rows: Sequence[CandidateResult],
    workload: Workload,
    threads: int,
    effort: Effort,
    cache: StageCache,
) -> Mapping[str, Any]:
    """Time the source and the candidates beside one another; the figures of an identical run come from the cache,
    unless noise decided between them: then they are measured again, and the new ones kept.

    Each row gets its ``measured``: the row of ``accel bench``, times in ms and energy in J a request, with
    ``samples_per_second`` and the ``percentiles_ms`` of ``PERCENTILES`` (of passes, where a pass has several requests:
    of one alone nothing is known then) and the ``noise_floor``. What fails is rejected with its reason. The machine,
    the shape, the noise floor and whether the figures are ``cached`` are handed back.
    """
    from accel.bench.environment import environment as machine
    from accel.bench.paired import Candidate, measure

    candidates = []
    for row in (source, *rows):
        assert row.artifact is not None
        plain = Candidate(name=row.name, artifact=row.artifact, runtime=row.runtime, options=row.options)
        candidates.append(workload.candidate(plain))
    key = text_sha256(
        canonical_json(
            {
                "candidates": [
                    [c.name, c.artifact.digest, c.runtime, str(sorted(c.options.items()))] for c in candidates
                ],
                "feeds": [
                    {name: text_sha256(value.tobytes().hex()) for name, value in feeds.items()}
                    for feeds in workload.mix
                ],
                "requests": workload.requests,
                "effort": [effort.rounds, effort.block_seconds, effort.seconds, effort.limit is None],
                "machine": machine(threads=threads, date=False),
                "versions": versions(("torch", "onnxruntime", "openvino")),
            }
        )
    )
    found = cache.get_record("measurement", key)
    if found is not None and outcome_is_open(found["results"]):
        report("measure: again, noise decided the last time")
        found = None
    cached = found is not None
    if found is None:
        result: BenchReport = measure(
            candidates,
            workload.mix[0],
            rounds=effort.rounds,
            block_seconds=effort.block_seconds,
            budget_seconds=effort.seconds,
            limit_seconds=effort.limit,
            threads=threads,
        )
        found = result.to_json() | {"percentiles": _percentiles(result)}
        cache.put_record("measurement", key, found)
    else:
        report("measure: cached", 1.0)
    by_name = {r["name"]: r for r in found["results"]}
    for row in (source, *rows):
        row.measured = _a_request(by_name[row.name], found["percentiles"].get(row.name), row.runtime, workload)
        row.measured["noise_floor"] = found.get("noise_floor")
        if row.measured.get("error"):
            row.status, row.reason = "rejected", str(row.measured["error"])
    said = {"sizes": found.get("sizes"), "noise_floor": found.get("noise_floor"), "cached": cached}
    return {**found["environment"], **said}


def _percentiles(report: BenchReport) -> dict[str, list[float]]:
    import numpy as np

    found = {}
    for row in report.rows:
        if row.error is None:
            times = np.concatenate(list(report.samples[row.name])) / 1e6
            found[row.name] = [float(f"{t:.6g}") for t in np.percentile(times, PERCENTILES)]
    return found


def _a_request(
    row: Mapping[str, Any], percentiles: Sequence[float] | None, runtime: str, workload: Workload
) -> dict[str, Any]:
    """A row of the measurement, in which a run is a pass, by the request."""
    count = workload.requests
    body = dict(row) | {"runtime": runtime}
    for name in ("median_ms", "mean_ms", "joules_per_run"):
        body[name] = None if row[name] is None else row[name] / count
    body["phases_ms"] = {name: ms / count for name, ms in row["phases_ms"].items()} if row["phases_ms"] else None
    body["round_medians_ms"] = [ms / count for ms in row["round_medians_ms"]]
    body["percentiles_ms"] = None if percentiles is None else [ms / count for ms in percentiles]
    if count > 1:
        # Of a pass, not of a request: a mean over requests has no tail of theirs.
        body |= {"p90_ms": None, "p99_ms": None, "load_ms": None, "first_run_ms": None}
    median = body["median_ms"]
    body["samples_per_second"] = workload.batch * 1000 / median if median else None
    return body
