"""Parses and evaluates sums of dims and numbers. The bound of an input is a number or a sum such as ``length-1``. A
dim of an input may be a sum of other dims, such as ``past+sequence``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from accel.errors import BadInputSpec

Bound = int | float | str

# A dim with another operator, such as a hyphen, may be a name that an exporter chose.
_SUM = re.compile(r"[A-Za-z_]\w*(?: *\+ *\w+)+")
_KINDS = {False: "an integer", True: "a finite number"}
_TERM = re.compile(r"([+-]?)(?:(\d+)|([A-Za-z_]\w*))")


_FRACTION = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def parse_bound(text: Bound, *, fractions: bool = False) -> Bound:
    """Parses ``text`` into a number or a sum in normal form. Equal bounds have the same normal form. With
    ``fractions``, which is for inputs that hold floats, the number may have a fraction.

    Raises ``BadInputSpec`` if ``text`` is neither a finite number nor a sum of dims and integers.
    """
    number = text.strip() if isinstance(text, str) else repr(text)
    if fractions and _FRACTION.fullmatch(number) and math.isfinite(float(number)):
        return int(float(number)) if float(number).is_integer() and abs(float(number)) < 1e15 else float(number)
    if isinstance(text, float):
        raise BadInputSpec(f"{text!r} can't bound the range of this input; give {_KINDS[fractions]}")
    return text if isinstance(text, int) else _bound(*_terms(text))


def dims_of(bound: Bound) -> frozenset[str]:
    """Returns the names of the dims in a bound."""
    return frozenset() if isinstance(bound, int | float) else frozenset(dim for dim, _ in _terms(bound)[0])


def is_sum(dim: int | str) -> bool:
    """Tells whether the dim of a shape is a sum of other dims and numbers, such as ``past+sequence``."""
    return isinstance(dim, str) and _SUM.fullmatch(dim) is not None


def free_dims(dim: int | str) -> tuple[str, ...]:
    """Returns the names of the dims that determine the size of ``dim``, in order: the terms of a sum, or the dim
    itself. Returns an empty tuple for a fixed size."""
    if isinstance(dim, int):
        return ()
    return tuple(name for name, _ in _terms(dim)[0]) if is_sum(dim) else (dim,)


def size_at(dim: int | str, sizes: Mapping[str, int]) -> int:
    """Returns the size of a dim, which is fixed, has a name, or is a sum. Raises ``KeyError`` if a size is missing."""
    if isinstance(dim, int):
        return dim
    return int(bound_at(dim, sizes)) if is_sum(dim) else sizes[dim]


def bound_at(bound: Bound, sizes: Mapping[str, int]) -> float:
    """Evaluates the bound for the dims' ``sizes``. Raises ``KeyError`` if a dim of the bound has no size."""
    if isinstance(bound, int | float):
        return bound
    dims, number = _terms(bound)
    return sum(count * sizes[dim] for dim, count in dims) + number


def substituted(bound: Bound, dims: Mapping[str, int | str]) -> Bound:
    """Replaces each dim in the bound by the dim's size or new name in ``dims``, and returns the new bound."""
    if isinstance(bound, int | float):
        return bound
    terms, number = _terms(bound)
    found = Counter[str]()
    for dim, count in terms:
        new = dims.get(dim, dim)
        if isinstance(new, int):
            number += count * new
        else:
            found[new] += count
    return _bound(tuple(found.items()), number)


@lru_cache(maxsize=256)  # a server evaluates the bounds of every request
def _terms(text: str) -> tuple[tuple[tuple[str, int], ...], int]:
    """Splits a sum of dims and numbers. Returns each dim with its factor, and the total of the numbers."""
    compact = text.replace(" ", "")
    terms = list(_TERM.finditer(compact))
    if not terms or "".join(term[0] for term in terms) != compact or not all(term[1] for term in terms[1:]):
        raise BadInputSpec(
            f"can't read the bound {text!r} of a range; write a number, a dim or a sum of them, e.g. 0..length-1"
        )
    number, dims = 0, Counter[str]()
    for sign, digits, dim in (term.groups() for term in terms):
        one = -1 if sign == "-" else 1
        if dim:
            dims[dim] += one
        else:
            number += one * int(digits)
    return tuple((dim, count) for dim, count in dims.items() if count), number


def _bound(dims: tuple[tuple[str, int], ...], number: int) -> Bound:
    """Returns a sum of dims and a number as a text, such as ``length-1``. Returns only ``number`` if there are no
    dims."""
    terms = [("+" if count > 0 else "-") + dim for dim, count in dims for _ in range(abs(count))]
    if not terms:
        return number
    return "".join([*terms, f"{number:+d}" if number else ""]).removeprefix("+")
