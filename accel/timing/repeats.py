"""Repeats the blocks that other work spoiled, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable

from .blocks import Block

# A block is spoiled if other work took more than this share of the cores that its process could use. Background
# services of an otherwise idle machine take about 1%.
SPOILED = 0.05
# A spoiled block is repeated at most this often.
_MOST = 2
# If this many repeats in a row were spoiled too, the other work goes on all the time, and repeats only cost time.
_IN_VAIN = 4


class Repeats:
    """Times blocks, and times spoiled blocks again until ``seconds`` are used up.

    Whether a block counts is decided by the time that the process waited for cores, never by the time of its runs, so
    that fast blocks aren't preferred. ``count`` is the number of blocks that were timed again.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._left, self._clock, self._in_vain = seconds, clock, 0

    def best_of(self, timed: Callable[[], Block]) -> Block:
        """Returns the least disturbed of the blocks that ``timed`` returns."""
        best = timed()
        for _ in range(_MOST):
            if best.lost <= SPOILED:
                self._in_vain = 0
                break
            if self._left <= 0 or self._in_vain >= _IN_VAIN:
                break
            begun = self._clock()
            best = min(best, timed(), key=lambda block: block.lost)
            self._left -= self._clock() - begun
            self.count += 1
            self._in_vain = 0 if best.lost <= SPOILED else self._in_vain + 1
        return best
