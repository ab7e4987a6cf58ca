"""Finds what one step of a loop reads and makes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Step:
    """One step of a loop. ``number`` is the loop's variable, and ``stored`` has the names that the loop sets.

    ``reads`` maps the text of a tensor and an axis to the name of the tensor's part that the step reads. ``lists`` maps
    the name of a result to the list to which the step appends it. ``writes`` maps the name of a result to the tensor
    and the axis to which the step writes it.
    """

    number: str
    stored: frozenset[str]
    reads: dict[tuple[str, int], str] = field(default_factory=dict)
    lists: dict[str, str] = field(default_factory=dict)
    writes: dict[str, tuple[str, int]] = field(default_factory=dict)


class StepBody(ast.NodeTransformer):
    """Replaces the reads, the appended elements and the writes of a step by names."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Returns a changed copy of ``body``. The copy has the line numbers of the statements in ``body``."""
        found = []
        for statement in body:
            (copied,) = ast.parse(ast.unparse(statement)).body
            changed = self.visit(copied)
            for one in ast.walk(changed):
                ast.copy_location(one, statement)
            found.append(changed)
        return found

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Turns ``results.append(value)`` into an assignment."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
            name = self._result()
            self.step.lists[name] = ast.unparse(call.func.value)
            return ast.Assign([ast.Name(name, ast.Store())], self.visit(call.args[0]))
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Turns ``y[:, i] = value`` into an assignment to a name."""
        target = node.targets[0]
        found = self._axis(target) if isinstance(target, ast.Subscript) else None
        if isinstance(target, ast.Subscript) and found is not None and not found[1]:
            name = self._result()
            self.step.writes[name] = (ast.unparse(target.value), found[0])
            return ast.Assign([ast.Name(name, ast.Store())], self.visit(node.value))
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Turns ``h += x`` into ``h = h + x``, because a step can't write to a carried tensor."""
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], value)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """Turns ``x[:, i, 0]`` into ``part[:, 0]``, where ``part`` is what the step reads of ``x``."""
        found = self._axis(node)
        names = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
        calls = any(isinstance(one, ast.Call) for one in ast.walk(node.value))
        if found is None or calls or names & self.step.stored or not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        axis, rest = found
        reads = self.step.reads
        part = ast.Name(reads.setdefault((ast.unparse(node.value), axis), f"accel_part_{len(reads)}"), ast.Load())
        if not rest:
            return part
        return ast.Subscript(part, ast.Tuple([*(ast.Slice() for _ in range(axis)), *rest], ast.Load()), ast.Load())

    def _result(self) -> str:
        return f"accel_result_{len(self.step.lists) + len(self.step.writes)}"

    def _axis(self, node: ast.Subscript) -> tuple[int, list[ast.expr]] | None:
        """Returns the axis at which the loop's variable is the index, and the indices after it. Returns None if another
        index than ``:`` comes before the loop's variable. Indices after it are left out if all are ``:``."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for axis, part in enumerate(parts):
            if isinstance(part, ast.Name) and part.id == self.step.number:
                rest = parts[axis + 1 :]
                return axis, [] if all(map(_is_whole, rest)) else [self.visit(one) for one in rest]
            if not _is_whole(part):
                return None
        return None


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is node.upper is node.step is None
