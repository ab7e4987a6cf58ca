"""Finds out which names a loop carries from step to step, and which of its names are read later."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

# The fields of a node that Python evaluates before the other fields.
_EARLY = ("value", "iter", "generators", "test")


def read_before_set(body: Sequence[ast.stmt]) -> list[str]:
    """Returns the names that a step reads before it sets them, and the names that it sets only under a condition."""
    already: set[str] = set()
    found: dict[str, None] = {}
    for statement in body:
        conditional = isinstance(statement, ast.If | ast.For | ast.While | ast.Try)
        for name, is_set in _uses(statement):
            if name in already:
                continue
            if is_set and not conditional:
                already.add(name)
            else:
                found[name] = None
    return list(found)


def bound_before(function: ast.FunctionDef, loop: ast.For) -> set[str]:
    """Returns the arguments of ``function``, and the names that it sets above ``loop``."""
    arguments = function.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    stores = (one for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    return names | {one.id for one in stores if one.lineno < loop.lineno}


def used_after(function: ast.FunctionDef, loop: ast.For) -> list[str]:
    """Returns the names that ``function`` reads below ``loop`` before it sets them again."""
    already: set[str] = set()
    found: list[str] = []
    for statement in _below(function, loop.end_lineno or loop.lineno):
        for name, is_set in _uses(statement):
            if name not in already and not is_set:
                found.append(name)
            already.add(name)
    return found


def _below(node: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yields the outermost statements in ``node`` that begin after ``line``."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.stmt) and one.lineno > line:
            yield one
        elif isinstance(one, ast.stmt | ast.excepthandler):
            yield from _below(one, line)


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields the names in ``node`` in the order of evaluation, and whether the name is set."""
    if isinstance(node, ast.Name):
        yield node.id, not isinstance(node.ctx, ast.Load)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, False
    fields = dict(ast.iter_fields(node))
    early = [fields.pop(name) for name in _EARLY if name in fields]
    for value in (*early, *fields.values()):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from _uses(one)
