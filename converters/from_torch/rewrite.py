"""Tells how to rewrite an expression that reads a tensor's values, so that the new expression uses only tensors."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from .tensor_expression import condition, function_name, is_condition, module_function, takes_numbers, tensors

# A place in a file: first line, last line, first column and last column. Columns are counted in bytes of UTF-8.
Span = tuple[int, int | None, int | None, int | None]

_UNKNOWN = "use functions of tensors there"
# Functions of ``math`` that torch.export can record if the argument is the result of ``item()``.
_FOLLOWED = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "floor"),
    *("log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
# Functions that only print or log values.
_SHOWS = ("print", "warn", "warning", "debug", "info")


@dataclass(frozen=True)
class Rewrite:
    """``text`` is the user's expression, or "" if the source code isn't known. ``fix`` is an imperative clause with
    advice. If ``certain`` is true, no exporter can export the expression as it is."""

    text: str
    fix: str
    certain: bool = True


def rewrite(file: str, span: Span) -> Rewrite | None:
    """Returns how to write the expression at ``span`` with tensors, or None if the expression only prints, logs or
    checks values."""
    tree, parents = _parsed(file)
    node = _at(tree, span) if tree else None
    if node is None:
        return Rewrite("", _UNKNOWN, certain=False)
    chain = [node, *_ancestors(node, parents)]
    if any(_shows(one) or _checks(one, chain) for one in chain):
        return None
    for index, one in enumerate(chain[1:], 1):
        child = chain[index - 1]
        if isinstance(one, ast.If | ast.While | ast.IfExp) and child is one.test:
            return _of_branch(one, all(map(is_condition, chain[:index])), parents)
        if isinstance(one, ast.For) and child is one.iter:
            return _of_loop(one, chain[:index])
    return _of_expression(chain)


def branch(file: str, line: int) -> Rewrite | None:
    """Returns how to write the condition on ``line`` without a branch, or None if the branch only checks values.

    The advice is always the same (a mask with ``torch.where``), because the condition may test a size instead of a
    tensor.
    """
    fix = "choose by a mask with torch.where"
    tree, _ = _parsed(file)
    for one in ast.walk(tree) if tree else ():
        if isinstance(one, ast.If | ast.While | ast.IfExp | ast.Assert) and _covers(one.test, line):
            return None if _checks(one, [one.test]) else Rewrite(ast.unparse(one.test), fix)
    return Rewrite("", fix)


def _covers(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _of_branch(one: ast.If | ast.While | ast.IfExp, simple: bool, parents: dict[ast.AST, ast.AST]) -> Rewrite:
    """Returns the rewrite of a branch. ``simple`` tells whether the branch's condition can be written with tensors."""
    before = ast.unparse(one.test)
    test = ast.unparse(condition(one.test)) if simple else "condition"
    if isinstance(one, ast.While):
        step = f"keep the result of a step with torch.where({test}, new, old),"
        return Rewrite(f"while {before}", f"repeat a fixed number of times, and {step}")
    if not isinstance(one, ast.While) and _gives_none(one):
        text = ast.unparse(one) if isinstance(one, ast.IfExp) else f"if {before}"
        return Rewrite(text, "keep a tensor in both cases, such as a mask that changes nothing,")
    if isinstance(one, ast.IfExp) and simple:
        return Rewrite(ast.unparse(one), f"write `{ast.unparse(tensors(one))}`")
    if isinstance(one, ast.If) and simple and (whole := _chosen(one, test, parents)):
        return Rewrite(f"if {before}", f"write `{whole}`")
    return Rewrite(f"if {before}", f"compute both results, and choose with torch.where({test}, this, that)")


def _gives_none(one: ast.If | ast.IfExp) -> bool:
    """Tells whether a case of the branch ``one`` gives None, which ``torch.where`` can't choose."""
    parts = [one.body, one.orelse] if isinstance(one, ast.IfExp) else [*one.body, *one.orelse]
    values = [part.value if isinstance(part, ast.Return | ast.Assign) else part for part in parts]
    return any(isinstance(value, ast.Constant) and value.value is None for value in values)


