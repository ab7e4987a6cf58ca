"""Runs a model on every row of a dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from accel.errors import BadData, BadInputSpec, UsageError
from accel.progress import report, shows_progress
from accel.sources.source import Model, SourceOptions, known_keywords
from accel.spelling import option

from ..load import load
from .columns import check_columns
from .folder import ResultFolder
from .parquet import ParquetDataset, Part, read
from .rows import Rows

if TYPE_CHECKING:
    import pyarrow as pa

    from accel.signature import Signature

# The columns that tell where a failed row comes from, and why it failed.
_FILE, _ROW, _ERROR = "accel_file", "accel_row", "accel_error"
# The run ends if this many rows have failed and none has worked.
_HOPELESS = 100
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What ``infer`` has done. ``rows`` counts all rows of the dataset. ``earlier`` counts the rows that an earlier run
    has finished, and ``failed`` the rows of this run that failed. ``seconds`` is the time of this run."""

    out: Path
    rows: int
    earlier: int
    failed: int
    seconds: float
    failed_in: Path | None = None

    @property
    def rows_a_second(self) -> float:
        """Returns the rows that this run has finished in each second."""
        return (self.rows - self.earlier) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        texts = {"out": str(self.out), "failed_in": str(self.failed_in) if self.failed_in else None}
        return {**asdict(self), **texts, "rows_a_second": self.rows_a_second}


@shows_progress
@known_keywords
def infer(
    model: Model,
    dataset: str | Path,
    *,
    out: str | Path,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
    pad: Mapping[str, float] | None = None,
    batch: int | None = None,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    **about: Unpack[SourceOptions],
) -> DatasetReport:
    """Runs ``model`` on each row of the Parquet files ``dataset`` (a file or a folder), and writes Parquet files with
    the outputs into the folder ``out``.

    Each input reads the column with its name, or the column that ``columns`` maps the input to. A row of a column is
    the input without the batch dim, as nested lists. The results have a column for each output, after the columns
    ``keep``: by default all columns that aren't inputs. The rows keep their order. Rows on which the model fails are
    left out, and written into the folder ``failed`` with the reason.

    A run has at most ``batch`` rows of equal shapes. The default is the largest batch that was verified, up to 32.
    ``pad`` maps inputs to the value that fills the end of short rows, so that rows of other lengths share a run. The
    outputs are cut to the length of each row.

    The same call goes on where an interrupted run stopped. ``runtime``, ``options`` and the other arguments are those
    of ``accel.load``.

    Raises ``BadData`` if the dataset can't be read, doesn't fit the model, or if all rows fail. Raises ``UsageError``
    if ``out`` holds something else, and ``CannotWrite`` if another process writes into ``out``.

    >>> accel.infer("out/", "texts.parquet", out="scores/", pad={"input_ids": 0, "attention_mask": 0})  # doctest: +SKIP
    """
    began = time.monotonic()
    found = ParquetDataset(Path(dataset))
    with ExitStack() as stack:
        session = stack.enter_context(load(model, runtime=runtime, options=options, **about))
        places = _columns_of(session.signature, columns or {}, found)
        kept = _kept(found, places, keep, session.signature)
        padding = _checked_pad(session.signature, pad or {})
        rows = Rows(session, places, padding, batch)
        for _, schema in found.schemas():
            rows.load(schema.empty_table())  # so that a column of a wrong type in the last file is found now
        record = {
            "format": 1,
            "model": session.artifact.digest,
            "dataset": found.identity(),
            "columns": places,
            "keep": kept,
            "pad": padding,
            "rows_a_part": found.rows_a_part(),
        }
        folder = ResultFolder(Path(out), record)
        stack.enter_context(folder.opened())
        parts = found.parts(folder.about["rows_a_part"])
        earlier = sum(part.rows for part in parts if folder.finished(part))
        left = [part for part in parts if not folder.finished(part)]
        failed = _run(rows, left, folder, kept, found, earlier)
    return DatasetReport(
        out=Path(out),
        rows=found.rows,
        earlier=earlier,
        failed=failed,
        seconds=time.monotonic() - began,
        failed_in=folder.failed if failed else None,
    )


