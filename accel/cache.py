"""Caches the results of stages, so that a finished stage never runs twice, and a killed run continues at its last
stage.

An entry of the cache is a folder, named by the sha256 of everything that could change the stage's result. Entries are
written under a temporary name and then renamed, so that an entry is either complete or absent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from accel.artifact import Artifact, beside
from accel.errors import AccelError, CannotWrite, ChainBroken

_STALE_SECONDS = 24 * 3600
_UNFINISHED_SECONDS = 7 * 24 * 3600

_unfinished: ContextVar[Path | None] = ContextVar("_unfinished", default=None)
_kept: ContextVar[Path | None] = ContextVar("_kept", default=None)


def unfinished() -> Path | None:
    """Returns the folder for intermediate results of the running stage. Returns None outside ``run_stage``. If the
    stage is killed, the next run of the stage with the same input and options finds the intermediate results in this
    folder.
    """
    return _unfinished.get()


def kept_folder() -> Path | None:
    """Returns a folder for files that make later runs of stages faster and never change a result, such as timing
    caches.

    Returns None outside ``run_stage``.
    """
    return _kept.get()


_DEFAULT_GIGABYTES = 20.0


def users_cache() -> Path:
    """Returns the path of the user's cache: ``$ACCEL_CACHE_DIR``, or else the system's folder for caches."""
    import platformdirs

    given = os.environ.get("ACCEL_CACHE_DIR")
    return Path(given) if given else platformdirs.user_cache_path("accel")


class StageCache:
    """Stores the results of stages in the folder ``root``. The default is ``$ACCEL_CACHE_DIR`` or, if this variable
    isn't set, the user's cache folder (platformdirs).

    Removes the least recently used entries if the cache exceeds ``$ACCEL_CACHE_GB`` gigabytes (20 by default). Files
    that fail a gate are kept in the folder ``rejected`` (default: a subfolder of ``root``).
    """

    def __init__(self, root: Path | None = None, *, rejected: Path | None = None) -> None:
        self.root = (root or users_cache()).absolute()
        self.rejected = rejected or self.root / "rejected"
        self._stages = self.root / "stages"
        self._records = self.root / "records"
        self._scratch = self.root / "scratch"
        for folder in (self._stages, self._records, self._scratch):
            self._make(folder)

    def _make(self, folder: Path) -> Path:
        """Makes a folder of the cache, and returns it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(
                f"can't write the cache folder {self.root} ({error.strerror}); set ACCEL_CACHE_DIR to another folder"
            ) from error
        return folder

    def entry(self, key: str) -> Path:
        """Returns the folder of the entry ``key``, which may not exist."""
        return self._stages / key

    def find(self, key: str) -> Artifact | None:
        """Returns the artifact of a finished stage, or None. Checks the hashes of the entry, and removes a damaged
        entry."""
        folder = self.entry(key)
        try:
            main = (folder / "main").read_text().strip()
            artifact = Artifact.open(folder / main)
            if artifact.manifest is None or artifact.hashes() != dict(artifact.manifest.files):
                raise ChainBroken(f"the cache entry {folder} is damaged")
        except FileNotFoundError:
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
            return None
        except (OSError, AccelError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # the entry with the oldest time is removed first
        return artifact

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yields an empty folder on the file system of the cache, for the files of a new entry. Removes the folder at
        the end of the block."""
        self._drop_stale()
        folder = self._make(self._scratch / f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def resuming(self, key: str) -> Iterator[None]:
        """Makes the stage's ``unfinished()`` folder, and removes the folder after the block has succeeded. If the block
        fails, keeps the folder, unless the folder is empty."""
        folder = self._make(self.root / "unfinished" / key)
        token, kept = _unfinished.set(folder), _kept.set(self.root / "kept")
        try:
            yield
        finally:
            _unfinished.reset(token)
            _kept.reset(kept)
            with contextlib.suppress(OSError):
                folder.rmdir()  # removes only an empty folder
        shutil.rmtree(folder, ignore_errors=True)

    def store(self, key: str, folder: Path, main: str) -> Artifact:
        """Renames a finished ``folder`` to the entry ``key``. Returns the artifact with the main file ``main``."""
        (folder / "main").write_text(main)
        return Artifact.open(self.keep(key, folder) / main)

    def keep(self, key: str, folder: Path) -> Path:
        """Renames a finished ``folder`` to the entry ``key``. Returns the path of the entry."""
        with contextlib.suppress(OSError):  # another process may have stored the entry first
            folder.rename(self.entry(key))
        self._prune(keep=key)
        return self.entry(key)

    def holds(self, path: Path) -> bool:
        """Tells whether ``path`` is a file of a cache entry."""
        return path.resolve().parent.parent == self._stages.resolve()

    def get_record(self, kind: str, key: str) -> Any | None:
        """Returns the JSON value that ``put_record`` stored under ``key``, such as a measurement. Returns None if no
        value is stored under ``key``."""
        try:
            body = json.loads((self._records / f"{kind}-{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return body

    def put_record(self, kind: str, key: str, value: Any) -> None:
        """Stores a small JSON value under ``key``."""
        with beside(self._records / f"{kind}-{key}.json") as temporary:
            temporary.write_text(json.dumps(value))

    def result_folder(self) -> Path:
        """Returns a new folder for the result of a call that names no folder. The folder is removed after a week."""
        self._drop_stale()
        return self.root / "results" / uuid.uuid4().hex

    def _drop_stale(self) -> None:
        """Removes old results, and the folders of processes that were killed."""
        for folder in self._scratch.iterdir():
            pid = folder.name.partition("-")[0]
            with contextlib.suppress(OSError):
                if not _alive(pid) or time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        for folder in (*(self.root / "unfinished").glob("*"), *(self.root / "results").glob("*")):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _UNFINISHED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)

    def _prune(self, keep: str) -> None:
        limit = float(os.environ.get("ACCEL_CACHE_GB", _DEFAULT_GIGABYTES)) * 1e9
        entries = []
        for entry in self._stages.iterdir():
            with contextlib.suppress(OSError):  # another process may have removed the entry
                if entry.name != keep:
                    entries.append((entry.stat().st_mtime, _size(entry), entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= limit:
                break
            shutil.rmtree(entry, ignore_errors=True)
            total -= size


@functools.lru_cache(maxsize=100_000)
def _size(entry: Path) -> int:
    """Returns the size of an entry in bytes. Remembers the size, because the files of an entry never change."""
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
