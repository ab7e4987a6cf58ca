"""Mirrors a remote repository (s3, gs, http or another scheme that fsspec reads) into a folder of this machine.

``models/<name>`` is a link to the model's folder in the store. ``store/<digest>/<name>`` is a complete copy of one
state of the model. ``store/<digest>/files.json`` records values of each file, such as the ETag, the modification time
and the size. The values tell whether the remote file has changed.

A changed model is downloaded into a new copy beside the copy in use. Unchanged files become hard links in the new copy
and are not downloaded again. After the download, ``models/<name>`` links to the new copy. Remote names may be hostile,
so names that lead out of their folder are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from accel.artifact import beside
from accel.cache import StageCache
from accel.errors import AccelError, BadRepository, MissingExtra, UnsupportedHere, one_line

from .files import valid_name

log = logging.getLogger("accel.serve")

# Fields of a remote file that change when the file's bytes change. A store sets only some of the fields in ``_MARKS``.
_MARKS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "generation", "VersionId", "LastModified",
    "Last-Modified", "last_modified", "mtime", "updated", "modified", "created",
)  # fmt: skip

_DEEPEST = 6  # The maximum depth of folders in a model. The limit ends the walk through a folder that contains itself.
_KEPT_SECONDS = 600.0  # The seconds that a replaced copy is kept, because another process may still load the copy.
_RECORD = "files.json"


@dataclass(frozen=True)
class _Remote:
    """A remote file or folder of a model. ``mark`` changes when the file's bytes change."""

    address: str
    folder: bool
    size: int | None
    mark: str


