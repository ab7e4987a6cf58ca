"""Predicts whether a run of a model fits into the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel.machine import available_memory

if TYPE_CHECKING:
    import numpy as np

# A run may take this share of the free memory. A runtime may allocate twice the memory that it needs.
_SHARE = 0.5


class MemoryRoom:
    """Predicts the memory of a run from the memory that this process took in earlier, smaller runs of the same model.

    The prediction is proportional to the number of elements in the feeds. Runtimes keep the memory of a run for the
    next run, so the memory that the process took before counts as free.
    """

    def __init__(self) -> None:
        self._first, self._largest = 0, 1
        self._bytes_per_element = 0.0

    def opened(self) -> None:
        """Marks the start of a session, which has not yet taken memory for runs."""
        self._first, self._largest = _resident(), 1

    @contextmanager
    def watched(self, feeds: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Notes the memory that this process takes in the ``with`` block, which runs the model on ``feeds``."""
        yield
        self._largest = max(self._largest, _elements(feeds))
        self._bytes_per_element = max(self._bytes_per_element, (_resident() - self._first) / self._largest)

    def lacks(self, feeds: Mapping[str, np.ndarray]) -> str:
        """Returns the reason why a run on ``feeds`` is too large for this machine, or "" if the run fits."""
        free, needed = available_memory(), self._bytes_per_element * _elements(feeds)
        if free is None or needed - max(0, _resident() - self._first) <= _SHARE * free:
            return ""
        return f"not run: it needs about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def _elements(feeds: Mapping[str, np.ndarray]) -> int:
    return max(1, sum(value.size for value in feeds.values()))


def _resident() -> int:
    """Returns the resident memory of this process in bytes, or 0 if it is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
