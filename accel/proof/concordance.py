"""How well outputs agree sample by sample: a norm over many samples is that of the largest ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.verify.compare import ROUNDING, holds_floats

if TYPE_CHECKING:
    import numpy as np

# What is smaller than the largest sample by this factor, float32 can't tell from that one's rounding.
_NOISE = 1e-6


def sample_errors(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """float64[samples]: ||candidate - reference||₂ / ||reference||₂ of each sample (axis 0) of two arrays of one shape,
    no norm being taken for less than the rounding of the largest; 0 where both are zero, infinite where only the whole
    reference is."""
    import numpy as np

    ref, got = _rows(reference), _rows(candidate)
    apart, norms = np.linalg.norm(got - ref, axis=1), np.linalg.norm(ref, axis=1)
    size = np.maximum(norms, _NOISE * norms.max(initial=0.0))
    return np.where(size == 0, np.where(apart == 0, 0.0, np.inf), apart / np.where(size == 0, 1.0, size))


def discordance(
    reference: Sequence[np.ndarray], candidate: Sequence[np.ndarray], *, about_the_mean: bool = True
) -> float:
    """How badly the batches of one output agree with their reference, 0 for equal ones, 1 for unrelated ones: 1 minus
    the concordance 2⟨a, b⟩ / (||a||₂² + ||b||₂²), which is the cosine similarity where both have one norm, but doesn't
    forgive a wrong scale. The mean over the samples (axis 0).

    A sample that is one number has no direction. There the larger of two counts: the middle sample's, and 1 minus the
    concordance of all of them about their means, Lin's coefficient 2 cov / (σ_a² + σ_b² + (μ_a - μ_b)²) (Lin 1989,
    Biometrics 45), since an output may vary little beside its size. Not ``about_the_mean`` where the inputs are random
    and nothing follows from how the outputs vary. Of whole numbers and strings the share that differs.
    """
    import numpy as np

    pairs = list(zip(reference, candidate, strict=True))
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
    """float64[samples, numbers]. Infinities stand for masked places on both sides (``compare`` checks that they
    match)."""
    import numpy as np

    wide = value.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0.0).reshape(len(value) if value.ndim else 1, -1)


def _discordances(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """float64[rows]: ||a - b||² / (||a||² + ||b||²) of each row, that sum being at least ``floor``²; two that are
    zero agree."""
    import numpy as np

    both = np.maximum((a**2).sum(axis=1) + (b**2).sum(axis=1), floor**2)
    found: np.ndarray = ((a - b) ** 2).sum(axis=1) / np.where(both == 0, 1.0, both)
    return found