class Mirror:
    """Mirrors the models of ``address`` in a local ``folder``, which ``refresh`` updates.

    Raises ``MissingExtra`` if fsspec is not installed. Raises ``UnsupportedHere`` if the library for the address's
    scheme is not installed.
    """

    def __init__(self, address: str, root: Path | None = None) -> None:
        self.address = address.rstrip("/")
        self._files = _open(self.address)
        self._start = str(self._files._strip_protocol(self.address))
        root = root or StageCache().root / "repositories"
        self._root = root / hashlib.sha256(self.address.encode()).hexdigest()[:16]
        self.folder, self._store = self._root / "models", self._root / "store"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._store.mkdir(exist_ok=True)
        self._lock = threading.Lock()

    def refresh(self, name: str | None = None) -> dict[str, str]:
        """Updates all models of the folder, or only the model ``name``. Returns the reason for each model that can't be
        updated.

        If the address can't be read at all, raises ``BadRepository`` and changes nothing.
        """
        with self._lock, self._alone():
            names = [name] if name is not None else self._names()
            failed = {}
            for one in names:
                try:
                    self._update(one)
                except FileNotFoundError:
                    self._remove(one)
                except Exception as error:  # a store may raise any exception; the remaining models are still updated
                    failed[one] = _reason(error)
            if name is None:
                for link in self.folder.iterdir():
                    if link.name not in names:
                        self._remove(link.name)
            self._drop_old()
            return failed

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes from changing the folder."""
        with (self._root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _names(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            found = [leaf for leaf, info in self._list(self._start) if _is_folder(info)]
        except Exception as error:
            raise BadRepository(
                f"can't read the repository {self.address} ({_reason(error)}); check the address and the credentials"
            ) from None
        names = [name for name in found if valid_name(name)]
        for name in set(found) - set(names):
            log.warning("a folder of the repository is no model", extra={"folder": name[:256]})
        if not names:  # during an outage, the listing may be empty, so the local models stay
            raise BadRepository(f"the address {self.address} holds no folders of models; check the address")
        return names

    def _list(self, address: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """For each entry of a remote folder, yields the name and the store's information."""
        for info in self._files.ls(address, detail=True):
            name = str(info["name"])
            if name.rstrip("/") == address.rstrip("/"):  # object stores list a folder as its own entry
                continue
            leaf = name.rstrip("/").rpartition("/")[2]
            if "?" not in leaf:  # in an HTTP listing, a link with "?" sorts the listing and is no file
                yield unquote(leaf) if self.address.startswith("http") else leaf, info

    def _walk(self, address: str, inside: tuple[str, ...]) -> Iterator[tuple[str, _Remote]]:
        if len(inside) > _DEEPEST:
            raise BadRepository(
                f"the folder {address[:300]} is more than {_DEEPEST} levels below its model; use fewer levels of "
                "folders"
            )
        for leaf, info in self._list(address):
            if leaf in ("", ".", "..") or any(c in leaf for c in "/\\\0") or len(leaf) > 255:
                raise BadRepository(
                    f"the folder {address[:300]} holds a file {leaf[:100]!r}, which is no plain file name; rename the "
                    "file"
                )
            place, name = (*inside, leaf), str(info["name"])
            if _is_folder(info):
                yield "/".join(place), _Remote(name, True, None, "folder")
                yield from self._walk(name, place)
            else:
                yield "/".join(place), self._remote(name, info)

    def _remote(self, address: str, info: dict[str, Any]) -> _Remote:
        if not any(info.get(key) for key in _MARKS):
            info = self._files.info(address)
        return _Remote(address, False, info.get("size"), _mark(info))

    def _update(self, name: str) -> None:
        self._files.invalidate_cache()
        wanted = dict(self._walk(f"{self._start}/{name}", ()))
        if not wanted:
            raise FileNotFoundError(name)
        marks = {place: remote.mark for place, remote in wanted.items()}
        digest = hashlib.sha256(json.dumps([name, sorted(marks.items())]).encode()).hexdigest()[:32]
        entry, link = self._store / digest, self.folder / name
        target = Path("..", "store", digest, name)
        before = self._target(link)
        if before == target and entry.is_dir():
            return
        if not entry.is_dir():
            with beside(entry) as temporary:
                fetched = self._fetch(name, wanted, temporary, before)
            log.info("model downloaded", extra={"model": name, "bytes": fetched, "source": self.address})
        turned = self.folder / f".{uuid.uuid4().hex}"
        turned.symlink_to(target)
        turned.replace(link)
        self._let_go(before)

    def _fetch(self, name: str, wanted: dict[str, _Remote], folder: Path, before: Path | None) -> int:
        """Downloads the changed files and makes hard links to the unchanged files. Returns the number of downloaded
        bytes."""
        old = (self.folder / before).resolve() if before else None
        known: dict[str, str] = {}
        if old is not None:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads((old.parent / _RECORD).read_text(encoding="utf-8"))
        (folder / name).mkdir(parents=True)
        fetched = 0
        for place, remote in wanted.items():
            path = folder / name / place
            if remote.folder:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if old is not None and known.get(place) == remote.mark:
                with contextlib.suppress(OSError):
                    os.link(old / place, path)
                    continue
            seen = _mark(self._files.info(remote.address))
            self._files.get_file(remote.address, str(path))
            self._files.invalidate_cache()
            if _mark(self._files.info(remote.address)) != seen or remote.size not in (None, path.stat().st_size):
                raise BadRepository(
                    f"the remote file {remote.address} changed while it was downloaded; the next poll or load fetches "
                    "the file again"
                )
            fetched += path.stat().st_size
        marks = {place: remote.mark for place, remote in wanted.items()}
        (folder / _RECORD).write_text(json.dumps(marks), encoding="utf-8")
        return fetched

    @staticmethod
    def _target(link: Path) -> Path | None:
        try:
            return link.readlink()
        except OSError:
            return None

    def _remove(self, name: str) -> None:
        link = self.folder / name
        before = self._target(link)
        link.unlink(missing_ok=True)
        self._let_go(before)

    def _let_go(self, target: Path | None) -> None:
        if target is not None:
            with contextlib.suppress(OSError):
                os.utime((self.folder / target).resolve().parent)

    def _drop_old(self) -> None:
        """Removes the copies that are older than ``_KEPT_SECONDS`` and have no link."""
        used = {target.parent.name for link in self.folder.iterdir() if (target := self._target(link))}
        for entry in self._store.iterdir():
            with contextlib.suppress(OSError):
                if entry.name not in used and time.time() - entry.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(entry)


def _mark(info: dict[str, Any]) -> str:
    return json.dumps([info.get("size"), {key: str(info[key]) for key in _MARKS if info.get(key)}])


def _is_folder(info: dict[str, Any]) -> bool:
    return info.get("type") == "directory"


def _open(address: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise MissingExtra("fsspec", "serve-remote") from None
    scheme = address.partition("://")[0]
    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        # The download of a large model may take any time, but fails if the store sends nothing for a minute.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=20, sock_read=60)}
    try:
        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise UnsupportedHere(
            f"an address with {scheme}:// needs another library in addition to fsspec; install it: {error}"
        ) from None
    except ValueError as error:
        raise UnsupportedHere(
            f"can't open the address {address}: {error}; use a folder, s3://, gs:// or http(s)://"
        ) from None


def _reason(error: BaseException) -> str:
    text = one_line(error)
    return text if isinstance(error, AccelError) else f"{type(error).__name__}: {text}"