def _chosen(one: ast.If, test: str, parents: dict[ast.AST, ast.AST]) -> str:
    """Returns the branch ``one`` rewritten as a statement with ``torch.where``. Returns "" if a branch of ``one`` does
    more than return a value or set a variable."""
    if len(one.body) != 1 or len(one.orelse) > 1:
        return ""
    yes, no = one.body[0], one.orelse[0] if one.orelse else None
    if isinstance(yes, ast.Return):
        no = no or _next(one, parents)
        if isinstance(no, ast.Return) and yes.value and no.value:
            whole = _where(test, yes.value, no.value)
            return f"return {whole}" if whole else ""
        return ""
    target, value = _set(yes)
    other, otherwise = _set(no) if no else (target, target)
    return f"{target} = torch.where({test}, {value}, {otherwise})" if target and other == target else ""


def _where(test: str, yes: ast.expr, no: ast.expr) -> str:
    """Returns an expression with ``torch.where`` that chooses ``yes`` or ``no``. For two dicts with equal keys, or two
    tuples of equal length, each tensor is chosen separately. Returns "" for other structures."""
    if isinstance(yes, ast.Dict) and isinstance(no, ast.Dict):
        keys, others = ([key and ast.unparse(key) for key in one.keys] for one in (yes, no))
        if None in keys or sorted(map(str, keys)) != sorted(map(str, others)):
            return ""
        by_key = dict(zip(others, no.values, strict=True))
        values = [_where(test, value, by_key[key]) for key, value in zip(keys, yes.values, strict=True)]
        pairs = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
        return f"{{{pairs}}}" if all(values) else ""
    if isinstance(yes, ast.Tuple) and isinstance(no, ast.Tuple) and len(yes.elts) == len(no.elts):
        parts = [_where(test, *pair) for pair in zip(yes.elts, no.elts, strict=True)]
        return f"({', '.join(parts)})" if all(parts) else ""
    several = (ast.Dict, ast.Tuple, ast.List, ast.Set, ast.ListComp, ast.DictComp)
    if isinstance(yes, several) or isinstance(no, several):
        return ""
    return f"torch.where({test}, {ast.unparse(yes)}, {ast.unparse(no)})"


def _next(one: ast.stmt, parents: dict[ast.AST, ast.AST]) -> ast.stmt | None:
    """Returns the statement after ``one`` in the same block."""
    for block in ("body", "orelse"):
        statements = getattr(parents[one], block, [])
        if one in statements[:-1]:
            following: ast.stmt = statements[statements.index(one) + 1]
            return following
    return None


