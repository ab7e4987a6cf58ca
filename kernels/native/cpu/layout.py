"""Packs weights of ONNX Runtime's MatMulNBits for the CPU kernels.

``MatMulNBits`` has the weights of each output one after the other. The kernels add to 16 outputs at once, so the packed
form takes 4 bytes of each of 16 outputs, one after the other. The bytes themselves don't change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.errors import BadFeeds

Array = npt.NDArray[np.generic]

LANES = 16  # outputs that are packed together
BLOCKS = (32, 64, 128, 256)  # numbers of weights that may have a common scale
ZERO_POINTS = {4: 8, 8: 128}  # by the bits of a weight
_LARGEST_EXPONENT = 15  # of the scales in fp16. A scale of 2**-29 of the largest is rounded by at most 2**-11.


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Matrices in the packed form. The matrices share their inputs, and are packed one after the other.

    ``weights`` is uint8 [groups, k * bits / 32, 16, 4] and ``scales`` is fp16 [groups, k / block, 16], where k is a
    multiple of ``block`` and a group is 16 outputs. ``sizes`` has the number of outputs of each matrix. The last group
    of a matrix is filled with zeros. ``k`` is the number of inputs that are used. The scales are to be multiplied by
    ``gain``, a power of two, because the range of fp16 is small.
    """

    weights: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    sizes: tuple[int, ...]
    k: int
    bits: int
    block: int
    gain: float


def pack(
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    *,
    k: int,
    bits: int,
    sizes: Sequence[int] | None = None,
) -> Packed:
    """Packs ``weights`` [outputs, blocks, bytes of a block] with ``scales`` [outputs, blocks] of a MatMulNBits without
    zero points. ``sizes`` splits the outputs into matrices, and is one matrix by default.

    Raises ``BadFeeds`` if the bits, the block or the shapes don't fit, or a scale isn't finite.
    """
    outputs, blocks, row = weights.shape
    block = row * 8 // bits if bits in ZERO_POINTS else 0
    parts = tuple(sizes or (outputs,))
    if block not in BLOCKS:
        raise BadFeeds(f"blocks of {block} weights of {bits} bits aren't supported; use 4 or 8 bits and blocks of 32")
    if scales.size != outputs * blocks or sum(parts) != outputs or not 0 < k <= blocks * block or min(parts) < 1:
        raise BadFeeds(f"the weights {weights.shape}, the scales {scales.shape}, k={k} and sizes={parts} don't fit")
    if not np.isfinite(scales).all():
        raise BadFeeds("a scale is infinite or NaN; quantize the weights again")
    gain = 2.0 ** (math.frexp(float(np.abs(scales).max()))[1] - _LARGEST_EXPONENT)
    dwords = weights.reshape(outputs, -1, 4)
    by_output = (scales.reshape(outputs, blocks).astype(np.float64) / gain).astype(np.float16)
    ends = np.cumsum(parts)
    packed = [
        (_turned(dwords[end - n : end]), _turned(by_output[end - n : end])) for n, end in zip(parts, ends, strict=True)
    ]
    return Packed(
        weights=np.concatenate([one for one, _ in packed]),
        scales=np.concatenate([one for _, one in packed]),
        sizes=parts,
        k=k,
        bits=bits,
        block=block,
        gain=gain,
    )


def _turned(rows: Array) -> Array:
    """Returns [groups, columns, 16, ...] of ``rows`` [outputs, columns, ...], filled with zeros."""
    filled = np.zeros((-(-len(rows) // LANES) * LANES, *rows.shape[1:]), rows.dtype)
    filled[: len(rows)] = rows
    return np.ascontiguousarray(filled.reshape(-1, LANES, *rows.shape[1:]).swapaxes(1, 2))


def quantize(matrix: npt.NDArray[np.float32], *, bits: int, block: int) -> tuple[npt.NDArray[np.uint8], Array]:
    """Quantizes ``matrix`` [outputs, k] as MatMulNBits has it, [outputs, blocks, bytes of a block], with the scale
    max|w| / 7 or max|w| / 127 of each block. Returns the weights and the scales."""
    outputs, k = matrix.shape
    blocks = -(-k // block)
    filled = np.zeros((outputs, blocks * block), np.float32)
    filled[:, :k] = matrix
    filled = filled.reshape(outputs, blocks, block)
    most = 2 ** (bits - 1) - 1
    scales = (np.abs(filled).max(axis=2) / most).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    q = np.clip(np.rint(filled / safe[..., None]), -most, most).astype(np.int32) + ZERO_POINTS[bits]
    if bits == 4:
        q = q[..., ::2] | q[..., 1::2] << 4
    return q.astype(np.uint8), scales
