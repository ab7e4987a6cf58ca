"""Translates the solution of linear systems, the inverse of a matrix, and the Cholesky factorization, which ONNX
lacks."""

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
        aten.linalg_solve_triangular.default: _solve_triangular,
        aten.cholesky.default: _cholesky,
        aten.linalg_cholesky_ex.default: _cholesky_and_info,
        aten.cholesky_solve.default: _solve_by_factor,
        aten.cholesky_inverse.default: _inverse_by_factor,
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


def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Returns x with a·x = b, or x·a = b if ``left`` is false. Uses one triangle of ``a`` alone, and ones on the
    diagonal if ``unitriangular`` is true."""
    op = operators()
    triangle = op.Trilu(a, upper=int(upper))
    if unitriangular:
        unit = op.CastLike(op.EyeLike(op.ConstantOfShape(op.Constant(value_ints=[_rows(a)] * 2))), a)
        triangle = op.Where(op.Cast(unit, to=9), unit, triangle)
    return _solve(triangle, b, left)


def _cholesky(a: Any, upper: bool = False) -> Any:
    """Returns L with L·L^T = a for a positive definite matrix, or L^T if ``upper`` is true, by outer products (Golub
    and Van Loan, Matrix Computations, section 4.2). Reads the lower triangle of ``a`` if ``upper`` is false."""
    op, rows = operators(), _rows(a)
    if upper:
        a = _transposed(a, len(a.shape))
    last, numbers = op.Constant(value_ints=[-1]), op.Constant(value_ints=[[n] for n in range(rows)])
    columns = []
    for i in range(rows):
        here, following = op.Constant(value_ints=[i]), op.Constant(value_ints=[i + 1])
        column = op.Slice(a, here, following, last)
        pivot = op.Slice(column, here, following, op.Constant(value_ints=[-2]))
        scaled = op.Div(column, op.Sqrt(pivot))
        scaled = op.Where(op.Less(numbers, here), op.CastLike(op.Constant(value_float=0.0), a), scaled)
        columns.append(scaled)
        if i < rows - 1:
            a = op.Sub(a, op.MatMul(scaled, _transposed(scaled, len(a.shape))))
    found = op.Concat(*columns, axis=-1)
    return _transposed(found, len(a.shape)) if upper else found


def _cholesky_and_info(a: Any, *, upper: bool = False, **_: Any) -> tuple[Any, Any]:
    """Returns the factor, and 0 for the number that tells whether a matrix isn't positive definite. For such a matrix
    the factor holds NaN, and PyTorch itself raises an error."""
    op = operators()
    leading = op.Shape(a, end=-2)
    return _cholesky(a, upper), op.Cast(op.Expand(op.Constant(value_int=0), leading), to=6)


def _product_of_factor(factor: Any, upper: bool) -> Any:
    """Returns L·L^T for the factor L, or for the factor L^T if ``upper`` is true."""
    op = operators()
    factor = op.Trilu(factor, upper=int(upper))
    other = _transposed(factor, len(factor.shape))
    return op.MatMul(other, factor) if upper else op.MatMul(factor, other)


def _solve_by_factor(b: Any, factor: Any, upper: bool = False) -> Any:
    """Returns x with L·L^T·x = b for a Cholesky factor L."""
    first = _solve_triangular(_transposed(factor, len(factor.shape)) if upper else factor, b, upper=False)
    return _solve_triangular(factor if upper else _transposed(factor, len(factor.shape)), first, upper=True)


def _inverse_by_factor(factor: Any, upper: bool = False) -> Any:
    """Returns the inverse of L·L^T for a Cholesky factor L."""
    return _inverse(_product_of_factor(factor, upper))


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
