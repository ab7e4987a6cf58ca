"""Evaluates the conditions on sizes under which a graph equals its source.

A graph holds one side of each condition on sizes that the source's code has, such as ``if x.shape[1] > 512``, or one
number of chunks of ``x.split(32)``. The condition is a text in Python's syntax, such as ``(batch + 31) // 32 == 1``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import CodeType

from accel.errors import InvalidModel

from .dim_range import DimRange
from .signature import Signature

_ALLOWED = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load),
    *(ast.And, ast.Or, ast.Not, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_FUNCTIONS = {"min": min, "max": max}
# Longer texts, which nobody can read, would make Python's parser slow.
_LONGEST = 2000
# The most sizes of a dim among which a size is searched that breaks a condition.
_SEARCHED = 4096
# No condition is searched beyond this size.
_LARGEST = 1 << 24


@dataclass(frozen=True)
class Condition:
    """A condition on sizes, with the names of its dims and its compiled code. ``fault`` is the error of the source at
    sizes that break the condition, with these sizes, or "" if the source runs there, or if this is unknown."""

    text: str
    dims: frozenset[str]
    code: CodeType
    fault: str = ""

    @classmethod
    def parse(cls, text: str, fault: str = "") -> Condition:
        """Reads a condition from a manifest. Raises ``InvalidModel`` if ``text`` has anything but comparisons and
        integer arithmetic."""
        try:
            tree = ast.parse(text if len(text) <= _LONGEST else "", mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            tree = ast.Expression(ast.Set([]))
        nodes = list(ast.walk(tree))
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if (
            not all(isinstance(node, _ALLOWED) for node in nodes)
            or any(not isinstance(node.value, int) for node in nodes if isinstance(node, ast.Constant))
            or any(not isinstance(function, ast.Name) or function.id not in _FUNCTIONS for function in called)
        ):
            raise InvalidModel(
                f"the condition {text[:80]!r} in the manifest isn't one on sizes; export the model again"
            )
        return cls(text, frozenset(names - set(_FUNCTIONS)), compile(tree, "condition", "eval"), fault)

    @classmethod
    def allows(cls, text: str) -> bool:
        """Tells whether ``text`` can be read."""
        try:
            cls.parse(text)
        except InvalidModel:
            return False
        return True

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Tells whether the condition holds at ``sizes``, which have all its dims."""
        try:
            return bool(eval(self.code, {"__builtins__": {}, **_FUNCTIONS}, dict(sizes)))
        except ZeroDivisionError:
            return False


def broken(conditions: Sequence[Condition], sizes: Mapping[str, int]) -> Condition | None:
    """Returns the first condition that doesn't hold at ``sizes``, or None. Skips a condition on a dim that ``sizes``
    don't have."""
    return next((one for one in conditions if one.dims <= set(sizes) and not one.holds(sizes)), None)


def breaking_sizes(condition: Condition, signature: Signature) -> dict[str, int] | None:
    """Returns sizes in the ranges of ``signature`` at which ``condition`` doesn't hold, or None if no such sizes were
    found. Changes one dim of the usual sizes, or takes the ends of all ranges."""
    return next((sizes for sizes in _searched(condition, signature) if not condition.holds(sizes)), None)


def sizes_beyond(condition: Condition, signature: Signature) -> dict[str, int] | None:
    """Returns sizes outside the ranges of ``signature`` at which ``condition`` doesn't hold, or None if no such sizes
    were found. The other dims have their usual sizes.

    A source that leaves out the last of 513 entries may give nearly the same numbers as for 512, so larger sizes are at
    least 1.5 times beyond the end of the condition if there is an end.
    """
    usual = signature.sizes()
    dims = sorted(condition.dims & set(signature.dims))
    for group in (*((dim,) for dim in dims), *([tuple(dims)] if len(dims) > 1 else [])):
        for larger in (True, False):
            first: dict[str, int] | None = None
            for sizes in _scaled(signature, group, larger=larger):
                if condition.holds({**usual, **sizes}):
                    if first:
                        break
                elif first or not larger:
                    return {**usual, **sizes}
                else:
                    first = sizes
            if first:
                return {**usual, **first}
    for dim in dims:
        step = signature.dims[dim].step
        for size in range(step, step * _SEARCHED, step):
            if not condition.holds({**usual, dim: size}):
                return {**usual, dim: size}
    return None


