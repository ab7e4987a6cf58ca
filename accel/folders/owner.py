"""Gives a run folder one owner, because two runs in one folder would overwrite each other's checkpoints.

The launcher of a run holds a lock (flock) on ``OUT/owner.jsonl``. The operating system releases the lock if the
launcher dies, and Linux passes the lock on to an NFS server. The machines of one run share the lock, because they have
the same rendezvous. Some network file systems know no locks, or keep a lock on one machine. Each launcher therefore
also touches the file every two seconds, which another machine can see.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel.errors import CannotWrite
from accel.progress import report

from .writing import writing

OWNER = "owner.jsonl"
_TOUCH_SECONDS = 2.0
_TRY_SECONDS = 0.1
# The seconds after which a launcher on another machine counts as dead if it didn't touch the file.
_SILENT_SECONDS = 7.0
# How long a machine waits for the first machine of its run to take an old run's folder and to name itself.
_START_SECONDS = _SILENT_SECONDS + 3
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def owned(out: Path, rendezvous: str | None, prepare: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """Opens a context in which this process owns the folder ``out``. Yields False if this process joins other machines
    of the same run, which already own ``out``.

    Launchers with the same ``rendezvous`` own ``out`` together. The first of them calls ``prepare``, and the others
    wait until that call has ended. Raises ``CannotWrite`` if another run owns ``out``, or if ``out`` can't be written.
    """
    with writing(out):
        descriptor = os.open(out / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    stopped = threading.Event()
    try:
        first = _lock(descriptor, out, rendezvous)
        toucher = threading.Thread(target=_touch, args=(descriptor, stopped), daemon=True)
        toucher.start()
        try:
            if first:
                prepare()
            if rendezvous is not None:
                with suppress(OSError):  # the file system may know no locks
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield first
        finally:
            stopped.set()
            toucher.join()
            _leave(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, out: Path, rendezvous: str | None) -> bool:
    """Takes the lock and adds this process to the file. Returns False if this process shares the lock.

    Machines of one run may start at the same time. The first takes the lock for itself, and shares it after its
    preparations. The others try until then.
    """
    own = {"pid": os.getpid(), "host": socket.gethostname(), "began": _began(os.getpid()), "rendezvous": rendezvous}
    deadline = time.monotonic() + _START_SECONDS
    while True:
        locked = _flock(descriptor, fcntl.LOCK_EX)
        owners = _owners(out)
        here = any(one["host"] == own["host"] and _began(one["pid"]) == one["began"] for one in owners)
        elsewhere = any(one["host"] != own["host"] for one in owners)
        joins = rendezvous is not None and any(one["rendezvous"] == rendezvous for one in owners)
        if locked is None:  # the file system knows no locks
            alone = not here and not (elsewhere and _touched(out, owners))
        else:
            alone = locked and (joins or not elsewhere or not _touched(out, owners))
        if alone or (joins and _flock(descriptor, fcntl.LOCK_SH) is not False):
            break
        starts = rendezvous is not None and locked is False and not here and time.monotonic() < deadline
        if not (joins or starts):
            who = " and ".join(map(_said, owners)) or "its launcher has just started"
            raise CannotWrite(
                f"another run writes into {out}: {who}; wait until that run ends, end it, or choose another folder"
            )
        report(f"waiting for the first machine of this run, which prepares {out}")
        time.sleep(_TRY_SECONDS)
    if alone:
        os.ftruncate(descriptor, 0)
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    os.lseek(descriptor, 0, os.SEEK_END)
    os.write(descriptor, json.dumps({**own, "since": since}).encode() + b"\n")
    return alone


def _flock(descriptor: int, kind: int) -> bool | None:
    """Tells whether this process got the lock. Returns None if the file system knows no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else False
    return True


def _leave(descriptor: int) -> None:
    """Empties the file if no other machine of this run is left."""
    if _flock(descriptor, fcntl.LOCK_EX) is not False:
        with suppress(OSError):  # a full disk must not hide the error of the run
            os.ftruncate(descriptor, 0)


def _touch(descriptor: int, stopped: threading.Event) -> None:
    while not stopped.wait(_TOUCH_SECONDS):
        with suppress(OSError):
            os.utime(descriptor)


def _touched(out: Path, owners: list[dict[str, Any]]) -> bool:
    """Tells whether a launcher on another machine is alive. Waits until the file is touched."""
    report(f"{out} had {_said(owners[-1])}; waiting {_SILENT_SECONDS:g} s to see whether that run goes on")
    before, deadline = _changed(out), time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline:
        if _changed(out) != before:
            return True
        time.sleep(0.2)
    return False


def _changed(out: Path) -> int:
    with (out / OWNER).open("rb") as stream:  # opening a file makes NFS ask the server for the time of the last change
        return os.fstat(stream.fileno()).st_mtime_ns


def _owners(out: Path) -> list[dict[str, Any]]:
    """Returns the launchers in the file. Returns an empty list if the file is damaged."""
    try:
        found = [json.loads(line) for line in (out / OWNER).read_text(errors="replace").splitlines()]
        return [one for one in found if one["pid"] > 0 and one.keys() >= {"host", "began", "since", "rendezvous"}]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _said(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"


def _began(pid: int) -> str:
    """Returns the start time of a process in ticks since the machine started, or "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
