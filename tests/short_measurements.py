"""Shortens the measurements of ``accel optimize``, because no test needs precise times. ``accel optimize`` otherwise
measures extra rounds for up to 30 s to narrow its confidence intervals.

``python -m tests.short_measurements FILE`` runs the script FILE with short measurements.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

_SECONDS = {
    "accel.optimizer.search._BLOCK_SECONDS": 0.02,
    "accel.api.optimized._SECONDS": 0.0,
    "accel.api.optimized._BLOCK_SECONDS": 0.02,
    "accel.optimizer.search._SECONDS_OF_CANDIDATES": 0.5,
    "accel.optimizer.search._SECONDS_OF_OPTIONS": 0.5,
    "accel.optimizer.budget.IMPROVING_SECONDS": 600.0,
}


def shorten(patch: pytest.MonkeyPatch) -> None:
    for name, seconds in _SECONDS.items():
        patch.setattr(name, seconds)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as with ``python FILE``
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        runpy.run_path(sys.argv[0], run_name="__main__")
