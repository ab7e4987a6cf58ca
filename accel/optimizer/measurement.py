"""The candidates timed beside their source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel.artifact import Artifact, canonical_json, text_sha256
from accel.cache import StageCache
from accel.optimizer.candidate import CandidateResult
from accel.progress import report
from accel.stage import versions
from accel.verify.data import Dataset

if TYPE_CHECKING:
    import numpy as np

    from accel.bench.paired import BenchReport

# Rounds go on for this long while an interval is wide: on a noisy machine nothing would seem faster otherwise.
_BENCH_SECONDS = 20.0


def bench_feeds(src: Artifact, dataset: Dataset | None, sizes: Mapping[str, int] | None) -> dict[str, np.ndarray]:
    """What is timed: a sample of the data, cut or repeated to ``sizes``, or random inputs of that shape."""
    if dataset is None:
        return src.signature.example_inputs(**(sizes or {}))
    first = next(iter(dataset.batches(1)))
    if not sizes:
        return first
    return dataset.shaped({**src.signature.check_feeds(first), **src.signature.known(sizes)})


def measured(
    source: CandidateResult,
    rows: list[CandidateResult],
    feeds: Mapping[str, np.ndarray],
    threads: int,
    rounds: int,
    cache: StageCache,
) -> Mapping[str, Any]:
    """Time the source and the candidates beside one another; the figures of an identical run come from the cache."""
    from accel.bench.environment import environment as machine
    from accel.bench.paired import Candidate, measure

    candidates = []
    for row in (source, *rows):
        assert row.artifact is not None
        candidates.append(Candidate(name=row.name, artifact=row.artifact, runtime=row.runtime, options=row.options))
    key = text_sha256(
        canonical_json(
            {
                "candidates": [
                    [c.name, c.artifact.digest, c.runtime, str(sorted(c.options.items()))] for c in candidates
                ],
                "feeds": {name: text_sha256(value.tobytes().hex()) for name, value in feeds.items()},
                "rounds": [rounds, _BENCH_SECONDS],
                "machine": machine(threads=threads, date=False),
                "versions": versions(("torch", "onnxruntime", "openvino")),
            }
        )
    )
    found = cache.get_record("measurement", key)
    if found is None:
        result: BenchReport = measure(candidates, feeds, rounds=rounds, budget_seconds=_BENCH_SECONDS)
        found = result.to_json()
        cache.put_record("measurement", key, found)
    else:
        report("measure: cached", 1.0)
    by_name = {r["name"]: r for r in found["results"]}
    for row in (source, *rows):
        row.measured = by_name[row.name]
        if row.measured.get("error"):
            row.status, row.reason = "rejected", str(row.measured["error"])
    return {**found["environment"], "sizes": found.get("sizes"), "noise_floor": found.get("noise_floor")}
