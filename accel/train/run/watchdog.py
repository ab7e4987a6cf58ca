"""A rank that hangs is found and named: all the others wait for it in a collective, and none of them can say for whom.

Every rank leaves its process id and touches ``OUT/alive`` at each step. Where nobody did for too long, every rank is
asked for its stack by a signal, which a stopped one doesn't answer: ranks whose innermost frame is torch's
are waiting, the one that is somewhere else hangs.
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

ALIVE = "alive"
STACKS = "stacks"
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (.+)')
_ANSWER_SECONDS = 10.0
# Imports, building the model and reading a checkpoint may take this many times longer than a step.
START = 10


def clear(out: Path) -> None:
    """Before the ranks are started."""
    shutil.rmtree(out / STACKS, ignore_errors=True)
    (out / STACKS).mkdir()
    (out / ALIVE).unlink(missing_ok=True)


def enrol(out: Path, rank: int) -> None:
    """In a rank, at its start, which may be one of several: from now on SIGUSR1 writes its stack, and so does what ends
    it in native code."""
    (out / ALIVE).unlink(missing_ok=True)
    folder = out / STACKS
    folder.mkdir(exist_ok=True)
    stream = (folder / f"rank-{rank}.txt").open("w")  # stays open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)
    faulthandler.enable(file=stream)
    (folder / f"rank-{rank}.pid").write_text(f"{socket.gethostname()} {os.getpid()}")


def beat(out: Path) -> None:
    """In any rank: this run goes on."""
    with suppress(OSError):
        (out / ALIVE).touch()


def overdue(out: Path, hang_seconds: float) -> str:
    """What hasn't happened for too long: a step for ``hang_seconds``, or the first one for ten times that; "" if all
    is well."""
    for sign, limit, what in ((ALIVE, hang_seconds, "step"), (STACKS, START * hang_seconds, "first step")):
        with suppress(OSError):
            silent = time.time() - (out / sign).stat().st_mtime
            return f"no {what} in {limit:g} s" if silent > limit else ""
    return ""


def who_hangs(out: Path) -> str:
    """The ranks of this machine that don't wait for another one, and where they are, in words."""
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
    return ", ".join(hangs) or "every rank waits for another one: the collectives don't fit together"


def where_it_died(out: Path, rank: int) -> str:
    """Where the thread that ended a rank in native code was in Python, in words; "" where it left nothing (SIGKILL) or
    ran no Python (one of gloo's): the others' stacks are in the file too, and it is none of them."""
    try:
        said = (out / STACKS / f"rank-{rank}.txt").read_text(errors="replace")
    except OSError:
        return ""
    frames = _FRAME.findall(said.partition("\nCurrent thread ")[2].partition("\n\n")[0])
    return _place(frames) if frames else ""


def end(out: Path) -> None:
    """Kill what is left of this machine's ranks: torchrun asks its ranks to go, and a stopped one doesn't listen.
    Returns when they are gone (they hold memory and ports until then), or after ten seconds."""
    killed = [pid for pid in _here(out).values() if _runs(pid, out)]
    for pid in killed:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(_runs(pid, out) for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(pid: int, out: Path) -> bool:
    """Whether ``pid`` is a rank of the run in ``out`` (a process that has ended has no command line)."""
    try:
        return str(out) in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return False


def enrolled(out: Path) -> list[int]:
    """The ranks that started on this machine."""
    return sorted(_here(out))


def _here(out: Path) -> dict[int, int]:
    pids = {}
    for file in sorted((out / STACKS).glob("rank-*.pid")):
        host, _, pid = file.read_text().partition(" ")
        if host == socket.gethostname() and pid.isdigit():
            pids[int(file.stem.partition("-")[2])] = int(pid)
    return pids


def _outside_torch(stack: str) -> str:
    """Where the innermost frame is, "" where it is torch's."""
    frames = _FRAME.findall(stack)
    if frames[0][0].startswith(f"{sysconfig.get_paths()['purelib']}/torch/"):
        return ""
    return _place(frames)


def _place(frames: list[tuple[str, str, str]]) -> str:
    """The innermost frame that is neither Python's nor of an installed package, else the innermost one."""
    theirs = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "stdlib"))
    file, line, function = next((frame for frame in frames if not frame[0].startswith(theirs)), frames[0])
    return f"in {function} at {file}:{line}"
