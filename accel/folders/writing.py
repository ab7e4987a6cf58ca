"""Writes files beside their final names, and turns the system's errors into ``CannotWrite``."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.errors import NO_SPACE, CannotWrite
from accel.spelling import is_command_line

_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
# Something else has the name of a folder or of a file.
_TAKEN = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


@contextmanager
def writing(path: Path | None = None) -> Iterator[None]:
    """Turns an ``OSError`` of the system in the block into ``CannotWrite``. The block writes to ``path``, or to the
    path that the ``OSError`` names. Errors of a connection and of a wait aren't about a file and pass through."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise cannot_write(error, path) from error


def cannot_write(error: OSError, path: Path | None = None) -> CannotWrite:
    """Returns the error that says why ``path``, or the path that ``error`` names, can't be written, and what helps."""
    where = path or error.filename2 or error.filename or "a file"
    another = "-o" if is_command_line() else "path"
    if error.errno in _NO_PERMISSION:
        return CannotWrite(f"no permission to write {where}; choose another {another}")
    if error.errno in NO_SPACE:
        output = "-o" if is_command_line() else "the output"
        return CannotWrite(
            f"no space left for {where}; free some, or point {output} and ACCEL_CACHE_DIR to another disk"
        )
    if error.errno in _TAKEN:
        return CannotWrite(f"{where}: {error.strerror}; choose another {another}")
    if error.errno == errno.ENOENT:  # also if a file system such as /proc makes no folders
        return CannotWrite(f"{where} can't be made; choose another {another}")
    return CannotWrite(f"{where}: {error.strerror or error}; check the path and the disk")


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and the folders above it if they are missing. Raises ``CannotWrite``."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of ``path``, to write a file to.

    Renames the temporary file to ``path`` at the end, or removes the file if the block raises an error. Raises
    ``CannotWrite`` if the file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    with writing(path):
        try:
            yield temporary
            temporary.replace(path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)