def _set(statement: ast.stmt) -> tuple[str, str]:
    """Returns the variable that ``statement`` sets, and the new value. Returns empty strings for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, ast.unparse(statement.value)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        whole = ast.BinOp(ast.Name(statement.target.id), statement.op, statement.value)
        return statement.target.id, ast.unparse(whole)
    return "", ""


def _of_loop(one: ast.For, chain: list[ast.AST]) -> Rewrite:
    text = ast.unparse(one.iter)
    if not isinstance(one.iter, ast.Call) or function_name(one.iter) != "range":
        return Rewrite(
            f"for {ast.unparse(one.target)} in {text}", "compute all rows at once, by a mask with torch.where"
        )
    step = ast.unparse(one.target).replace("_", "i")
    count = chain[-2] if len(chain) > 1 and isinstance(chain[-2], ast.expr) else one.iter
    keep = f"keep the result of a step with torch.where({step} < {ast.unparse(tensors(count))}, new, old),"
    return Rewrite(text, f"loop over range(N) with the largest N that the model needs, and {keep}")


def _of_expression(chain: list[ast.AST]) -> Rewrite:
    """Starts at ``chain[0]``, finds the largest enclosing expression that computes only with Python numbers, and
    returns the rewrite of this expression."""
    whole: ast.AST = chain[0]
    index_of: ast.Subscript | ast.Call | None = None
    # Except for sqrt, no exporter can record a function of ``math`` on a tensor. torch.export
    # records the functions in ``_FOLLOWED`` if their argument is a number from ``item()``.
    certain = isinstance(whole, ast.Call) and module_function(whole)[0] == "math" and function_name(whole) != "sqrt"
    for child, one in pairwise(chain):
        if isinstance(one, ast.Call) and child is not one.func:
            if not takes_numbers(one):
                index_of = one if function_name(one) == "get" else None
                break
            whole = one
            certain = certain or (module_function(one)[0] == "math" and function_name(one) not in _FOLLOWED)
        elif not isinstance(one, ast.Attribute | ast.BinOp | ast.UnaryOp | ast.Compare | ast.Call):
            index_of = one if isinstance(one, ast.Subscript) and child is one.slice else None
            break
    assert isinstance(whole, ast.expr)
    number, user = whole, chain[chain.index(whole) + 1]
    while isinstance(user, ast.BinOp | ast.UnaryOp):
        number, user = user, chain[chain.index(user) + 1]
    if _is_size(user):
        return Rewrite(ast.unparse(number), "give a fixed number", certain)
    if _cuts(user, chain[-1]):
        mask = f"torch.arange(length) < {ast.unparse(tensors(number))}"
        fix = f"keep the whole length, and mask the rest, as in torch.where({mask}, x, 0),"
        return Rewrite(ast.unparse(number), fix, certain)
    text, made = ast.unparse(whole), tensors(whole)
    if index_of is not None:
        fix = f"look up in a tensor, as in torch.tensor(values)[{ast.unparse(made)}],"
        return Rewrite(ast.unparse(index_of), fix, isinstance(index_of, ast.Call))
    if any(isinstance(one, ast.Call) and module_function(one)[0] for one in ast.walk(made)):
        return Rewrite(text, _UNKNOWN, certain)  # torch has no function with this name
    if isinstance(whole, ast.Call) and module_function(whole)[0]:
        return Rewrite(text, f"write `{ast.unparse(made)}`", certain)
    fixed = "True or False" if ast.unparse(condition(whole)) == ast.unparse(made) else "a fixed number"
    return Rewrite(text, f"compute with the tensor `{ast.unparse(made)}`, or give {fixed},", certain)


def _is_size(user: ast.AST) -> bool:
    """Tells whether the syntax node ``user`` is a call or an argument that needs a size as a Python number."""
    if isinstance(user, ast.Call):
        return function_name(user) == "interpolate"
    return isinstance(user, ast.keyword) and user.arg in ("size", "scale_factor", "output_size", "kernel_size")


def _cuts(user: ast.AST, function: ast.AST) -> bool:
    """Tells whether the syntax node ``user`` is a slice, or sets a variable that ``function`` uses in a slice."""
    if isinstance(user, ast.Slice):
        return True
    name = _set(user)[0] if isinstance(user, ast.stmt) else ""
    slices = (one for one in ast.walk(function) if isinstance(one, ast.Slice))
    return any(isinstance(one, ast.Name) and one.id == name for cut in slices for one in ast.walk(cut) if name)


def _shows(node: ast.AST) -> bool:
    """Tells whether ``node`` is a call that prints or logs."""
    return isinstance(node, ast.Call) and function_name(node) in _SHOWS


def _checks(node: ast.AST, chain: list[ast.AST]) -> bool:
    """Returns True for an assertion. Also returns True for an ``if`` that only raises or prints, if the condition of
    the ``if`` is in ``chain``."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.If) or node.test not in chain or node.orelse:
        return False
    return all(
        isinstance(one, ast.Raise | ast.Pass) or (isinstance(one, ast.Expr) and _shows(one.value)) for one in node.body
    )


@lru_cache(maxsize=8)
def _parse(text: str) -> tuple[ast.Module | None, dict[ast.AST, ast.AST]]:
    """Returns the tree of the source ``text`` and the parent of each node."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None, {}
    return tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _parsed(file: str) -> tuple[ast.Module | None, dict[ast.AST, ast.AST]]:
    return _parse("".join(linecache.getlines(file)))


def _at(tree: ast.Module, span: Span) -> ast.expr | None:
    """Returns the smallest expression that covers ``span``. If ``span`` covers a whole loop or branch, returns the
    condition or iterable of that statement.

    Python reports the span of a whole statement in two cases: for a loop, and for an ``if`` that only raises.
    """
    first, last, start, end = span
    if start is None:
        return None
    begins, ends = (first, start), (last or first, end or 0)
    found: ast.expr | None = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.If | ast.While | ast.For):
            continue
        at, to = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        if isinstance(node, ast.expr):
            found = node if at <= begins and to >= ends else found
        elif (at, to) == (begins, ends):
            found = node.iter if isinstance(node, ast.For) else node.test
    return found


def _ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yields the syntax nodes that enclose ``node``, up to its function."""
    while node in parents and not isinstance(node, ast.FunctionDef | ast.Lambda):
        node = parents[node]
        yield node
