"""Gives ONNX translations of the solution of linear systems and of the inverse of a matrix, which ONNX lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.errors import ExportFailed

from .opset import operators

# The largest number of rows of a matrix. The graph has some 20 nodes for each row.
_LARGEST = 32


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns a table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=...)``."""
    import torch

    aten = torch.ops.aten
    return {
        aten.linalg_solve.default: _solve,
        aten.linalg_inv.default: _inverse,
        aten.inverse.default: _inverse,
    }


def _solve(a: Any, b: Any, left: bool = True) -> Any:
    """Returns x with a·x = b, or x·a = b if ``left`` is false. ``b`` may hold a vector for each matrix."""
    op, rows = operators(), _rows(a)
    last = op.Constant(value_ints=[-1])
    if len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and list(b.shape) == list(a.shape[:-1])):
        return op.Squeeze(_eliminated(a, op.Unsqueeze(b, last), rows), last)
    if left:
        return _eliminated(a, b, rows)
    rank = max(len(a.shape), len(b.shape))
    return _transposed(_eliminated(_transposed(a, len(a.shape)), _transposed(b, len(b.shape)), rows), rank)


def _inverse(a: Any) -> Any:
    op, rows = operators(), _rows(a)
    unit = op.EyeLike(op.ConstantOfShape(op.Constant(value_ints=[rows, rows])))
    return _eliminated(a, op.CastLike(unit, a), rows)


def _rows(a: Any) -> int:
    """Returns the number of rows of a matrix. Raises ``ExportFailed`` if it is dynamic or too large."""
    size = a.shape[-1]
    if not isinstance(size, int) or size > _LARGEST:
        raise ExportFailed(
            f"the model solves a linear system of {size} rows, and accel writes a fixed number of at most {_LARGEST}"
        )
    return size


def _transposed(x: Any, rank: int) -> Any:
    return operators().Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _eliminated(a: Any, b: Any, rows: int) -> Any:
    """Returns x with a·x = b by Gauss-Jordan elimination with partial pivoting (Golub and Van Loan, Matrix
    Computations, section 3.4)."""
    op = operators()
    last, one = op.Constant(value_ints=[-1]), op.Constant(value_ints=[1])
    numbers = op.Constant(value_ints=list(range(rows)))

    def column(x: Any, number: int) -> Any:
        return op.Slice(x, op.Constant(value_ints=[number]), op.Constant(value_ints=[number + 1]), last)

    def row(x: Any, number: int) -> Any:
        axis = op.Constant(value_ints=[-2])
        return op.Slice(x, op.Constant(value_ints=[number]), op.Constant(value_ints=[number + 1]), axis)

    for i in range(rows):
        here = op.Constant(value_ints=[i])
        if i < rows - 1:
            # The row with the largest number in column i, among the rows from i on, changes places with row i.
            below = op.Slice(column(a, i), here, op.Constant(value_ints=[rows]), op.Constant(value_ints=[-2]))
            largest = op.Add(op.Squeeze(op.ArgMax(op.Abs(below), axis=-2, keepdims=1), last), here)
            order = op.Where(op.Equal(numbers, here), largest, op.Where(op.Equal(numbers, largest), here, numbers))
            swap = op.CastLike(op.Equal(op.Unsqueeze(order, last), numbers), a)
            a, b = op.MatMul(swap, a), op.MatMul(swap, b)
        pivot = column(row(a, i), i)
        own_a, own_b = op.Div(row(a, i), pivot), op.Div(row(b, i), pivot)
        factor = column(a, i)
        is_own = op.Unsqueeze(op.Equal(numbers, here), one)
        a = op.Where(is_own, own_a, op.Sub(a, op.Mul(factor, own_a)))
        b = op.Where(is_own, own_b, op.Sub(b, op.Mul(factor, own_b)))
    return b
