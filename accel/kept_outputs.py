"""Keeps the outputs of recent runs of models in memory.

The export of a model runs the same model on the same inputs in several places: when its outputs are discovered, in the
gate of each stage, and when its candidates are judged.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

_MOST_BYTES = 1 << 29
_lock = threading.Lock()  # threads can export at the same time


class Run(NamedTuple):
    """Identifies a run by the sha256 of the model, the name of the runtime and the sha256 of the inputs."""

    model: str
    runtime: str
    inputs: str

    @classmethod
    def of(cls, model: str, runtime: str, feeds: Mapping[str, np.ndarray]) -> Run:
        """Returns the run of the model with the sha256 ``model`` on ``feeds``."""
        digest = hashlib.sha256()
        for name, value in feeds.items():
            # The hash covers shapes and dtypes, because feeds of equal bytes may differ in shape or dtype.
            digest.update(f"{name} {value.dtype} {value.shape} ".encode() + value.tobytes())
        return cls(model, runtime, digest.hexdigest())


class _Kept:
    """Maps each run to its outputs. The run that was used last is the last in the order."""

    def __init__(self) -> None:
        self.outputs: OrderedDict[Run, dict[str, np.ndarray]] = OrderedDict()
        self._bytes = 0

    def put(self, run: Run, outputs: dict[str, np.ndarray]) -> None:
        """Adds ``outputs``, and drops the oldest outputs if all of them take more than 512 MiB."""
        self.take(run)
        self.outputs[run] = outputs
        self._bytes += _size(outputs)
        while self._bytes > _MOST_BYTES:
            self.take(next(iter(self.outputs)))

    def take(self, run: Run) -> dict[str, np.ndarray] | None:
        """Removes the outputs of ``run`` and returns them, or None if they aren't kept."""
        outputs = self.outputs.pop(run, None)
        self._bytes -= _size(outputs or {})
        return outputs


def _size(outputs: Mapping[str, np.ndarray]) -> int:
    return sum(value.nbytes for value in outputs.values())


_kept = _Kept()


def find(run: Run) -> dict[str, np.ndarray] | None:
    """Returns the outputs of ``run``, or None if they aren't kept."""
    with _lock:
        if run in _kept.outputs:
            _kept.outputs.move_to_end(run)
        return _kept.outputs.get(run)


def keep(run: Run, outputs: dict[str, np.ndarray]) -> None:
    """Keeps ``outputs``. Drops the oldest outputs if all kept outputs take more than 512 MiB."""
    with _lock:
        _kept.put(run, outputs)


def forget() -> None:
    """Drops all outputs."""
    with _lock:
        for run in list(_kept.outputs):
            _kept.take(run)


def rename(model: str, digest: str, names: Sequence[str]) -> None:
    """Keeps the outputs of the model that was called ``model`` until its sha256 ``digest`` was known. ``names`` are the
    names of the outputs, in order."""
    with _lock:
        for run in [run for run in _kept.outputs if run.model == model]:
            outputs = _kept.take(run)
            if outputs is not None and len(outputs) == len(names):
                _kept.put(run._replace(model=digest), dict(zip(names, outputs.values(), strict=True)))
