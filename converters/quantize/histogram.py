"""Counts values in histograms whose range grows with the data, and computes quantization ranges from the counts.

A tensor's values are counted in ``BINS`` bins of equal width over [-2**e, 2**e). If a value is at least 2**e or below
-2**e, e grows and neighboring bins are merged. All bin widths are powers of two, so merged bins give the same counts as
a histogram that starts with the final range. The counts therefore don't depend on the order and the size of the
batches. The range from ``minmax`` is exact. ``percentile``, ``entropy`` and ``mse`` compute the range from the bins.
The width of a bin is at most 1/2048 of the largest absolute value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

BINS = 8192
_HALF = BINS // 2

# The largest number of values that are counted at a time. A limit is needed, because counting copies the values.
_PIECE = 1 << 18

_INT8_STEPS = 255  # number of steps from the lowest to the highest 8-bit value
_ENTROPY_LEVELS = 128


@dataclass
class Histogram:
    """Counts the values of one tensor. ``exponent`` is None until the first nonzero value. ``zeros`` counts the
    values that are exactly 0. ``nonfinite`` counts infinities and NaN, which the bins leave out."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    exponent: int | None = None
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0
    nonfinite: int = 0

    def add(self, values: np.ndarray) -> None:
        """Counts ``values`` (any shape)."""
        flat = values.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            self._add(flat[start : start + _PIECE])

    def _add(self, piece: np.ndarray) -> None:
        low, high = float(piece.min()), float(piece.max())
        if not math.isfinite(low) or not math.isfinite(high):
            finite = piece[np.isfinite(piece)]
            self.nonfinite += piece.size - finite.size
            if not finite.size:
                return
            piece, low, high = finite, float(finite.min()), float(finite.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.zeros += int(piece.size - np.count_nonzero(piece))
        largest = max(abs(low), abs(high))
        if not largest:
            self.counts[_HALF] += piece.size
            return
        exponent = math.frexp(largest)[1]  # largest < 2**exponent
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self._widen(exponent)
        # The values are multiplied by a power of two, so the products are exact in float64, even for the smallest
        # values.
        scaled = piece.astype(np.float64) * math.ldexp(_HALF, -self.exponent)
        index = np.floor(scaled, out=scaled).astype(np.int32) + _HALF
        self.counts += np.bincount(index, minlength=BINS)

    def _widen(self, exponent: int) -> None:
        assert self.exponent is not None
        for _ in range(min(exponent - self.exponent, BINS.bit_length())):
            merged = np.zeros(BINS, np.int64)
            merged[_HALF // 2 : _HALF // 2 + _HALF] = self.counts.reshape(_HALF, 2).sum(axis=1)
            self.counts = merged
        self.exponent = exponent

    @property
    def edges(self) -> np.ndarray:
        """Returns the edges of the bins, float64[BINS + 1]."""
        return (np.arange(BINS + 1) - _HALF) * math.ldexp(1 / _HALF, self.exponent or 0)

    def to_row(self) -> np.ndarray:
        """Returns all fields except the counts, as float64[5]."""
        exponent = math.nan if self.exponent is None else self.exponent
        return np.array([exponent, self.low, self.high, self.zeros, self.nonfinite], np.float64)

    @classmethod
    def from_row(cls, counts: np.ndarray, row: np.ndarray) -> Histogram:
        exponent, low, high, zeros, nonfinite = map(float, row)
        known = None if math.isnan(exponent) else int(exponent)
        return cls(counts.astype(np.int64), known, low, high, int(zeros), int(nonfinite))


def value_range(
    found: Histogram, method: str, *, percentile: float = 99.999, symmetric: bool = False
) -> tuple[float, float]:
    """Returns the lowest and the highest value to represent in 8 bits. If ``symmetric``, lowest = -highest.

    ``minmax`` takes the range of all values. The method ``percentile`` cuts off equal shares of the values on both
    sides, so that the percentage in the argument ``percentile`` remains. ``entropy`` takes the range [-t, t] in which
    rounding the absolute values to 128 levels causes the least Kullback-Leibler divergence (Migacz, "8-bit inference
    with TensorRT", GTC 2017). ``mse`` takes the range with the least sum of squared errors. For a value inside the
    range, the squared error is step**2 / 12, the mean squared rounding error. For a value outside the range, the
    squared error is the squared distance to the range.
    """
    if found.exponent is None:  # only zeros, or no values
        return 0.0, 0.0
    if method == "minmax":
        low, high = found.low, found.high
    elif method == "percentile":
        low, high = _percentile(found, percentile, symmetric)
    elif method == "entropy":
        top = _entropy(found)
        low, high = max(found.low, -top), min(found.high, top)
    else:
        low, high = _least_squares(found, symmetric)
    if symmetric:
        top = max(abs(low), abs(high))
        return -top, top
    return low, high


def _percentile(found: Histogram, percentile: float, symmetric: bool) -> tuple[float, float]:
    if symmetric:
        top = _quantile(_absolute(found), found.edges[_HALF:], percentile / 100)
        return -top, min(top, max(abs(found.low), abs(found.high)))
    outside = (100 - percentile) / 200
    low, high = (_quantile(found.counts, found.edges, q) for q in (outside, 1 - outside))
    return max(low, found.low), min(high, found.high)


def _quantile(counts: np.ndarray, edges: np.ndarray, share: float) -> float:
    """Returns the quantile ``share`` of the counted values, assuming that values spread evenly within a bin."""
    below = np.concatenate([[0], np.cumsum(counts)]) / counts.sum()
    return float(np.interp(share, below, edges))


def _absolute(found: Histogram) -> np.ndarray:
    """Returns the counts of the absolute values, one count for each bin above 0."""
    return np.asarray(found.counts[_HALF:] + found.counts[:_HALF][::-1])


def _entropy(found: Histogram) -> float:
    counts = _absolute(found)
    counts[0] -= found.zeros  # zeros have no error, because every range represents 0 exactly
    counts = counts.reshape(-1, 2).sum(axis=1).astype(np.float64)
    width = 2 * float(found.edges[_HALF + 1])
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    best, top = math.inf, last
    for stop in range(_ENTROPY_LEVELS, last + 1, 4):
        divergence = _divergence(counts[:stop], float(counts[stop:].sum()))
        if divergence < best:
            best, top = divergence, stop
    return top * width


def _divergence(inside: np.ndarray, outside: float) -> float:
    """Returns the divergence between the counts ``inside`` and the same counts merged into ``_ENTROPY_LEVELS`` levels.

    ``outside`` is the number of values beyond the last bin. Before the merge, ``outside`` is added to the last bin.
    """
    wanted = inside.copy()
    wanted[-1] += outside
    starts = np.arange(_ENTROPY_LEVELS) * (inside.size // _ENTROPY_LEVELS)
    filled = inside > 0
    sums, users = np.add.reduceat(inside, starts), np.add.reduceat(filled.astype(np.float64), starts)
    lengths = np.diff(np.append(starts, inside.size))
    kept = np.where(filled, np.repeat(sums / np.maximum(users, 1), lengths), 0.0)
    p, q = _smoothed(wanted), _smoothed(kept)
    if p is None or q is None:
        return math.inf
    return float(np.sum(p * np.log(p / q)))


def _smoothed(counts: np.ndarray) -> np.ndarray | None:
    """Moves a small share of ``counts`` to each empty bin, because an empty bin would make the divergence infinite.
    Then divides the counts by their sum.

    Returns None if all counts are zero, or if a count is too small to move a share to the empty bins.
    """
    empty = counts == 0
    filled = counts.size - int(empty.sum())
    if not filled:
        return None
    little = 1e-4
    moved = np.where(empty, little, counts - little * (counts.size - filled) / filled)
    if (moved <= 0).any():
        return None
    return np.asarray(moved / moved.sum())


def _least_squares(found: Histogram, symmetric: bool) -> tuple[float, float]:
    shrunk = 2.0 ** (-np.arange(11 * 16) / 16)  # factors down to 2**-11, because smaller ranges lie within one bin
    if symmetric:
        top = max(abs(found.low), abs(found.high))
        errors = [_squared_error(found, np.array([-t]), np.array([t]))[0, 0] for t in shrunk * top]
        best = float(shrunk[int(np.argmin(errors))] * top)
        return -best, best
    lows = shrunk * found.low if found.low < 0 else np.zeros(1)
    highs = shrunk * found.high if found.high > 0 else np.zeros(1)
    at = np.unravel_index(int(np.argmin(_squared_error(found, lows, highs))), (lows.size, highs.size))
    return float(lows[at[0]]), float(highs[at[1]])


def _squared_error(found: Histogram, lows: np.ndarray, highs: np.ndarray) -> np.ndarray:
    """Returns the sum of the squared errors of all values, for each combination of a low end in ``lows`` and a high end
    in ``highs``. The shape of the result is (lows, highs)."""
    edges = found.edges
    centers = (edges[:-1] + edges[1:]) / 2
    counts = found.counts.astype(np.float64)

    def beyond(ends: np.ndarray, upwards: bool) -> tuple[np.ndarray, np.ndarray]:
        """For each end of a range, returns the number of values beyond this end, and the sum of their squared distances
        to this end."""
        outside = centers > ends[:, None] if upwards else centers < ends[:, None]
        distances = np.square(centers - ends[:, None])
        return outside @ counts, (outside * distances) @ counts

    below, cut_low = beyond(lows, upwards=False)
    above, cut_high = beyond(highs, upwards=True)
    # Zero is exactly representable, so zeros have no error.
    inside = np.maximum(counts.sum() - found.zeros - below[:, None] - above[None, :], 0)
    steps = (highs[None, :] - lows[:, None]) / _INT8_STEPS
    return np.asarray(inside * np.square(steps) / 12 + cut_low[:, None] + cut_high[None, :])
