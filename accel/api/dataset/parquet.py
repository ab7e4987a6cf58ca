"""Reads the rows of Parquet files in parts, in an order that doesn't change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import BadData, MissingExtra, one_line

if TYPE_CHECKING:
    import pyarrow as pa

# A part holds about this many bytes of the columns in memory, and at most this many rows. An interrupted run repeats at
# most one part.
_PART_BYTES = 64 << 20
_PART_ROWS = 1 << 13
_FOOTER_TAIL = 8  # the bytes after the footer: its length, and the magic number


@dataclass(frozen=True)
class Part:
    """Rows that are read, run and written together. The rows are ``start`` to ``start + rows`` of the row group
    ``group`` in ``file``. ``first`` is the number of rows of the file before the part. ``number`` counts the parts of
    the dataset."""

    number: int
    file: Path
    group: int
    start: int
    rows: int
    first: int


class ParquetDataset:
    """The Parquet files of ``path``, which is a file, or a folder whose files end in ``.parquet``. Subfolders are
    included, and the files are sorted by name.

    Raises ``BadData`` if a file can't be read, or if there are no files or rows.
    """

    def __init__(self, path: Path) -> None:
        self.root = path if path.is_dir() else path.parent
        self.files = sorted(p for p in path.rglob("*.parquet") if p.is_file()) if path.is_dir() else [path]
        if not path.exists():
            raise BadData(f"{path} does not exist; check the path of the dataset")
        if not self.files:
            raise BadData(f"the folder {path} has no files that end in .parquet; check the path of the dataset")
        self._about = [_metadata(file) for file in self.files]
        self.rows = sum(about.num_rows for about in self._about)
        if not self.rows:
            raise BadData(f"the dataset {path} has no rows; check the path of the dataset")

    def schemas(self) -> Iterator[tuple[Path, pa.Schema]]:
        """Yields each file with its columns."""
        for file, about in zip(self.files, self._about, strict=True):
            yield file, about.schema.to_arrow_schema()

    def identity(self) -> list[list[Any]]:
        """Returns the name, the size and the hash of the footer of each file. A footer tells where each column lies and
        what it holds, so the hash changes if the rows change in number, place or range."""
        return [[str(file.relative_to(self.root)), file.stat().st_size, _footer_sha256(file)] for file in self.files]

    def rows_a_part(self) -> int:
        """Returns a number of rows that fits into memory many times."""
        nbytes = sum(a.row_group(g).total_byte_size for a in self._about for g in range(a.num_row_groups))
        return int(max(1, min(_PART_ROWS, _PART_BYTES * self.rows // max(nbytes, 1))))

    def parts(self, most: int) -> list[Part]:
        """Divides each row group into parts of at most ``most`` rows."""
        found: list[Part] = []
        for file, about in zip(self.files, self._about, strict=True):
            first = 0
            for group in range(about.num_row_groups):
                rows = about.row_group(group).num_rows
                for start in range(0, rows, most):
                    size = min(most, rows - start)
                    found.append(Part(len(found), file, group, start, size, first + start))
                first += rows
        return found


def read(parts: Sequence[Part], columns: Sequence[str] | None = None) -> Iterator[tuple[Part, pa.Table]]:
    """Yields each part with its rows. Reads each row group as a stream, because a row group may be larger than the
    memory. Raises ``BadData`` if the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened: tuple[Path, int] | None = None
    stream: Iterator[pa.RecordBatch] = iter(())
    waiting: list[pa.RecordBatch] = []
    at = 0  # the row of the row group at which ``waiting`` begins
    for part in parts:
        try:
            if opened != (part.file, part.group) or part.start < at:
                file = pq.ParquetFile(part.file)
                # A batch of a stream ends where the next part begins, or earlier.
                stream = file.iter_batches(part.rows, row_groups=[part.group], columns=columns)
                opened, waiting, at = (part.file, part.group), [], 0
            while at + sum(batch.num_rows for batch in waiting) < part.start + part.rows:
                waiting.append(next(stream))
            table = pa.Table.from_batches(waiting)
        except (OSError, pa.ArrowException, StopIteration) as error:
            reason = "it has fewer rows than its footer says" if isinstance(error, StopIteration) else one_line(error)
            raise BadData(
                f"row group {part.group} of {part.file} can't be read ({reason}); write the file again"
            ) from None
        begin = part.start - at
        rest = table.slice(begin + part.rows)
        waiting = rest.to_batches() if rest.num_rows else []
        at = part.start + part.rows
        yield part, table.slice(begin, part.rows)


def _metadata(file: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", "datasets") from None
    try:
        return pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise BadData(f"{file} is no complete Parquet file ({one_line(error)}); write the file again") from None


def _footer_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(-_FOOTER_TAIL, 2)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(-_FOOTER_TAIL - length, 2)
        return hashlib.sha256(stream.read(length)).hexdigest()
