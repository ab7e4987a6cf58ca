"""Translates the solution of linear systems, the inverse of a matrix, and the Cholesky factorization, which ONNX
lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.errors import ExportFailed

from .opset import ints, operators

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
        aten.linalg_cholesky.default: _cholesky,
        aten.linalg_cholesky_ex.default: _cholesky_and_info,
        aten.cholesky_solve.default: _solve_by_factor,
        aten.cholesky_inverse.default: _inverse_by_factor,
    }


def _solve(a: Any, b: Any, left: bool = True) -> Any:
    """Returns x with a·x = b, or x·a = b if ``left`` is false. ``b`` may hold a vector for each matrix."""
    op, rows = operators(), _rows(a)
    last = ints(-1)
    if len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and list(b.shape) == list(a.shape[:-1])):
        return op.Squeeze(_eliminated(a, op.Unsqueeze(b, last), rows), last)
    return _solved(a, b, rows, (len(a.shape), len(b.shape)), left)


def _solved(a: Any, b: Any, rows: int, ranks: tuple[int, int], left: bool) -> Any:
    """Returns x with a·x = b, or x·a = b if ``left`` is false, for matrices of ``ranks`` dims."""
    if left:
        return _eliminated(a, b, rows)
    return _transposed(_eliminated(_transposed(a, ranks[0]), _transposed(b, ranks[1]), rows), max(ranks))


def _inverse(a: Any) -> Any:
    rows = _rows(a)
    return _eliminated(a, _unit_like(a, rows), rows)


def _unit_like(a: Any, rows: int) -> Any:
    """Returns the unit matrix in the dtype of ``a``."""
    op = operators()
    return op.CastLike(op.EyeLike(op.ConstantOfShape(ints(rows, rows))), a)


def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Returns x with a·x = b, or x·a = b if ``left`` is false. Uses one triangle of ``a`` alone, and ones on the
    diagonal if ``unitriangular`` is true."""
    op, rows = operators(), _rows(a)
    triangle = op.Trilu(a, upper=int(upper))
    if unitriangular:
        unit = _unit_like(a, rows)
        triangle = op.Where(op.Cast(unit, to=9), unit, triangle)
    return _solved(triangle, b, rows, (len(a.shape), len(b.shape)), left)


def _cholesky(a: Any, upper: bool = False) -> Any:
    """Returns L with L·L^T = a for a positive definite matrix, or L^T if ``upper`` is true, by outer products (Golub
    and Van Loan, Matrix Computations, section 4.2). Reads the lower triangle of ``a`` if ``upper`` is false."""
    op, rows, rank = operators(), _rows(a), len(a.shape)
    if upper:
        a = _transposed(a, rank)
    zero, one_before, last = op.CastLike(op.Constant(value_float=0.0), a), ints(-2), ints(-1)
    numbers = op.Unsqueeze(ints(*range(rows)), last)
    columns = []
    for i in range(rows):
        here, following = ints(i), ints(i + 1)
        column = op.Slice(a, here, following, last)
        column = op.Div(column, op.Sqrt(op.Slice(column, here, following, one_before)))
        columns.append(op.Where(op.Less(numbers, here), zero, column))
        if i < rows - 1:
            a = op.Sub(a, op.MatMul(columns[-1], _transposed(columns[-1], rank)))
    found = op.Concat(*columns, axis=-1)
    return _transposed(found, rank) if upper else found


def _cholesky_and_info(a: Any, *, upper: bool = False, **_: Any) -> tuple[Any, Any]:
    """Returns the factor, and 0 for the number that tells whether a matrix isn't positive definite. For such a matrix
    the factor holds NaN, and PyTorch itself raises an error."""
    op = operators()
    return _cholesky(a, upper), op.Cast(op.Expand(op.Constant(value_int=0), op.Shape(a, end=-2)), to=6)  # int32


def _solve_by_factor(b: Any, factor: Any, upper: bool = False) -> Any:
    """Returns x with L·L^T·x = b for a Cholesky factor, which is L, or L^T if ``upper`` is true."""
    lower, higher = _factors(factor, upper)
    rows = _rows(factor)
    return _eliminated(higher, _eliminated(lower, b, rows), rows)


def _inverse_by_factor(factor: Any, upper: bool = False) -> Any:
    """Returns the inverse of L·L^T for a Cholesky factor, which is L, or L^T if ``upper`` is true."""
    rows = _rows(factor)
    lower, higher = _factors(factor, upper)
    return _eliminated(higher, _eliminated(lower, _unit_like(factor, rows), rows), rows)


def _factors(factor: Any, upper: bool) -> tuple[Any, Any]:
    """Returns L and L^T."""
    triangle = operators().Trilu(factor, upper=int(upper))
    other = _transposed(triangle, len(factor.shape))
    return (other, triangle) if upper else (triangle, other)


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
    last, one = ints(-1), ints(1)
    numbers = ints(*range(rows))

    def column(x: Any, number: int) -> Any:
        return op.Slice(x, ints(number), ints(number + 1), last)

    def row(x: Any, number: int) -> Any:
        axis = ints(-2)
        return op.Slice(x, ints(number), ints(number + 1), axis)

    for i in range(rows):
        here = ints(i)
        if i < rows - 1:
            # The row with the largest number in column i, among the rows from i on, changes places with row i.
            below = op.Slice(column(a, i), here, ints(rows), ints(-2))
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
