"""Rewrites an expression that reads numbers from tensors, so that the new expression computes with the tensors."""

from __future__ import annotations

import ast
import copy

_READS = ("item", "tolist", "numpy")
_CASTS = ("float", "bool", "int")
_MODULES = ("math", "np", "numpy")
_RENAMED = {"fabs": "abs"}
# Methods and functions that return a tensor of bools.
_CONDITIONS = ("all", "any", "isnan", "isinf", "isfinite", "equal", "eq", "ne", "gt", "ge", "lt", "le")


def tensors(node: ast.expr) -> ast.expr:
    """Returns a copy of ``node`` that calls functions of torch on tensors instead of Python's functions on numbers."""
    return _made(_Tensors().visit(copy.deepcopy(node)))


def condition(node: ast.expr) -> ast.expr:
    """Rewrites ``node`` as an expression that gives a tensor of bools, as torch.where needs it."""
    return _made(_condition(_Tensors().visit(copy.deepcopy(node))))


def is_condition(node: ast.AST) -> bool:
    """Tells whether the function ``tensors`` can rewrite ``node``, which is a part of a condition. Doesn't check the
    nodes inside ``node``."""
    if isinstance(node, ast.Call):
        return takes_numbers(node) or isinstance(node.func, ast.Attribute)
    if isinstance(node, ast.Compare):
        return not any(isinstance(one, ast.Is | ast.IsNot | ast.In | ast.NotIn) for one in node.ops)
    return isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Name | ast.Subscript)


def takes_numbers(call: ast.Call) -> bool:
    """Tells whether ``call`` reads a tensor, or calls a function of Python numbers that ``tensors`` can rewrite."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _READS or bool(module_function(call)[0])
    return function_name(call) in (*_CASTS, "round", "max", "min")


def function_name(call: ast.Call) -> str:
    """Returns the name of the called function or method, without its module or object."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def module_function(call: ast.Call) -> tuple[str, str]:
    """Returns the module and the name if ``call`` calls a function of ``math`` or NumPy, or else two empty strings."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in _MODULES:
        return function.value.id, function.attr
    return "", ""


class _Tensors(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        given, name = node.args, function_name(node)
        if isinstance(node.func, ast.Attribute):
            if name in _READS and not given:
                return node.func.value
            other = _of_torch(name) if module_function(node)[0] else ""
            return _call(other, given, node.keywords) if other else node
        if name in ("float", "bool") and len(given) == 1:
            return given[0]
        if name == "int" and len(given) == 1:
            return ast.Call(ast.Attribute(given[0], "long"), [], [])
        if name == "round" and given:
            return _call("round", given[:1], [ast.keyword("decimals", one) for one in given[1:]])
        if name in ("max", "min") and len(given) == 2:
            return ast.Call(
                ast.Attribute(given[0], "clamp"), [], [ast.keyword({"max": "min"}.get(name, "max"), given[1])]
            )
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return _call("where", [_condition(node.test), node.body, node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        made, *rest = map(_condition, node.values)
        for value in rest:
            made = ast.BinOp(made, ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr(), value)
        return made

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), _condition(node.operand)) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Rewrites ``a < b < c`` as ``(a < b) & (b < c)``."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        pairs = [ast.Compare(sides[i], [op], [sides[i + 1]]) for i, op in enumerate(node.ops)]
        made: ast.expr = pairs[0]
        for pair in pairs[1:]:
            made = ast.BinOp(made, ast.BitAnd(), pair)
        return made


def _condition(node: ast.expr) -> ast.expr:
    known = (
        isinstance(node, ast.Compare)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr))
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert))
        or (isinstance(node, ast.Call) and function_name(node) in _CONDITIONS)
    )
    return node if known else ast.Compare(node, [ast.NotEq()], [ast.Constant(0)])


def _call(name: str, arguments: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("torch"), name), arguments, keywords or [])


def _of_torch(name: str) -> str:
    """Returns torch's name for a function of ``math`` or NumPy, or "" if torch doesn't have the function."""
    import torch

    name = _RENAMED.get(name, name)
    return name if callable(getattr(torch, name, None)) else ""


def _made(node: ast.expr) -> ast.expr:
    return ast.fix_missing_locations(node)
