"""Splits the data into a half for the search and a held-out half that confirms the search's result."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel.proof.data import Dataset
from accel.proof.stream import SampleStream

from ..judge.comparison import BATCH, MOST_BATCHES, Judge, Metric
from ..judge.label_metric import LabelMetric

if TYPE_CHECKING:
    import numpy as np

_NO_METRIC_BY_HALF = "accel can't split the metric's values by sample; keep labels in the data, one for each sample"


@dataclass(frozen=True, kw_only=True)
class Half:
    """A judge and the name of its samples, which is ``search``, ``held out`` or ``all``."""

    name: str
    judge: Judge


def halves(judge: Judge, stack: ExitStack) -> tuple[Half, Half | None, str]:
    """Splits the data, and returns a ``Half`` for the search, a ``Half`` that is held out, and an empty text.

    If the data can't be split, returns a ``Half`` with all samples, None, and the reason. Closing ``stack`` deletes the
    files of both halves.
    """
    whole = Half(name="all", judge=judge)
    if judge.data is None:
        return whole, None, "there is no data"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halves-")))
    folders = (folder / "search", folder / "held out")
    for half in folders:
        half.mkdir()
    if judge.metric is None:
        if not _write_batches(SampleStream(judge.data, judge.source.signature), *folders):
            return whole, None, "the data is one sample"
        search, held_out = (Half(name=half.name, judge=Judge(judge.source, half, None)) for half in folders)
        return search, held_out, ""
    dataset = Dataset.load(judge.data, judge.source.signature)
    count = len(dataset)
    if count < 2:
        return whole, None, "the data is one sample"
    metrics = _metric_by_half(judge.metric, dataset, count // 2)
    if metrics is None:
        return whole, None, _NO_METRIC_BY_HALF
    judges = []
    for half, metric, start, stop in zip(folders, metrics, (0, count // 2), (count // 2, count), strict=True):
        _write(dataset, half, start, stop)
        judges.append(Half(name=half.name, judge=Judge(judge.source, half, metric)))
    return judges[0], judges[1], ""


def _write_batches(stream: SampleStream, first: Path, second: Path) -> bool:
    """Writes batches from the first half of the data to ``first`` and from the second half to ``second``, each batch as
    an .npz file.

    Writes at most ``MOST_BATCHES`` batches to each folder, because a judge reads at most this many batches. Returns
    False if there is only one batch.
    """
    import numpy as np

    size = max(1, min(BATCH, len(stream) // 2))
    count = stream.batch_count(size)
    for folder, start, stop in ((first, 0, count // 2), (second, count // 2, count)):
        batches = itertools.islice(stream.batches(size, skip=start), min(stop - start, MOST_BATCHES))
        for number, feeds in enumerate(batches):
            np.savez(folder / f"{number:06d}.npz", **feeds)  # type: ignore[arg-type]
    return count > 1


def _metric_by_half(metric: Metric, dataset: Dataset, half: int) -> tuple[Metric, Metric] | None:
    """Returns the metric for each half, or None if the arrays that the metric uses can't be split by sample."""
    if isinstance(metric, LabelMetric):
        first, second = (replace(metric, labels=part) for part in (metric.labels[:half], metric.labels[half:]))
        return first, second
    if all(len(value) == len(dataset) for value in dataset.extra().values() if value.ndim) and dataset.extra():
        return metric, metric
    return None


def _write(dataset: Dataset, folder: Path, start: int, stop: int) -> None:
    """Writes the samples from ``start`` to ``stop`` as .npz files. Keeps the order of the samples. Samples from
    different source files stay in different files."""
    import numpy as np

    first = dataset.signature.inputs[0].name
    at = 0
    for number, part in enumerate(dataset.parts):
        count = len(part[first])
        low, high = max(start - at, 0), min(stop - at, count)
        at += count
        if low < high:
            arrays: dict[str, np.ndarray] = {}
            for name, value in part.items():
                arrays[name] = value[low:high] if value.ndim and len(value) == count else value
            np.savez(folder / f"{number:06d}.npz", **arrays)  # type: ignore[arg-type]
