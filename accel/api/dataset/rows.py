"""Runs a model on the rows of a table, in batches of equal shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadFeeds, RunFailed, UsageError, shortened
from accel.signature import TensorSpec, is_sum, numpy_dtype
from accel.signature.bounds import free_dims, size_at
from accel.signature.decoder import is_decoder
from accel.sources.onnx.file import ROWS_SHARE_SCALES

from .columns import Column, column_of

if TYPE_CHECKING:
    import pyarrow as pa

    from accel.runtimes.base import BaseSession

_BATCH = 32
# A session with several streams gets this many batches for each stream at a time.
_AHEAD = 4


@dataclass
class _Outputs:
    """The outputs of each run, with the rows that it had. ``errors`` maps a failed row to the reason."""

    runs: list[tuple[np.ndarray, dict[str, np.ndarray]]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


class Rows:
    """Runs ``session`` on rows. ``columns`` maps an input to its column, and ``pad`` maps an input to the value that
    fills short rows. ``batch`` is the number of rows a run. The default is the largest batch that was verified, but at
    most 32, or 1 for a dynamic int8 model, in which the rows of a run change each other's outputs a little.

    Raises ``UsageError`` if the outputs don't belong to rows, or if the model is a decoder.
    """

    def __init__(
        self, session: BaseSession, columns: Mapping[str, str], pad: Mapping[str, float], batch: int | None
    ) -> None:
        signature = session.signature
        if is_decoder(signature):
            raise UsageError("a decoder with a KV cache makes tokens one by one; use accel generate")
        self.session, self.signature = session, signature
        self.columns, self.pad = columns, pad
        self.inputs = [spec for spec in signature.inputs if spec.name in columns]
        dim = signature.batch_dim or signature.fixed_batch
        # An input without the batch dim, such as a scalar, has one value for all rows of a run.
        self.shared = dim is None or any(not spec.shape or spec.shape[0] != dim for spec in signature.inputs)
        if dim is not None:
            for spec in signature.outputs:
                if not spec.shape or spec.shape[0] != dim:
                    raise UsageError(
                        f"the first dim of the output {spec} is not {dim!r}, so its values belong to no row; leave the "
                        "output out of the model"
                    )
        self.dim = dim
        self.unit = signature.batch_unit
        self.batch = self._batch(batch)

    def _batch(self, asked: int | None) -> int:
        dim = self.dim
        most = self.signature.dims[dim].max if isinstance(dim, str) else self.unit
        if self.shared:
            if self.unit != 1:
                raise UsageError(
                    f"the model takes {self.unit} rows a run, but an input without a batch dim has one value a row; "
                    "export the model with a dynamic batch"
                )
            return 1
        usual = 1 if self.session.artifact.properties.get(ROWS_SHARE_SCALES) else _BATCH
        return max(self.unit, (asked or min(usual, most)) // self.unit * self.unit)

    def axes(self, spec: TensorSpec) -> tuple[int | str, ...]:
        """Returns the dims of one row of an input or output."""
        return spec.shape[1:] if self._batched(spec) else spec.shape

    def _batched(self, spec: TensorSpec) -> bool:
        return self.dim is not None and bool(spec.shape) and spec.shape[0] == self.dim

    def load(self, table: pa.Table) -> list[Column]:
        """Returns the columns of the inputs. Raises ``BadData`` if a column can't be an input."""
        return [
            Column(self.columns[spec.name], table[self.columns[spec.name]], spec, self.axes(spec))
            for spec in self.inputs
        ]

    def run(
        self, columns: Sequence[Column], count: int, said: Callable[[int], None]
    ) -> tuple[dict[str, pa.Array], np.ndarray, dict[int, str]]:
        """Runs ``count`` rows. Returns the columns of the outputs, the numbers of their rows, and the reason of each
        row that failed. Calls ``said`` with the number of rows that have run."""
        found = _Outputs()
        for column in columns:
            for row, reason in column.bad.items():
                found.errors.setdefault(row, reason)
        for row, reason in self._unequal(columns):
            found.errors.setdefault(row, reason)
        good = np.array([row for row in range(count) if row not in found.errors], np.int64)
        batches = list(self._batches(columns, good))
        step = _AHEAD * self.session.streams if self.session.streams > 1 else 1
        for begin in range(0, len(batches), step):
            some = batches[begin : begin + step]
            said(min(begin * self.batch, count))
            try:
                results = self.session.run_many([self._feeds(columns, rows) for rows in some])
            except (BadFeeds, RunFailed) as error:
                for rows in some:
                    self._run_halves(columns, rows, found, error if len(some) == 1 else None)
                continue
            for rows, outputs in zip(some, results, strict=True):
                self._keep(rows, outputs, found)
        ran = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in found.runs)])
        order = np.argsort(ran)
        arrays = {spec.name: self._column(spec, columns, found, order) for spec in self.signature.outputs}
        return arrays, ran[order], found.errors

    def _unequal(self, columns: Sequence[Column]) -> Iterator[tuple[int, str]]:
        """Yields the rows in which two inputs have other sizes of one dim, such as a mask that is longer than its ids.
        Padding would hide the difference."""
        first: dict[str, tuple[str, np.ndarray]] = {}
        for column, spec in zip(columns, self.inputs, strict=True):
            for axis, dim in enumerate(self.axes(spec)):
                if not isinstance(dim, str) or is_sum(dim):
                    continue
                sizes = column.shapes[:, axis]
                name, others = first.setdefault(dim, (column.name, sizes))
                for row in np.flatnonzero(sizes != others).tolist():
                    one, other = (
                        f"size {n} in the column {c}" for n, c in ((others[row], name), (sizes[row], column.name))
                    )
                    yield row, f"the dim {dim!r} has {one}, but {other}"

    def _column(self, spec: TensorSpec, columns: Sequence[Column], found: _Outputs, order: np.ndarray) -> pa.Array:
        """Returns the column of an output, with the rows in ``order``."""
        axes = self.axes(spec)
        if all(isinstance(size, int) for size in axes):
            empty = np.empty((0, *map(int, axes)), numpy_dtype(spec.dtype))
            whole = np.concatenate([empty, *(outputs[spec.name] for _, outputs in found.runs)])
            return column_of([whole[order]], spec.dtype, axes)
        tensors = []
        for rows, outputs in found.runs:
            for row, value in zip(rows.tolist(), outputs[spec.name], strict=True):
                tensors.append(value[self._inside(columns, row, axes, value.shape)] if self.pad else value)
        return column_of([tensors[at] for at in order.tolist()], spec.dtype, axes)

    def _batches(self, columns: Sequence[Column], good: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the rows of each run. Rows of a run differ only in dims that are padded. Rows are sorted by these
        dims, so that little is padded."""
        soft: list[np.ndarray] = []
        hard: list[np.ndarray] = []
        for column, spec in zip(columns, self.inputs, strict=True):
            for axis, dim in enumerate(self.axes(spec)):
                padded = spec.name in self.pad and isinstance(dim, str)
                (soft if padded else hard).append(column.shapes[good, axis])
        keys = [*reversed(soft), *reversed(hard)]  # the last key is the first to sort by
        order = np.lexsort(keys) if keys else np.arange(len(good))
        rows = good[order]
        cuts = np.zeros(len(rows), bool)
        for key in hard:
            cuts[1:] |= np.diff(key[order]) != 0
        for group in np.split(rows, np.flatnonzero(cuts)):
            for begin in range(0, len(group), self.batch):
                yield group[begin : begin + self.batch]

    def _feeds(self, columns: Sequence[Column], rows: np.ndarray) -> dict[str, np.ndarray]:
        feeds = {}
        missing = -len(rows) % self.unit
        for column, spec in zip(columns, self.inputs, strict=True):
            pad = self.pad.get(spec.name)
            shape = tuple(column.shapes[rows].max(axis=0).tolist())
            if pad is not None:
                shape = tuple(
                    self.signature.dims[dim].up(size) if isinstance(dim, str) and not is_sum(dim) else size
                    for dim, size in zip(self.axes(spec), shape, strict=True)
                )
            value = column.take(rows, shape, pad)
            if missing:
                value = np.concatenate([value, np.repeat(value[-1:], missing, axis=0)])
            feeds[spec.name] = value if self._batched(spec) else value.reshape(value.shape[1:])
        return feeds

    def _run_halves(
        self, columns: Sequence[Column], rows: np.ndarray, found: _Outputs, error: Exception | None = None
    ) -> None:
        """Runs the rows of a batch in halves, so that one bad row doesn't take the other rows along. ``error`` is the
        error of the whole batch, if it has run alone."""
        if error is None:
            try:
                self._keep(rows, self.session.run(self._feeds(columns, rows)), found)
                return
            except (BadFeeds, RunFailed) as own:
                error = own
        if len(rows) == 1:
            found.errors[int(rows[0])] = shortened(error)
            return
        half = len(rows) // 2
        self._run_halves(columns, rows[:half], found)
        self._run_halves(columns, rows[half:], found)

    def _keep(self, rows: np.ndarray, outputs: Mapping[str, np.ndarray], found: _Outputs) -> None:
        """Keeps copies of the outputs of ``rows``, because an output shares its memory with the session."""
        kept = {}
        for spec in self.signature.outputs:
            value = outputs[spec.name]
            kept[spec.name] = value[: len(rows)].copy() if self._batched(spec) else value[None].copy()
        found.runs.append((rows, kept))

    def _inside(
        self, columns: Sequence[Column], row: int, axes: Sequence[Any], shape: Sequence[int]
    ) -> tuple[slice, ...]:
        """Returns the part of a row's output that doesn't come from padding."""
        sizes = {}
        for column, spec in zip(columns, self.inputs, strict=True):
            for axis, dim in enumerate(self.axes(spec)):
                if isinstance(dim, str):
                    sizes[dim] = int(column.shapes[row, axis])
        found = []
        for dim, size in zip(axes, shape, strict=True):
            known = all(name in sizes for name in free_dims(dim))
            found.append(slice(size_at(dim, sizes) if known else size))
        return tuple(found)
