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
_kept: OrderedDict[Run, dict[str, np.ndarray]] = OrderedDict()
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


def find(run: Run) -> dict[str, np.ndarray] | None:
    """Returns the outputs of ``run``, or None if they aren't kept."""
    with _lock:
        if run in _kept:
            _kept.move_to_end(run)
        return _kept.get(run)


def keep(run: Run, outputs: dict[str, np.ndarray]) -> None:
    """Keeps ``outputs``. Drops the oldest outputs if all kept outputs take more than 512 MiB."""
    with _lock:
        _kept[run] = outputs
        while sum(value.nbytes for kept in _kept.values() for value in kept.values()) > _MOST_BYTES:
            _kept.popitem(last=False)


def rename(model: str, digest: str, names: Sequence[str]) -> None:
    """Keeps the outputs of the model that was called ``model`` until its sha256 ``digest`` was known. ``names`` are the
    names of the outputs, in order."""
    with _lock:
        for run in [run for run in _kept if run.model == model]:
            outputs = _kept.pop(run)
            if len(outputs) == len(names):
                _kept[run._replace(model=digest)] = dict(zip(names, outputs.values(), strict=True))