def _scaled(signature: Signature, dims: Sequence[str], *, larger: bool) -> Iterator[dict[str, int]]:
    """Yields sizes of ``dims`` that are more and more beyond the ends of their ranges."""
    sizes = {dim: signature.dims[dim].max if larger else signature.dims[dim].min for dim in dims}
    while True:
        ranges = {dim: signature.dims[dim] for dim in dims}
        before = sizes
        sizes = {
            dim: ranges[dim].up(-(-size * 3 // 2)) if larger else min(ranges[dim].down(size * 2 // 3), size)
            for dim, size in sizes.items()
        }
        if sizes == before or max(sizes.values()) > _LARGEST:
            return
        yield sizes


def without_implied(conditions: Sequence[Condition], signature: Signature) -> list[Condition]:
    """Leaves out each condition that only fails at sizes at which one of the other ``conditions`` fails too. Looks at
    the sizes that ``breaking_sizes`` and ``sizes_beyond`` look at."""
    left = list(conditions)
    for one in sorted(conditions, key=lambda condition: -len(condition.text)):
        others = [other for other in left if other is not one]
        if others and all(broken(others, sizes) for sizes in _every_break(one, signature)):
            left = others
    return left


def _every_break(condition: Condition, signature: Signature) -> Iterator[dict[str, int]]:
    usual = signature.sizes()
    dims = sorted(condition.dims & set(signature.dims))
    found = [sizes for sizes in _searched(condition, signature) if not condition.holds(sizes)]
    for group in (*((dim,) for dim in dims), tuple(dims)):
        for larger in (True, False):
            every = ({**usual, **sizes} for sizes in _scaled(signature, group, larger=larger))
            found += [sizes for sizes in every if not condition.holds(sizes)]
    for dim in dims:
        step = signature.dims[dim].step
        every = ({**usual, dim: size} for size in range(step, step * _SEARCHED, step))
        found += [sizes for sizes in every if not condition.holds(sizes)]
    # Nothing is known about a condition that was never broken.
    yield from found or [usual]


def ranges_held(conditions: Sequence[Condition], signature: Signature) -> dict[str, DimRange]:
    """Returns the range of each dim around its usual size in which all ``conditions`` hold, if the other dims have
    their usual sizes. Leaves out the dims whose whole range holds."""
    usual = signature.sizes()
    found: dict[str, DimRange] = {}
    for dim in sorted(frozenset[str]().union(*(one.dims for one in conditions)) & set(signature.dims)):
        bounds = signature.dims[dim]
        ends = []
        for end, step in ((bounds.min, -bounds.step), (bounds.max, bounds.step)):
            last = bounds.opt
            for size in range(bounds.opt, end + step, step)[:_SEARCHED]:
                if broken(conditions, {**usual, dim: size}):
                    break
                last = size
            ends.append(last)
        held = replace(bounds, min=ends[0], max=ends[1])
        found |= {dim: held} if held != bounds else {}
    return found


def _searched(condition: Condition, signature: Signature) -> Iterator[dict[str, int]]:
    usual = signature.sizes()
    dims = sorted(condition.dims & set(signature.dims))
    for ends in product(*((signature.dims[dim].max, signature.dims[dim].min) for dim in dims)):
        yield {**usual, **dict(zip(dims, ends, strict=True))}
    for dim in dims:
        bounds = signature.dims[dim]
        for size in range(bounds.min, bounds.max + 1, bounds.step)[:_SEARCHED]:
            yield {**usual, dim: size}
