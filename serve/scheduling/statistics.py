"""Counts the requests and runs of a model, so that the counts add up at any time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from ..protocol.inference import Code, Durations, DurationStatistic, ModelStatistics, ServeError

_MOST_UNCOUNTED = 256


class Recorder:
    """Fills a ``ModelStatistics``. The recorder is not thread-safe, so the owner has to hold a lock.

    Answered requests are collected and counted together, because adding up a list takes less time than adding each
    duration to each figure.

    A canceled request also counts as failed, so that success + fail = received. The batch statistics count the
    successful runs for each number of real rows. Therefore ``inference_count`` is the sum of ``rows * runs`` over the
    batch statistics.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._figures = ModelStatistics()
        self._uncounted: list[Durations] = []

    @property
    def figures(self) -> ModelStatistics:
        """Returns the statistics up to now."""
        if self._uncounted:
            self._count()
        return self._figures

    def received(self) -> None:
        """Counts a received request."""
        self._figures.received += 1

    def succeeded(self, durations: Durations) -> None:
        """Counts a request that was answered by a run of the model. ``durations`` must not change afterwards."""
        self._uncounted.append(durations)
        if len(self._uncounted) >= _MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        spent, self._uncounted = self._uncounted, []
        figures, count = self._figures, len(spent)
        totals = [one.total for one in spent]
        queues = [one.queue for one in spent]
        inputs = [one.compute_input for one in spent]
        runs = [one.compute_infer for one in spent]
        outputs = [one.compute_output for one in spent]
        figures.success.add(sum(totals), count)
        figures.queue.add(sum(queues), count)
        figures.compute_input.add(sum(inputs), count)
        figures.compute_infer.add(sum(runs), count)
        figures.compute_output.add(sum(outputs), count)
        figures.request_times.extend(totals)
        figures.queue_times.extend(queues)
        figures.compute_times.extend(list(map(sum, zip(inputs, runs, outputs, strict=True))))

    def found(self, ns: int) -> None:
        """Counts a request that was answered from the cache, ``ns`` nanoseconds after arrival."""
        self.figures.received += 1
        self.figures.success.add(ns)
        self.figures.cache_hit.add(ns)
        self.figures.request_times.add(ns)

    def failed(self, error: ServeError, ns: int) -> None:
        """Counts a request that was answered with ``error``, ``ns`` nanoseconds after arrival."""
        self._figures.fail.add(ns)
        if error.code is Code.CANCELLED:
            self._figures.cancel.add(ns)

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
        figures = self._figures
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
