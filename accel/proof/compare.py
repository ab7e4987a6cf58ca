"""Computes the differences between two sets of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel.artifact import finite_json
from accel.errors import UsageError
from accel.signature import Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np


# The reason why some integers have no tolerance. Scores that round differently may change the result of an argmax.
INTEGERS_ALONE = "the model computes these integers from integers alone, so they have to be equal"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one output from its reference.

    ``max_abs`` is the largest absolute difference. ``scale`` is the largest absolute value of the reference. ``rel_l2``
    is ||candidate - reference||₂ / ||reference||₂. ``cosine`` is the smallest cosine similarity of a sample (axis 0)
    with its reference. ``problem`` says why the arrays can't be compared, such as different shapes or a NaN in only one
    array. If the arrays can be compared, ``problem`` is empty.
    """

    output: str
    max_abs: float
    scale: float
    rel_l2: float
    cosine: float
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return finite_json(asdict(self))  # type: ignore[no-any-return]


def difference(output: str, reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """Returns the difference between two arrays, computed in float64. A NaN equals only a NaN at the same index."""
    import numpy as np

    if reference.shape != candidate.shape:
        return _incomparable(output, f"its shape is {list(candidate.shape)}, not {list(reference.shape)}")
    if reference.dtype.kind in "OUS":
        equal = bool((reference == candidate).all())
        return Difference(
            output=output, max_abs=0.0 if equal else 1.0, scale=1.0, rel_l2=0.0 if equal else 1.0, cosine=1.0
        )
    ref, got = reference.astype(np.float64), candidate.astype(np.float64)
    if reference.dtype.kind in "iu" and candidate.dtype.kind in "iu":
        # Beyond 2^53, different integers may have the same float64.
        got = np.where((ref == got) & (reference != candidate), ref + np.maximum(np.spacing(np.abs(ref)), 1), got)
    finite = np.isfinite(ref)
    if not np.array_equal(finite, np.isfinite(got)):
        bad = int((finite & ~np.isfinite(got)).sum())
        return _incomparable(output, f"{bad} values are NaN or infinite where the reference is not")
    if not np.array_equal(ref[~finite], got[~finite], equal_nan=True):
        return _incomparable(output, "its infinities or NaN are not those of the reference")
    ref, got = np.where(finite, ref, 0.0), np.where(finite, got, 0.0)
    return Difference(
        output=output,
        max_abs=float(np.abs(got - ref).max(initial=0.0)),
        scale=float(np.abs(ref).max(initial=0.0)),
        rel_l2=rel_l2(ref, got),
        cosine=float(cosines(ref, got).min()),
    )


def _incomparable(output: str, problem: str) -> Difference:
    inf = float("inf")
    return Difference(output=output, max_abs=inf, scale=0.0, rel_l2=inf, cosine=-1.0, problem=problem)


def rel_l2(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Returns ||candidate - reference||₂ / ||reference||₂ of two finite arrays, computed in float64. Returns 0 if both
    arrays are zero, and infinity if only the reference is zero.
    """
    import numpy as np

    wide = reference.astype(np.float64)
    norm, apart = float(np.linalg.norm(wide)), float(np.linalg.norm(candidate.astype(np.float64) - wide))
    return apart / norm if norm else (0.0 if apart == 0 else float("inf"))


def cosines(ref: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Returns the cosine similarity of two finite arrays of equal shape for each sample (axis 0), as float64[samples].

    A one-dimensional array is one sample. The similarity of two zero samples is 1.
    """
    import numpy as np

    rows = ref.shape[0] if ref.ndim > 1 else 1
    if ref.size == 0:
        return np.ones(1)
    a, b = ref.reshape(rows, -1), got.reshape(rows, -1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = (a * b).sum(axis=1)
    both_zero = (np.linalg.norm(a, axis=1) == 0) & (np.linalg.norm(b, axis=1) == 0)
    return np.where(both_zero, 1.0, dots / np.where(norms == 0, 1.0, norms))


def near_integers(found: Sequence[Difference], reference: Mapping[str, np.ndarray], limit: float) -> set[str]:
    """Returns the names of the outputs that hold integers or bools, and that differ by no more than ``limit``."""
    return {one.output for one in found if 0 < one.rel_l2 <= limit and not holds_floats(reference[one.output])}


def holds_floats(value: np.ndarray) -> bool:
    """Tells whether the values are floats, including bfloat16 and fp8, which NumPy reports as kind V."""
    return value.dtype.kind not in "biuOUS"


def new_output_names(reference: Signature, candidate: Signature) -> dict[str, str]:
    """Maps the candidate's outputs to the reference's outputs in the same place, if their names differ. Returns {} if
    the candidate has all names of the reference.

    Raises ``UsageError`` unless the outputs agree in their number, dtypes and shapes.
    """
    ours, theirs = reference.outputs, candidate.outputs
    names = {spec.name for spec in theirs}
    if all(spec.name in names for spec in ours):
        return {}
    pairs = list(zip(ours, theirs, strict=False))
    kept = all(one.name == other.name for one, other in pairs if one.name in names)
    if len(ours) == len(theirs) and kept and all(_like(one, other) for one, other in pairs):
        return {other.name: one.name for one, other in pairs if one.name != other.name}
    raise UsageError(
        f"the two models have different outputs: {', '.join(map(str, ours))} and {', '.join(map(str, theirs))}; give "
        "two versions of one model"
    )


def _like(one: TensorSpec, other: TensorSpec) -> bool:
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    return all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(one.shape, other.shape, strict=True))


def in_order_note(names: Mapping[str, str]) -> str | None:
    """Returns a note about outputs with other ``names`` (see ``new_output_names``), or None if there are none."""
    if not names:
        return None
    said = ", ".join(f"{old} with {new}" for new, old in names.items())
    return f"the outputs of the two models have other names, so they are compared in their order: {said}"


def compare(reference: Mapping[str, np.ndarray], candidate: Mapping[str, np.ndarray]) -> list[Difference]:
    """Returns the difference between each output of the reference and the candidate's output of the same name."""
    found = []
    for name, value in reference.items():
        if name not in candidate:
            found.append(_incomparable(name, f"it is missing; the outputs are {', '.join(candidate)}"))
        else:
            found.append(difference(name, value, candidate[name]))
    return found


def worst(differences: list[list[Difference]]) -> dict[str, Difference]:
    """Returns the largest differences of each output over several comparisons."""
    merged: dict[str, Difference] = {}
    for row in (d for comparison in differences for d in comparison):
        seen = merged.get(row.output)
        if seen is None:
            merged[row.output] = row
            continue
        merged[row.output] = Difference(
            output=row.output,
            max_abs=max(seen.max_abs, row.max_abs),
            scale=max(seen.scale, row.scale),
            rel_l2=max(seen.rel_l2, row.rel_l2),
            cosine=min(seen.cosine, row.cosine),
            problem=seen.problem or row.problem,
        )
    return merged
