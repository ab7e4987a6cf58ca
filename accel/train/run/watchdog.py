"""Finds the rank that hangs. If one rank hangs, all other ranks wait in a collective without knowing which rank hangs.

Every rank writes its process id at its start and touches ``OUT/alive`` at each step. If no rank touches ``OUT/alive``
for too long, the watchdog sends every rank a signal, and the ranks write their stacks. A rank counts as waiting if
its innermost frame is in torch. All other ranks count as hung. A stopped rank doesn't answer the signal, so it also
counts as hung.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import socket
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

from ..config.schema import FIRST_STEP_FACTOR
from ..log import ALIVE

STACKS = "stacks"
RANK = "accel.train.run.rank"  # the module that runs a rank
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (.+)')
_ANSWER_SECONDS = 10.0


def clear(out: Path) -> None:
    """Removes the files of an earlier run. Call this function before the ranks start."""
    shutil.rmtree(out / STACKS, ignore_errors=True)
    (out / STACKS).mkdir()
    (out / ALIVE).unlink(missing_ok=True)


def enrol(out: Path, rank: int) -> None:
    """Makes this rank write its stack on SIGUSR1 and on a crash in native code. Every rank calls this function at each
    start."""
    (out / ALIVE).unlink(missing_ok=True)
    folder = out / STACKS
    folder.mkdir(exist_ok=True)
    stream = (folder / f"rank-{rank}.txt").open("w")  # the file stays open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)
    faulthandler.enable(file=stream)
    (folder / f"rank-{rank}.pid").write_text(f"{socket.gethostname()} {os.getpid()}")


def overdue(out: Path, hang_seconds: float) -> str:
    """Returns a message that names the overdue step, or "" if no step is overdue.

    A step is overdue after ``hang_seconds``. The first step is overdue after ten times ``hang_seconds``.
    """
    for sign, limit, what in ((ALIVE, hang_seconds, "step"), (STACKS, FIRST_STEP_FACTOR * hang_seconds, "first step")):
        with suppress(OSError):
            silent = time.time() - (out / sign).stat().st_mtime
            return f"no {what} in {limit:g} s" if silent > limit else ""
    return ""


def who_hangs(out: Path) -> str:
    """Returns a message with the hanging ranks of this machine and their code lines. A rank that waits for another rank
    doesn't hang."""
    pids = _here(out)
    for number in pids.values():
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    said: dict[int, str] = {}
    while time.monotonic() < deadline and len(said) < len(pids):
        for rank in pids:
            text = (out / STACKS / f"rank-{rank}.txt").read_text(errors="replace")
            if _FRAME.search(text):
                said[rank] = text
        time.sleep(0.1)
    hangs = [f"rank {rank} doesn't answer (stopped, or stuck in native code)" for rank in pids if rank not in said]
    hangs += [f"rank {rank} is {where}" for rank, text in said.items() if (where := _outside_torch(text))]
    return ", ".join(hangs) or "every rank waits for another rank, because the ranks call different collectives"


def where_it_died(out: Path, rank: int) -> str:
    """Returns the Python line at which a rank crashed in native code, as a part of a sentence.

    Returns "" if the rank left no stack, for example after SIGKILL. Also returns "" if the crashed thread ran no
    Python, like gloo's threads. Reads only the stack of the crashed thread.
    """
    try:
        said = (out / STACKS / f"rank-{rank}.txt").read_text(errors="replace")
    except OSError:
        return ""
    frames = _FRAME.findall(said.partition("\nCurrent thread ")[2].partition("\n\n")[0])
    return _place(frames) if frames else ""


def end(out: Path) -> None:
    """Kills the remaining ranks on this machine. torchrun only sends a signal that a stopped rank ignores.

    Waits up to ten seconds for the ranks to end and to release memory and ports.
    """
    killed = [pid for pid in _here(out).values() if _runs(pid, out)]
    for pid in killed:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_runs(pid, out) for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(pid: int, out: Path) -> bool:
    """Tells whether ``pid`` is a running rank of the run in ``out``. If a process has ended, its file /proc/PID/cmdline
    is empty or missing. A later process may have the number of an ended rank."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return RANK in words and str(out) in words


def enrolled(out: Path) -> list[int]:
    """Returns the ranks that started on this machine."""
    return sorted(_here(out))


def _here(out: Path) -> dict[int, int]:
    pids = {}
    for file in sorted((out / STACKS).glob("rank-*.pid")):
        host, _, pid = file.read_text().partition(" ")
        if host == socket.gethostname() and pid.isdigit():
            pids[int(file.stem.partition("-")[2])] = int(pid)
    return pids


def _outside_torch(stack: str) -> str:
    """Returns the innermost place in the user's code on ``stack``, or "" if the innermost frame is in torch."""
    frames = _FRAME.findall(stack)
    if frames[0][0].startswith(f"{sysconfig.get_paths()['purelib']}/torch/"):
        return ""
    return _place(frames)


def _place(frames: list[tuple[str, str, str]]) -> str:
    """Returns the innermost frame of the user's code, or the stack's innermost frame if the stack has no user code."""
    theirs = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "stdlib"))
    file, line, function = next((frame for frame in frames if not frame[0].startswith(theirs)), frames[0])
    return f"in {function} at {file}:{line}"
