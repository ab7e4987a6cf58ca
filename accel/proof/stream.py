"""Reads the user's data one batch at a time, so that calibration can use any number of samples."""

from __future__ import annotations

import contextlib
import itertools
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accel.errors import BadData, one_line
from accel.signature import Signature

from .data import at_sizes, batch_plan, check_samples_first, data_files, fitting, place, single_array, unreadable

if TYPE_CHECKING:
    import numpy as np


# The maximum compression ratio of deflate.
_MOST_DEFLATED = 1032

# The first bytes of a .npy file.
_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class SampleStream:
    """Yields the same batches as ``Dataset.batches``, but holds only one batch in memory. An array in Fortran order is
    read whole, because its samples are not contiguous.
    """

    path: Path
    signature: Signature

    def __len__(self) -> int:
        """Returns the number of samples, read from the headers.

        Raises ``BadData`` if a file can't be read or lacks an input.
        """
        return sum(self._count(file) for file in data_files(self.path))

    def batches(self, size: int, limit: int | None = None, skip: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Yields feeds of at most ``size`` samples each, with at most ``limit`` samples in total. If the model has a
        fixed batch size, all feeds have this size. Leaves out the first ``skip`` batches. Raises ``BadData`` for
        samples that don't fit the signature or hold NaN.
        """
        number = 0
        for file, group in itertools.groupby(self._plan(size, limit), key=lambda entry: entry[0]):
            with closing(_Opened(file, self.signature)) as opened:
                for _, start, take in group:
                    if number < skip:
                        opened.pass_over(take)
                    else:
                        yield opened.read(take, start)
                    number += 1

    def shaped(self, sizes: Mapping[str, int], start: int = 0) -> dict[str, np.ndarray]:
        """Returns the same feeds as ``Dataset.shaped``. Reads the whole file only for a feed that wraps around from the
        last sample of the file to the first sample."""
        files = data_files(self.path)
        file = files[start % len(files)]
        wanted = {spec.name: spec.resolve(sizes) for spec in self.signature.inputs}
        most = max((shape[0] for shape in wanted.values() if shape), default=1)
        with closing(_Opened(file, self.signature)) as opened:
            count = len(opened)
            at = start % count
            around = at + most > count
            first, number = (0, count) if around else (at, most)
            opened.pass_over(first)
            part = opened.read(number, first)
        return at_sizes(self.signature, part, sizes, at - first)

    def batch_count(self, size: int, limit: int | None = None) -> int:
        """Returns the number of batches that ``batches`` yields."""
        return len(self._plan(size, limit))

    def _plan(self, size: int, limit: int | None) -> list[tuple[Path, int, int]]:
        """Returns (file, first sample, number of samples) of each batch."""
        files = data_files(self.path)
        counts = (self._count(file) for file in files)
        return [(files[at], start, take) for at, start, take in batch_plan(self.signature, counts, size, limit)]

    def _count(self, file: Path) -> int:
        with closing(_Opened(file, self.signature)) as opened:
            return len(opened)


class _Opened:
    """The arrays of one file, each read from front to back."""

    def __init__(self, file: Path, signature: Signature) -> None:
        self._file = file
        self._signature = signature
        self._stack = ExitStack()
        self._members: dict[str, _Member] = {}
        check_samples_first(signature)
        try:
            self._open()
            self._check_counts()
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
            self.close()
            raise _unreadable(file, error) from error
        except BadData:
            self.close()
            raise

    def _check_counts(self) -> None:
        first = self._signature.inputs[0].name
        for name, member in self._members.items():
            if not member.shape:
                spec = self._signature.input(name)
                raise BadData(
                    f"{place(self._file)}: input {name!r} has shape [], but the model takes {spec}; change the shape"
                )
            if len(member) != len(self):
                raise BadData(
                    f"{place(self._file)}: input {name!r} has {len(member)} samples, but input {first!r} has "
                    f"{len(self)} samples; give every input the same number of samples"
                )
        if not len(self):
            raise BadData(f"{place(self._file)} holds no samples; save at least one")

    def _open(self) -> None:
        archive = self._stack.enter_context(zipfile.ZipFile(self._file))
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        for spec in self._signature.inputs:
            if spec.name not in names:
                has = ", ".join(sorted(names)) or "none"
                raise BadData(
                    f"{place(self._file)} has no array {spec.name!r} (its arrays: {has}); name the arrays like the "
                    "model's inputs"
                )
            stream = self._stack.enter_context(archive.open(f"{spec.name}.npy"))
            says = archive.getinfo(f"{spec.name}.npy").file_size
            most = _MOST_DEFLATED * self._file.stat().st_size
            self._members[spec.name] = _Member(stream, min(says, most))

    def __len__(self) -> int:
        return len(self._members[self._signature.inputs[0].name])

    def read(self, count: int, start: int) -> dict[str, np.ndarray]:
        try:
            arrays = {name: member.read(count) for name, member in self._members.items()}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
            raise _unreadable(self._file, error) from error
        return {name: fitting(self._file, value, name, self._signature, start) for name, value in arrays.items()}

    def pass_over(self, count: int) -> None:
        for member in self._members.values():
            member.pass_over(count)

    def close(self) -> None:
        self._stack.close()


class _Member:
    """One array of an .npz file, read from front to back. ``size`` is the largest possible number of bytes of the
    array."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        from numpy.lib import format as npy

        self._stream = stream
        version = npy.read_magic(stream)
        read_header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        self.shape, fortran, self._dtype = read_header(stream)
        if self._dtype.hasobject:
            raise ValueError("it holds pickled objects")
        if math.prod(self.shape) * self._dtype.itemsize > size:
            raise EOFError("it ends before its last sample")
        self._at = 0
        self._whole: np.ndarray | None = None
        if fortran and len(self.shape) > 1:
            flat = self._take(math.prod(self.shape))
            self._whole = flat.reshape(self.shape, order="F")

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    def read(self, count: int) -> np.ndarray:
        self._at += count
        if self._whole is not None:
            return self._whole[self._at - count : self._at]
        return self._take(count * math.prod(self.shape[1:])).reshape(count, *self.shape[1:])

    def pass_over(self, count: int) -> None:
        self._at += count
        if self._whole is None:
            self._stream.seek(count * math.prod(self.shape[1:]) * self._dtype.itemsize, 1)

    def _take(self, values: int) -> np.ndarray:
        import numpy as np

        body = self._stream.read(values * self._dtype.itemsize)
        if len(body) < values * self._dtype.itemsize:
            raise EOFError("it ends before its last sample")
        if self._at == len(self):
            self._stream.read(1)  # zipfile checks the checksum when the end of the file is read
        return np.frombuffer(body, self._dtype)


def _unreadable(file: Path, error: Exception) -> BadData:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        if stream.read(len(_NPY)) == _NPY:
            return single_array(file)
    reason = one_line(error, 120)
    return unreadable(file, reason)
