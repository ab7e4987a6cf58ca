"""Collects statistics of a model's tensors on real data, batch by batch. Memory does not grow with the number of
samples.

The statistics are saved from time to time, so that a killed calibration can continue.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx

from accel.artifact import beside
from accel.runtimes.onnx_rounded import RoundedModel, in_chunks

from .histogram import BINS, Histogram

if TYPE_CHECKING:
    Feeds = Mapping[str, np.ndarray]

# ``batches(skip)`` leaves out the first ``skip`` batches and yields the others.
Batches = Callable[[int], Iterator["Feeds"]]

_SAVE_SECONDS = 10.0

# The approximate limit in bytes for the activations that one run of the model returns.
_CHUNK_BYTES = 1 << 29


class Collector(Protocol):
    """Collects statistics batch by batch. ``state`` returns the statistics as arrays, and ``restore`` takes these
    arrays."""

    def add(self, feeds: Feeds) -> None: ...

    def state(self) -> dict[str, np.ndarray]: ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...


def collect(collector: Collector, batches: Batches, unfinished: Path | None = None) -> None:
    """Adds every batch to ``collector``.

    Saves the state of ``collector`` to the file ``unfinished`` every ten seconds. If the file exists, the collection
    continues after the last batch in the file.
    """
    done = _resume(collector, unfinished)
    saved = time.monotonic()
    for feeds in batches(done):
        collector.add(feeds)
        done += 1
        if unfinished is not None and time.monotonic() - saved >= _SAVE_SECONDS:
            _save(collector, done, unfinished)
            saved = time.monotonic()


def _save(collector: Collector, done: int, path: Path) -> None:
    arrays: dict[str, Any] = {"done": np.array(done), **collector.state()}
    with beside(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)


def _resume(collector: Collector, path: Path | None) -> int:
    """Restores ``collector`` from the file ``path``, and returns the number of batches in the file.

    Detects a damaged file by the checksums of the zip archive, and ignores the file.
    """
    if path is None or not path.is_file():
        return 0
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            state = {name: archive[name] for name in archive.files}
        done = int(state.pop("done"))
        collector.restore(state)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return 0
    return done


class Histograms:
    """Collects histograms of the tensors ``names``, which are inputs or outputs of nodes of ``model``."""

    def __init__(self, model: onnx.ModelProto, names: Sequence[str]) -> None:
        self._model = model
        self._plain = RoundedModel(model)
        self._chunks: dict[tuple[Any, ...], list[list[str]]] = {}  # maps input shapes to the tensors of each run
        made = set(self._plain.tensors)
        self._inner = [name for name in names if name in made]
        self.found = {name: Histogram() for name in names}

    def add(self, feeds: Feeds) -> None:
        for name in self.found.keys() & feeds.keys():
            self.found[name].add(feeds[name])
        shapes = tuple(value.shape for value in feeds.values())
        if shapes not in self._chunks:
            self._chunks[shapes] = list(in_chunks(self._model, self._inner, feeds, _CHUNK_BYTES))
        for names in self._chunks[shapes]:
            for name, value in self._plain.run(feeds, names).items():
                self.found[name].add(value)

    def state(self) -> dict[str, np.ndarray]:
        return {
            "names": np.array(list(self.found)),
            "counts": np.stack([h.counts for h in self.found.values()]),
            "rows": np.stack([h.to_row() for h in self.found.values()]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        counts, rows = state["counts"], state["rows"]
        if list(state["names"]) != list(self.found) or counts.shape != (len(self.found), BINS):
            raise ValueError("the state belongs to another model")
        for index, name in enumerate(self.found):
            self.found[name] = Histogram.from_row(counts[index], rows[index])
