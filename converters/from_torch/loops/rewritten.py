"""Rewrites the loops of a function, so that a loop over a dynamic length runs as a scan.

A loop such as ``for i in range(n)`` becomes a call of ``Loop.scan`` with a function of one step. ``names`` and ``step``
find the tensors of the scan in the text of the loop. This works for plain loops. For other loops, the exporter may fail
or write another result, so the gates of the export compare the outputs.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import textwrap
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

from .names import bound_before, read_before_set, used_after
from .step import Step, StepBody

# The name of the module ``steps`` in the rewritten code.
_STEPS = "accel_loop_steps"
# A loop with one of these statements isn't rewritten.
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Nonlocal, ast.Global)
# The methods of a tensor whose result may be iterated over.
_TURNS = ("movedim", "permute", "swapaxes", "transpose")


def rewritten(function: FunctionType) -> CodeType | None:
    """Returns the code of ``function`` with rewritten loops, or None if ``function`` has no loop that can be
    rewritten."""
    code = function.__code__
    if dis.opmap["FOR_ITER"] not in code.co_code[::2]:
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # the source code isn't known
        return None
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef):
        return None
    made.decorator_list = []
    change = _Change(made)
    change.visit(made)
    if not change.count:
        return None
    made.body[:0] = _parsed(f"from accel.converters.from_torch.loops import steps as {_STEPS}")
    ast.increment_lineno(tree, first - 1)
    # The variables of an enclosing function stay free variables.
    (outer,) = _parsed(f"def outer({', '.join(code.co_freevars)}): pass")
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [made]
    flags = code.co_flags & __future__.annotations.compiler_flag
    module = ast.fix_missing_locations(ast.Module([outer], []))
    new = _inner(_inner(compile(module, code.co_filename, "exec", flags, dont_inherit=True)))
    return new if new.co_freevars == code.co_freevars else None


def _inner(code: CodeType) -> CodeType:
    """Returns the code of the function that ``code`` defines."""
    return next(one for one in code.co_consts if isinstance(one, CodeType))


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


class _Change(ast.NodeTransformer):
    """Rewrites the loops of ``function`` in place, and the calls that read the lists which the loops fill. ``count`` is
    the number of rewritten loops."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.count = 0
        self.filled: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self.generic_visit(node) if node is self.function else node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        first = node.args[0] if node.args else None
        if name in ("torch.stack", "torch.cat") and isinstance(first, ast.Name) and first.id in self.filled:
            node.func = ast.parse(name.replace("torch", _STEPS), mode="eval").body
        return node

    def visit_For(self, node: ast.For) -> Any:
        loop = _loop(node)
        inside = [one for statement in node.body for one in ast.walk(statement)]
        if loop is None or node.orelse or any(isinstance(one, _LEAVES) for one in inside):
            return self.generic_visit(node)
        scan = self._scan(node)
        if scan is None:
            return self.generic_visit(node)
        self.count += 1
        (choice,) = _parsed(f"if (accel_loop := {loop}).dynamic: pass")
        assert isinstance(choice, ast.If)
        choice.body, choice.orelse = scan, [node]
        node.iter = ast.Name("accel_loop", ast.Load())
        for made in (choice.test, *choice.body[1:]):
            for one in ast.walk(made):
                ast.copy_location(one, node)
        return ast.copy_location(choice, node)

    def _scan(self, node: ast.For) -> list[ast.stmt] | None:
        """Returns statements that run the loop ``node`` as a scan.

        Returns None if a step reads what earlier steps wrote to a list or to a part of a tensor.
        """
        stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        step = Step(ast.unparse(node.target), frozenset(stored))
        body = StepBody(step).statements(node.body)
        stored.discard(step.number)
        made_before = {*step.lists.values(), *(target for target, _ in step.writes.values())}
        if made_before & {one.id for part in body for one in ast.walk(part) if isinstance(one, ast.Name)}:
            return None
        bound = bound_before(self.function, node)
        carried = [name for name in read_before_set(body) if name in stored & bound]
        last = [name for name in used_after(self.function, node) if name in stored - {*carried}]
        self.filled |= set(step.lists.values())
        results = [*step.lists, *step.writes]
        read = [f"({tensor}, {axis})" for tensor, axis in step.reads]
        text = [
            f"def accel_step({step.number}, accel_carried, accel_read):",
            f"    {_tuple(carried)} = accel_carried",
            f"    {_tuple(step.reads.values())} = accel_read",
            f"    return {_tuple(carried)}, {_tuple([*results, *last])}",
            f"{_tuple(carried)}, {_tuple([*results, *last])} = accel_loop.scan(",
            f"    accel_step, {_tuple(carried)}, {_tuple(read)})",
            *(f"{name} = {_STEPS}.Results({name}, {made})" for made, name in step.lists.items()),
            *(f"{name} = accel_loop.put({name}, {made}, {axis})" for made, (name, axis) in step.writes.items()),
            *(f"{name} = {name}[-1]" for name in last),
        ]
        made = _parsed("\n".join(text))
        assert isinstance(made[0], ast.FunctionDef)
        made[0].body[2:2] = body
        return made


def _tuple(names: Sequence[str] | Any) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _loop(node: ast.For) -> str | None:
    """Returns an expression that makes the ``Loop`` for ``node``, or None if ``node`` isn't a loop over numbers or over
    a tensor."""
    over = node.iter
    if not isinstance(node.target, ast.Name):
        return None
    if isinstance(over, ast.Name):
        return f"{_STEPS}.items({over.id})"
    if not isinstance(over, ast.Call) or over.keywords:
        return None
    arguments = [ast.unparse(one) for one in over.args]
    if isinstance(over.func, ast.Name) and over.func.id == "range" and len(arguments) in (1, 2):
        return f"{_STEPS}.numbers({', '.join(arguments)})"
    if isinstance(over.func, ast.Attribute) and over.func.attr == "unbind":
        tensor = [] if ast.unparse(over.func) == "torch.unbind" else [ast.unparse(over.func.value)]
        return f"{_STEPS}.unbound({', '.join([*tensor, *arguments])})"
    if isinstance(over.func, ast.Attribute) and over.func.attr in _TURNS:
        return f"{_STEPS}.items({ast.unparse(over)})"
    return None
