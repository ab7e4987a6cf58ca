"""Times the candidates and their source in the same measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.artifact import canonical_json, text_sha256
from accel.cache import StageCache
from accel.progress import report
from accel.stage import versions

from ..candidate import CandidateResult
from .noise import outcome_is_open
from .workload import Workload

if TYPE_CHECKING:
    from accel.timing.paired import BenchReport

# The percentiles of the run times that are recorded to draw the distributions.
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The length of a measurement, which has at least ``rounds`` rounds. Each block takes ``block_seconds``.

    If a confidence interval is still too wide after these rounds, further rounds take up to ``seconds``. ``limit`` is
    the maximum number of seconds for the whole measurement, including loading. A short limit reduces the number of
    rounds. A ``limit`` of None means no limit. If ``only_fastest`` is true, slower candidates get only 5 rounds.
    """

    rounds: int
    block_seconds: float
    seconds: float = 0.0
    limit: float | None = None
    only_fastest: bool = False


def measured(
    source: CandidateResult,
    rows: Sequence[CandidateResult],
    workload: Workload,
    threads: int,
    effort: Effort,
    cache: StageCache,
) -> Mapping[str, Any]:
    """Times the source and the candidates in alternation, and returns the environment of the measurement.

    If an identical measurement is in the cache, its figures are reused. If the cached choice of the fastest candidate
    depends on noise, the candidates are measured again and the new figures are cached.

    Sets ``measured`` of each row to a dict with all fields of a row of ``accel bench``. Times in ``measured`` are in ms
    per request, and energies are in J per request. ``samples_per_second`` is the number of samples in all requests,
    divided by the time of all blocks. ``measured`` also holds ``noise_floor``, ``statistic``, and the percentiles
    ``PERCENTILES`` of the times as ``percentiles_ms``. If a pass has several requests, single requests aren't timed, so
    the percentiles are computed from the times of whole passes. A candidate that fails is rejected with the error as
    the reason. The environment describes the machine. The environment also holds ``sizes``, ``noise_floor``,
    ``statistic``, ``lost`` and ``cached`` (True if the figures come from the cache).
    """
    from accel.timing.environment import environment as machine
    from accel.timing.paired import Candidate, measure

    candidates = []
    rows = sorted(rows, key=lambda row: row.name)  # A later run may make the candidates in another order.
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
                "effort": [
                    effort.rounds,
                    effort.block_seconds,
                    effort.seconds,
                    effort.limit is None,
                    effort.only_fastest,
                ],
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
            shorten="slower" if effort.only_fastest else "",
        )
        found = result.to_json() | {"percentiles": _percentiles(result)}
        cache.put_record("measurement", key, found)
    else:
        report("measure: cached", 1.0)
    by_name = {r["name"]: r for r in found["results"]}
    for row in (source, *rows):
        row.measured = _a_request(by_name[row.name], found["percentiles"].get(row.name), row.runtime, workload)
        row.measured["noise_floor"] = found.get("noise_floor")
        row.measured["statistic"] = found.get("statistic")
        if row.measured.get("error"):
            row.reject(str(row.measured["error"]))
    said = {name: found.get(name) for name in ("sizes", "noise_floor", "statistic", "lost")} | {"cached": cached}
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
    """Converts a measured row from figures per pass to figures per request."""
    count = workload.requests
    body = dict(row) | {"runtime": runtime}
    for name in ("median_ms", "mean_ms", "joules_per_run"):
        body[name] = None if row[name] is None else row[name] / count
    body["phases_ms"] = {name: ms / count for name, ms in row["phases_ms"].items()} if row["phases_ms"] else None
    for name in ("round_medians_ms", "round_cpu_ms"):
        body[name] = [ms / count for ms in row.get(name) or ()]
    body["percentiles_ms"] = None if percentiles is None else [ms / count for ms in percentiles]
    if count > 1:
        # The tail latencies and load times of a pass can't be converted to times per request.
        body |= {"p90_ms": None, "p99_ms": None, "load_ms": None, "first_run_ms": None}
    rate = row["samples_per_second"]
    # The measured rate counts the samples of only one request per pass, so it is multiplied by the number of requests.
    body["samples_per_second"] = None if rate is None else rate * count
    return body
