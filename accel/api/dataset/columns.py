"""Turns columns of Arrow into tensors, and outputs into columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadData
from accel.signature import TensorSpec, numpy_dtype
from accel.spelling import option

if TYPE_CHECKING:
    import pyarrow as pa


class Column:
    """The rows of one input. ``shapes`` is int64[rows, axes]. ``bad`` maps the number of an unusable row to the reason.

    A row of a list column is a tensor with an axis for each level of lists. If the input's shape is fixed, a row may
    also be the flat list of all values. Raises ``BadData`` if no row of the column can be the input.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, spec: TensorSpec, axes: Sequence[int | str]) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.name = name
        self.bad: dict[int, str] = {}
        whole = column.combine_chunks() if column.num_chunks else pa.array([], column.type)
        shape: tuple[int, ...] | None = None  # of every row, if the column holds flat lists
        if isinstance(whole, pa.ExtensionArray):
            shape = tuple(whole.type.shape) if isinstance(whole.type, pa.FixedShapeTensorType) else None
            whole = whole.storage
        for row in np.flatnonzero(pc.is_null(whole).to_numpy(zero_copy_only=False)).tolist():
            self.bad[row] = f"the column {name} is null"
        rows = len(whole)
        levels: list[np.ndarray] = []
        while _is_list(whole.type):
            if pa.types.is_fixed_size_list(whole.type):
                whole = pc.cast(whole, pa.list_(whole.type.value_type))
            levels.append(whole.offsets.to_numpy().astype(np.int64))
            whole = whole.values
        if shape is None and len(levels) == 1 != len(axes) and all(isinstance(size, int) for size in axes):
            shape = tuple(int(size) for size in axes)
        self._values, lost = _converted(name, whole, spec)
        found = len(levels if shape is None else shape)
        if found != len(axes) or (shape is not None and len(levels) != 1):
            raise BadData(
                f"a row of the column {name} has {found} axes, but a row of the input {spec} has {len(axes)}; write "
                f"nested lists of that depth, or name another column with {option('columns')}"
            )
        self._starts, self.shapes = self._placed(rows, levels)
        if shape is not None:
            for row in np.flatnonzero(self.shapes[:, 0] != np.prod(shape)).tolist():
                many = f"{self.shapes[row, 0]} values, but the shape {list(shape)} has {np.prod(shape)}"
                self.bad.setdefault(row, f"the column {name} has {many}")
            self.shapes = np.tile(np.array(shape, np.int64), (rows, 1))
        self.shapes[list(self.bad)] = 0  # an unusable row has no values
        if whole.null_count:
            self._mark(pc.is_null(whole).to_numpy(zero_copy_only=False), f"the column {name} holds a null")
        if lost.any():
            self._mark(lost, f"the column {name} holds a number that {spec.dtype} doesn't have")

    def _placed(self, rows: int, levels: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the values of each row begin, and the shape of each row. ``levels`` has the offsets of the
        lists at each depth."""
        begins = np.arange(rows)
        ends = begins + 1
        sizes: list[np.ndarray] = []
        for offsets in levels:
            inner = np.diff(offsets)
            first = np.zeros(rows, np.int64)
            some = np.flatnonzero(ends > begins)
            first[some] = inner[begins[some]]
            if len(sizes):
                for row in some.tolist():
                    if (inner[begins[row] : ends[row]] != first[row]).any():
                        self.bad.setdefault(row, f"the lists in the column {self.name} have unequal lengths")
            sizes.append(first)
            begins, ends = offsets[begins], offsets[ends]
        return begins, np.stack(sizes, axis=1) if sizes else np.zeros((rows, 0), np.int64)

    def _mark(self, wrong: np.ndarray, reason: str) -> None:
        """Makes the rows unusable in which a value is ``wrong``."""
        before = np.concatenate([[0], np.cumsum(wrong)])
        ends = self._starts + self.shapes.prod(axis=1)
        for row in np.flatnonzero(before[ends] > before[self._starts]).tolist():
            self.bad.setdefault(row, reason)

    def take(self, rows: np.ndarray, shape: tuple[int, ...], pad: Any = None) -> np.ndarray:
        """Returns the tensors of ``rows`` as one array [len(rows), *shape]. Fills the end of each axis of a smaller
        tensor with ``pad``."""
        size = int(np.prod(shape))
        starts = self._starts[rows]
        if pad is None or (self.shapes[rows] == shape).all():
            if len(rows) and (np.diff(starts) == size).all():  # the rows lie one after the other
                found = self._values[starts[0] : starts[0] + size * len(rows)]
            else:
                found = self._values[starts[:, None] + np.arange(size)]
            return found.reshape(len(rows), *shape)
        made = np.full((len(rows), *shape), pad, self._values.dtype)
        for at, row in enumerate(rows):
            own = tuple(self.shapes[row])
            start = self._starts[row]
            made[at][tuple(map(slice, own))] = self._values[start : start + int(np.prod(own))].reshape(own)
        return made


def _converted(name: str, values: pa.Array, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns all values of a column in the dtype of the input, and tells which values the dtype doesn't have. Floats
    may be rounded. Raises ``BadData`` for values of another kind, such as text for numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, dtype = values.type, numpy_dtype(spec.dtype)
    if spec.dtype == "string":
        fits = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    elif pa.types.is_boolean(kind):
        fits = dtype.kind in "biu"
    elif pa.types.is_integer(kind):
        fits = dtype.kind in "iu" or spec.is_float
    else:
        fits = pa.types.is_floating(kind) and spec.is_float
    if not fits:
        raise BadData(
            f"the column {name} holds values of the type {kind}, but the input is {spec}; write the column as "
            f"{spec.dtype}, or name another column with {option('columns')}"
        )
    if values.null_count and spec.dtype != "string":
        values = pc.fill_null(values, pa.scalar(False if pa.types.is_boolean(kind) else 0, kind))
    found: np.ndarray = values.to_numpy(zero_copy_only=False)
    if found.dtype == dtype:
        return found, np.zeros(0, bool)
    with np.errstate(over="ignore", invalid="ignore"):
        made = found.astype(dtype)
        if found.dtype.kind == "f":
            return made, np.isfinite(found) & ~np.isfinite(made.astype(np.float64))
        if spec.is_float:
            return made, made.astype(found.dtype) != found
    limits = np.iinfo(dtype)
    return made, (found < limits.min) | (found > limits.max)


def column_of(tensors: Sequence[np.ndarray], dtype: str, axes: Sequence[int | str]) -> pa.Array:
    """Returns a column with a row for each tensor. ``axes`` are the dims of one row, with a name for a dynamic dim. If
    all dims are fixed, ``tensors`` may also be one array [rows, *axes].

    The type depends on ``axes`` and ``dtype`` alone, so all files of a dataset have the same type. A dtype that Parquet
    doesn't have, such as bfloat16, becomes float32.
    """
    import pyarrow as pa

    flat = np.concatenate([np.empty(0, numpy_dtype(dtype)), *(np.asarray(t).reshape(-1) for t in tensors)])
    if dtype == "string":
        column = pa.array([v.decode() if isinstance(v, bytes) else str(v) for v in flat], pa.string())
    else:
        column = pa.array(flat.astype(np.float32) if dtype.startswith(("bfloat", "float8")) else flat)
    if all(isinstance(size, int) for size in axes):
        for size in reversed(axes):
            column = pa.FixedSizeListArray.from_arrays(column, size)
        return column
    shapes = np.array([t.shape for t in tensors], np.int64).reshape(len(tensors), len(axes))
    for axis in reversed(range(len(axes))):
        sizes = np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1))
        column = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32()), column)
    return column


def check_columns(found: Mapping[str, Any], wanted: Mapping[str, str], file: Any) -> None:
    """Raises ``BadData`` if a column that an input needs is not in ``file``."""
    for name, column in wanted.items():
        if column not in found:
            raise BadData(
                f"{file} has no column {column} for the input {name}; the columns are {', '.join(found)}; name the "
                f"column with {option('columns', {name: 'COLUMN'})}"
            )


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
