"""Counts the requests and runs of a model, so that the counts add up at any time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from ..protocol.inference import Code, Durations, DurationStatistic, ModelStatistics, ServeError


class Recorder:
    """Fills a ``ModelStatistics``. The recorder is not thread-safe, so the owner has to hold a lock.

    A canceled request also counts as failed, so that success + fail = received. The batch statistics count the
    successful runs for each number of real rows. Therefore ``inference_count`` is the sum of ``rows * runs`` over the
    batch statistics.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.figures = ModelStatistics()

    def received(self) -> None:
        """Counts a received request."""
        self.figures.received += 1

    def succeeded(self, durations: Durations) -> None:
        """Counts a request that was answered by a run of the model."""
        figures = self.figures
        figures.success.add(durations.total)
        figures.queue.add(durations.queue)
        figures.compute_input.add(durations.compute_input)
        figures.compute_infer.add(durations.compute_infer)
        figures.compute_output.add(durations.compute_output)
        figures.request_times.add(durations.total)
        figures.queue_times.add(durations.queue)
        figures.compute_times.add(durations.compute_input + durations.compute_infer + durations.compute_output)

    def found(self, ns: int) -> None:
        """Counts a request that was answered from the cache, ``ns`` nanoseconds after arrival."""
        self.figures.received += 1
        self.figures.success.add(ns)
        self.figures.cache_hit.add(ns)
        self.figures.request_times.add(ns)

    def failed(self, error: ServeError, ns: int) -> None:
        """Counts a request that was answered with ``error``, ``ns`` nanoseconds after arrival."""
        self.figures.fail.add(ns)
        if error.code is Code.CANCELLED:
            self.figures.cancel.add(ns)

    def spoiled(self, durations: Durations | None) -> None:
        """Counts a request as failed although another recorder has already counted it as a success. Subtracts the
        counted success and its ``durations``, so that both recorders together have the right counts."""
        total = 0 if durations is None else durations.total
        self.figures.success.add(-total, -1)
        self.figures.fail.add(total)
        if durations is not None:
            self.figures.request_times.add(total, -1)

    def executed(self, rows: int, durations: Durations, padded: int = 0, real: int = 0) -> None:
        """Counts a run. ``rows`` is the number of real rows, ``padded`` is the number of padding positions, and
        ``real`` is the number of positions that callers sent."""
        figures = self.figures
        figures.padded_tokens += padded
        figures.real_tokens += real
        figures.execution_count += 1
        figures.inference_count += rows
        figures.last_inference_ms = int(self._wall() * 1000)
        row = figures.batches.get(rows)
        if row is None:
            row = figures.batches[rows] = (DurationStatistic(), DurationStatistic(), DurationStatistic())
        row[0].add(durations.compute_input)
        row[1].add(durations.compute_infer)
        row[2].add(durations.compute_output)

    def copy(self, queue_depth: int = 0) -> ModelStatistics:
        """Returns a copy of the current statistics."""
        found = copy.deepcopy(self.figures)
        found.queue_depth = queue_depth
        return found


def ns(seconds: float) -> int:
    """Returns ``seconds`` in whole nanoseconds, at least 0."""
    return max(0, round(seconds * 1e9))


def merged(inner: ModelStatistics, outer: ModelStatistics) -> ModelStatistics:
    """Adds the statistics of a wrapper (``outer``) to the statistics of the wrapped executor (``inner``). Returns
    ``inner``."""
    inner.add(outer)
    return inner