def _run(
    rows: Rows, parts: Sequence[Part], folder: ResultFolder, kept: Sequence[str], dataset: ParquetDataset, earlier: int
) -> int:
    """Runs and writes ``parts``. Returns the number of rows that failed. The next part is read, and the last part is
    written, while the model runs."""
    import pyarrow as pa

    began, done, failed = time.monotonic(), 0, 0
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        loaded = ((part, table, rows.load(table)) for part, table in read(parts))
        written: Future[None] | None = None
        for part, table, columns in _ahead(loaded, reader.submit):
            said = partial(_say, earlier, done + failed, dataset.rows, began)
            arrays, worked, errors = rows.run(columns, part.rows, said)
            results = pa.table({**{name: table[name].take(worked) for name in kept}, **arrays})
            done, failed = done + len(worked), failed + len(errors)
            if not done and not earlier and (failed >= _HOPELESS or failed == dataset.rows):
                first = min(errors)
                raise BadData(
                    f"all of the first {failed} rows fail; row {part.first + first} of {part.file}: {errors[first]}"
                )
            if written is not None:
                written.result()
            written = writer.submit(folder.write, part, results, _set_aside(part, table, errors, dataset))
        if written is not None:
            written.result()
    return failed


def _ahead(items: Iterable[_Item], submit: Callable[..., Future[_Item | None]]) -> Iterator[_Item]:
    """Yields ``items``, each of which ``submit`` makes while the caller works on the item before."""
    source = iter(items)
    coming = submit(next, source, None)
    while (item := coming.result()) is not None:
        coming = submit(next, source, None)
        yield item


def _say(earlier: int, before: int, rows: int, began: float, done: int) -> None:
    """Reports the progress after ``done`` rows of a part. This run has finished ``before`` rows in other parts, and an
    earlier run ``earlier`` rows."""
    rate = (before + done) / max(time.monotonic() - began, 1e-3)
    at = earlier + before + done
    report(f"running the model on row {at:,} of {rows:,}, {rate:,.0f} rows/s", at / rows)


def _set_aside(part: Part, table: pa.Table, errors: Mapping[int, str], dataset: ParquetDataset) -> pa.Table:
    """Returns the failed rows with all their columns, their place and the reason."""
    import pyarrow as pa

    numbers = sorted(errors)
    failed = table.take(pa.array(numbers, pa.int64()))
    name = str(part.file.relative_to(dataset.root))
    about = {
        _FILE: pa.array([name] * len(numbers), pa.string()),
        _ROW: pa.array([part.first + number for number in numbers], pa.int64()),
        _ERROR: pa.array([errors[number] for number in numbers], pa.string()),
    }
    for column, values in about.items():
        failed = failed.append_column(column, values)
    return failed


def _columns_of(signature: Signature, given: Mapping[str, str], dataset: ParquetDataset) -> dict[str, str]:
    """Returns the column of each input. An optional input without a column is left out."""
    names = [spec.name for spec in signature.inputs]
    if unknown := [name for name in given if name not in names]:
        raise BadInputSpec(f"the model has no input {unknown[0]}; the inputs are: {signature.describe_inputs()}")
    found = {name: given.get(name, name) for name in names}
    for number, (file, schema) in enumerate(dataset.schemas()):
        if not number:
            for spec in signature.inputs:
                if spec.optional and spec.name not in given and found[spec.name] not in schema.names:
                    del found[spec.name]
        check_columns(schema.names, found, file)
    return found


def _kept(
    dataset: ParquetDataset, places: Mapping[str, str], keep: Sequence[str] | None, signature: Signature
) -> list[str]:
    """Returns the columns that the results keep."""
    files = list(dataset.schemas())
    first = files[0][1]
    kept = list(keep) if keep is not None else [n for n in first.names if n not in places.values()]
    outputs = [spec.name for spec in signature.outputs]
    for name in kept:
        if name in outputs:
            raise UsageError(
                f"the column {name} and an output have the same name; leave the column out with "
                f"{option('keep')} and the names of the other columns"
            )
    for file, schema in files:
        for name in kept:
            if name not in schema.names:
                raise BadData(f"{file} has no column {name}; the columns are {', '.join(schema.names)}")
            if not schema.field(name).type.equals(first.field(name).type):
                raise BadData(
                    f"the column {name} has the type {schema.field(name).type} in {file}, but "
                    f"{first.field(name).type} in {files[0][0]}; write both files with one type, or leave the column "
                    f"out with {option('keep')} and the names of the other columns"
                )
    return kept


def _checked_pad(signature: Signature, pad: Mapping[str, float]) -> dict[str, float]:
    """Returns ``pad`` as numbers. Raises ``BadInputSpec`` for an input that has no dim to pad."""
    for name in pad:
        spec = next((spec for spec in signature.inputs if spec.name == name), None)
        if spec is None:
            raise BadInputSpec(f"the model has no input {name}; the inputs are: {signature.describe_inputs()}")
        if spec.dtype == "string" or not any(isinstance(dim, str) for dim in spec.shape[1:]):
            raise BadInputSpec(f"the input {spec} has no dynamic dim to pad; leave {name} out of {option('pad')}")
    return dict(pad)
