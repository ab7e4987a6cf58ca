"""Runs compilers. No temporary files or processes remain, even after a failed build.

A build works in a scratch folder beside its result and holds a lock on the folder. Ctrl-C ends the compilers and
removes the scratch folder. If a build is killed, its scratch folder is no longer locked, and the next build removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from accel.errors import BuildFailed


@contextlib.contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Makes a hidden folder beside ``target`` and removes it at the end. First removes the folders of killed builds."""
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    held: int | None = None
    try:
        all_builds = _lock(parent, wait=True)  # hides the new folder from other builds until the folder is locked
        try:
            for found in parent.glob(".*"):
                _remove_if_abandoned(found)
            folder.mkdir()
            held = _lock(folder, wait=True)
        finally:
            _unlock(all_builds)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(held)


def _remove_if_abandoned(folder: Path) -> None:
    if not folder.is_dir():
        return
    lock = _lock(folder, wait=False)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Locks a folder until ``_unlock`` is called or this process ends.

    Returns None if another process holds the lock, or if the file system doesn't support locks.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


class Compilers:
    """Runs the compilers of one build. The end of the ``with`` block kills compilers that still run. Temporary files go
    into ``scratch``."""

    def __init__(self, scratch: Path) -> None:
        self._environment = {**os.environ, "TMPDIR": str(scratch)}
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._changing = threading.Lock()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, command: list[str]) -> str:
        """Runs a command and returns its output. Raises ``BuildFailed`` with the command's first error."""
        with self._changing:
            if self._ended:
                raise BuildFailed("the build was stopped before this file was compiled; run the build again")
            # The command runs in a separate process group, because nvcc starts other compilers that have to end with
            # the build.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
            self._running.add(process)
        out, err = process.communicate()
        with self._changing:
            self._running.discard(process)
        if process.returncode:
            lines = [line.strip() for line in (err + out).splitlines() if re.search(r"error|fatal", line)]
            first = lines[0] if lines else f"exit code {process.returncode}"
            raise BuildFailed(
                f"{Path(command[0]).name} failed: {first[:300]}; run the command by hand: {' '.join(command)}"
            )
        return err + out

    def end(self) -> None:
        """Ends the running compilers. After this call, ``run`` starts no further compilers."""
        with self._changing:
            self._ended = True
            for process in self._running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
