"""Computes the products of the CPU kernels in NumPy.

The rows are rounded to int8 as the kernels round them, bit by bit. Everything after that is exact in float64, but the
last rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .layout import LANES, ZERO_POINTS, Packed

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

SPAN = 32  # activations that share a scale
SMALLEST = np.float32(1e-30)  # a span of smaller numbers counts as zeros


def quantize_rows(x: Float32, width: int, gain: float = 1.0) -> tuple[npt.NDArray[np.int64], Float32]:
    """Rounds ``x`` [rows, k], filled with zeros to ``width`` columns, to int8. Returns the integers [rows, spans, 32]
    and the scales max|x| / 127 * gain [rows, spans]. The scale is NaN if a span has an infinity or a NaN."""
    filled = np.zeros((len(x), width), np.float32)
    filled[:, : x.shape[1]] = x
    spans = filled.reshape(len(x), width // SPAN, SPAN)
    finite = np.asarray(np.isfinite(spans).all(axis=2))
    spans = np.where(finite[..., None], spans, np.float32(0))
    most = np.abs(spans).max(axis=2)
    counts = most >= SMALLEST
    inverse = np.where(counts, np.float32(127) / np.where(counts, most, np.float32(1)), np.float32(0))
    scales = np.where(finite, most / np.float32(127) * np.float32(gain), np.float32(np.nan)).astype(np.float32)
    return np.rint(spans * inverse[..., None]).astype(np.int64), scales


def unpack(packed: Packed) -> npt.NDArray[np.int64]:
    """Returns the weights without their zero point and scales, [outputs, k], with the outputs of all matrices."""
    groups = packed.weights.shape[0]
    rows = packed.weights.swapaxes(1, 2).reshape(groups * LANES, -1).astype(np.int64)
    if packed.bits == 4:
        rows = np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)
    return rows[_kept(packed)] - ZERO_POINTS[packed.bits]


def _kept(packed: Packed) -> npt.NDArray[np.int64]:
    """Returns the rows that are outputs, because the last group of each matrix is filled up."""
    kept, begin = [], 0
    for size in packed.sizes:
        kept.append(np.arange(begin, begin + size))
        begin += -(-size // LANES) * LANES
    return np.concatenate(kept)


def integer_sums(x: Float32, packed: Packed) -> npt.NDArray[np.int64]:
    """Returns the exact sums of each span, [rows, outputs, spans]."""
    weights = unpack(packed)
    q, _ = quantize_rows(x, weights.shape[1])
    return np.asarray(np.einsum("rsi,nsi->rns", q, weights.reshape(len(weights), q.shape[1], SPAN)))


def product(
    x: Float32, packed: Packed, *, gated: bool = False, residual: Float32 | None = None
) -> tuple[list[Float64], list[Float64]]:
    """Returns the results of ``library.product`` in float64, and a bound on the error of each element.

    A sum of n terms with fused multiply-adds has an error of at most n u times the sum of the magnitudes (Higham,
    Accuracy and Stability, section 3.1), where u is 2**-24. The product of the scales adds one rounding.
    """
    sums = integer_sums(x, packed).astype(np.float64)
    _, scales = quantize_rows(x, packed.weights.shape[1] * 32 // packed.bits, packed.gain)
    by_output = packed.scales.swapaxes(1, 2).reshape(-1, packed.scales.shape[1])[_kept(packed)]
    wide = np.repeat(by_output.astype(np.float64), packed.block // SPAN, axis=1)
    terms = sums * scales.astype(np.float64)[:, None, :] * wide[None]
    whole, bound = terms.sum(axis=2), (terms.shape[2] + 4) * 2.0**-24 * np.abs(terms).sum(axis=2)
    parts, bounds = _split(whole, packed.sizes), _split(bound, packed.sizes)
    if gated:
        (gates, ups), (of_gates, of_ups) = parts, bounds
        activated = 0.5 * gates * (1 + np.tanh(0.5 * gates))
        error = 1.1 * of_gates + 16 * 2.0**-24 * np.abs(activated) + 1e-37
        parts, bounds = [activated * ups], [error * np.abs(ups) + (np.abs(activated) + error) * of_ups]
    if residual is not None:
        parts[0] = parts[0] + residual
    return parts, [bound + 2 * 2.0**-24 * np.abs(part) + 1e-37 for part, bound in zip(parts, bounds, strict=True)]


def _split(array: Float64, sizes: Sequence[int]) -> list[Float64]:
    return np.split(array, np.cumsum(sizes)[:-1], axis=1)
