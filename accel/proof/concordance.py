"""Measures the agreement of outputs sample by sample, because samples with large values dominate a norm over all
samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.tables.limits import ROUNDING

from .compare import holds_floats

if TYPE_CHECKING:
    import numpy as np

# If a sample's norm is below this fraction of the largest sample's norm, the sample may consist of float32 rounding
# errors.
_NOISE = 1e-6


def sample_errors(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Returns the relative error ||candidate - reference||₂ / ||reference||₂ of each sample (axis 0), as
    float64[samples].

    The denominator is at least ``_NOISE`` times the norm of the largest sample. If the whole reference is zero, the
    error is 0 for a zero sample and infinity for any other sample.
    """
    import numpy as np

    ref, got = _rows(reference), _rows(candidate)
    apart, norms = np.linalg.norm(got - ref, axis=1), np.linalg.norm(ref, axis=1)
    size = np.maximum(norms, _NOISE * norms.max(initial=0.0))
    return np.where(size == 0, np.where(apart == 0, 0.0, np.inf), apart / np.where(size == 0, 1.0, size))


def discordance(
    reference: Sequence[np.ndarray], candidate: Sequence[np.ndarray], *, about_the_mean: bool = True
) -> float:
    """Returns the distance between the candidate's and the reference's batches of one output. The distance of equal
    batches is 0, and the distance of unrelated batches is 1. The distance is the mean of 1 - c over the samples (axis
    0), where c = 2⟨a, b⟩ / (||a||₂² + ||b||₂²) is the concordance of a sample a and its reference b. If both norms are
    equal, the concordance is the cosine similarity. If the norms differ, the concordance is smaller than the cosine
    similarity.

    A sample with only one number has no direction. For samples of one number, the result is the larger of two
    distances: the median of 1 - c over the samples, and Lin's distance over all samples. Lin's distance is 1 - l, where
    l = 2 cov / (σ_a² + σ_b² + (μ_a - μ_b)²) is Lin's coefficient (Lin 1989, Biometrics 45). Lin's coefficient detects
    errors in an output that varies little compared with its size. With ``about_the_mean=False``, the concordance over
    all samples replaces Lin's coefficient. Callers pass ``about_the_mean=False`` for random inputs, because the
    variation of outputs on random inputs is meaningless. For strings, and for samples of one integer, the distance is
    the share of values that differ.
    """
    import numpy as np

    pairs = [pair for pair in zip(reference, candidate, strict=True) if pair[0].size]
    if not pairs:  # such as the boxes of images without objects
        return 0.0
    reference, candidate = zip(*pairs, strict=True)
    one_number = all(value.ndim and value.size == len(value) for value in reference)
    if reference[0].dtype.kind in "OUS" or (one_number and not holds_floats(reference[0])):
        return float(np.concatenate([(a != b).ravel() for a, b in pairs]).mean())
    if not one_number:
        return float(np.concatenate([_discordances(_rows(a), _rows(b)) for a, b in pairs]).mean())
    a, b = (np.concatenate([_rows(value) for value in values]) for values in (reference, candidate))
    middle = float(np.median(_discordances(a, b, floor=_NOISE * float(np.abs(a).max()))))
    if about_the_mean and a.std() > ROUNDING * np.sqrt((a**2).mean()):
        both = a.var() + b.var() + (a.mean() - b.mean()) ** 2
        return max(middle, 1 - 2 * float(((a - a.mean()) * (b - b.mean())).mean() / both))
    return max(middle, float(_discordances(a.T, b.T)[0]))


def _rows(value: np.ndarray) -> np.ndarray:
    """Returns ``value`` as float64[samples, numbers]. Values that aren't finite become 0 here, because ``compare``
    already checks them."""
    import numpy as np

    wide = value.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0.0).reshape(len(value) if value.ndim else 1, math.prod(value.shape[1:]))


def _discordances(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Returns ||a - b||² / (||a||² + ||b||²) of each row as float64[rows], with 0 for two zero rows.

    The denominator is at least ``floor``².
    """
    import numpy as np

    both = np.maximum((a**2).sum(axis=1) + (b**2).sum(axis=1), floor**2)
    found: np.ndarray = ((a - b) ** 2).sum(axis=1) / np.where(both == 0, 1.0, both)
    return found
