"""Keeps the results of a dataset in a folder, so that an interrupted run goes on where it stopped.

A part is finished once its file is there, and the file appears in one step. So each row is in the results once, however
often the run is interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.artifact import beside
from accel.errors import UsageError
from accel.folders.owner import OWNER, owned
from accel.folders.writing import make_folder, writing
from accel.spelling import option

from .parquet import Part

if TYPE_CHECKING:
    import pyarrow as pa

_RECORD = "dataset.json"
_FAILED = "failed"
# Names what differs if a folder holds other results.
_FIELDS = {
    "model": "another model",
    "dataset": "another dataset",
    "columns": "other columns",
    "keep": "other kept columns",
    "pad": "other padding",
}


class ResultFolder:
    """The folder ``path``, with the results of the run that ``about`` describes. Only one process at a time writes into
    the folder."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Opens a context in which this process alone writes into the folder.

        Raises ``UsageError`` if the folder holds something else, and ``CannotWrite`` if another process writes into it.
        """
        with writing(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"{self.path} is a file; choose another {option('out')}")
            names = {p.name for p in self.path.iterdir()} if self.path.exists() else set()
        if names - {OWNER} and _RECORD not in names:
            raise UsageError(f"{self.path} holds other files; choose another {option('out')}")
        make_folder(self.path)
        with owned(self.path, None):
            self._check_record()
            for left in (*self.path.glob(".part-*"), *self.path.glob(f"{_FAILED}/.part-*")):
                left.unlink()
            make_folder(self.path / _FAILED)
            yield

    def _check_record(self) -> None:
        """Takes over the number of rows a part from an earlier run, or writes the record of this run."""
        record = self.path / _RECORD
        if record.exists() and any(self.path.glob("part-*")):
            try:
                earlier = json.loads(record.read_text())
                self.about["rows_a_part"] = int(earlier["rows_a_part"])
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{record} is damaged; choose another {option('out')}") from None
            for field, said in _FIELDS.items():
                if earlier.get(field) != json.loads(json.dumps(self.about[field])):
                    raise UsageError(f"{self.path} holds the results of {said}; choose another {option('out')}")
            return
        with beside(record) as temporary:
            temporary.write_text(json.dumps(self.about, indent=1))

    def finished(self, part: Part) -> bool:
        """Tells whether the results of ``part`` are written."""
        return self._file(part).exists()

    def write(self, part: Part, results: pa.Table, failed: pa.Table) -> None:
        """Writes the results of a part, and the rows that failed."""
        if failed.num_rows:
            _write(failed, self.path / _FAILED / self._file(part).name)
        _write(results, self._file(part))

    def _file(self, part: Part) -> Path:
        return self.path / f"part-{part.number:05}.parquet"

    @property
    def failed(self) -> Path:
        """Returns the folder with the rows that failed."""
        return self.path / _FAILED


def _write(table: pa.Table, file: Path) -> None:
    import pyarrow.parquet as pq

    with beside(file) as temporary, temporary.open("wb") as stream:
        pq.write_table(table, stream)
        stream.flush()
        os.fsync(stream.fileno())  # a file that has its name has its bytes, also after a power cut
