"""Kills processes of ``accel train`` with SIGKILL at random instants, and checks what is left after each kill.

The runs are short, so a process that lives on may end by itself before it is looked for. ``test_owner`` kills the
command of a long run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.runs import config_of, rows_of

STEPS = 24
# The most kills of one run, which then ends undisturbed.
_IN_A_RUN = 3
# The seconds after which the processes of a killed run have to be gone.
_GONE = 5.0
_WEIGHTS = Path("final") / "model-00001-of-00001.safetensors"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill that was sent. ``victim`` is the killed process and ``moment`` tells how the instant was drawn. ``logged``
    is the last step in the log, and ``unfinished`` tells whether a checkpoint or ``final/`` was being written."""

    seed: int
    victim: str
    moment: str
    logged: int
    unfinished: bool


class Run:
    """A run of two ranks in the folder ``out``, which the command in ``start`` begins or goes on with."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.config = out.with_suffix(".toml")
        checkpoint = {"every": 3}
        self.config.write_text(config_of(steps=STEPS, checkpoint=checkpoint, parallel={"zero": 3}).to_toml())

    def start(self) -> subprocess.Popen[bytes]:
        line = ["-m", "accel", "train", str(self.config), "--nproc", "2", "--out", str(self.out), "-q"]
        with self.out.with_suffix(".txt").open("ab") as said:
            return subprocess.Popen([sys.executable, *line], stdout=said, stderr=said)

    def finish(self) -> float:
        """Runs the command to its end without a kill, and returns the seconds that the command took."""
        began = time.monotonic()
        assert self.start().wait(200) == 0, self.said()
        return time.monotonic() - began

    def said(self) -> str:
        """Returns what the commands of this run printed."""
        return self.out.with_suffix(".txt").read_text(errors="replace")[-2000:]

    def processes(self) -> dict[int, str]:
        """Returns the living processes of this run, each with what it is."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_text(errors="replace").split("\0")
                if str(self.out) in words:
                    found[int(folder.name)] = _named(words)
        return found

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step. A step that ran again after a kill counts once, with its last loss."""
        return {row["step"]: row["loss"] for row in rows_of(self.out) if "loss" in row}

    def unfinished(self) -> list[Path]:
        """Returns the files and folders that are being written, or were when the run was killed."""
        return [path for folder in (self.out, self.out / "checkpoints") for path in folder.glob(".*")]

    def torn(self) -> list[str]:
        """Returns the faults of the checkpoints that a run would resume from."""
        return [said for folder in (self.out / "checkpoints").glob("step-*") for said in _faults(folder)]


def _named(words: list[str]) -> str:
    if "accel.train.run.rank" not in words:
        return "the command"
    return "torchrun" if "torch.distributed.run" in words else "a rank"


def _faults(folder: Path) -> Iterator[str]:
    try:
        files = json.loads((folder / "run.json").read_text())["files"]
    except (OSError, ValueError) as error:
        yield f"{folder}: {error}"
        return
    for name, (size, crc) in {".metadata": (None, None), **files}.items():
        body = (folder / name).read_bytes() if (folder / name).is_file() else None
        if body is None or (size is not None and (len(body), zlib.crc32(body)) != (size, crc)):
            yield f"{folder / name} is missing or damaged"


def campaign(folder: Path, calm: Run, *, kills: int, seed: int, seconds: float) -> list[Kill]:
    """Kills processes of runs in ``folder`` until ``kills`` kills were sent, and checks every run against ``calm``.

    A run is killed up to three times, and then ends undisturbed. ``seconds`` is the time of an undisturbed run.
    """
    draw, sent = random.Random(seed), []
    runs = 0
    while len(sent) < kills:
        run = Run(folder / f"run-{seed}-{runs}")
        runs += 1
        assert runs <= 4 * kills, "most commands ended before they were killed"
        for _ in range(min(draw.randint(1, _IN_A_RUN), kills - len(sent))):
            if (kill := _killed(run, draw, seed, seconds)) is None:
                break
            sent.append(kill)
            assert not run.torn(), (kill, run.torn())
        run.finish()
        _as_calm(run, calm)
    return sent


def _killed(run: Run, draw: random.Random, seed: int, seconds: float) -> Kill | None:
    """Starts the command of ``run`` and kills one of its processes. Returns None if the command ended before."""
    moment = draw.choice(["at any time", "in a checkpoint", "at the end"])
    command = run.start()
    ended = _wait_for(moment, run, command, draw, seconds)
    living = sorted(run.processes().items(), key=lambda one: one[1])
    if ended or not living:
        assert command.wait(200) == 0, run.said()
        return None
    pid, victim = draw.choice(living)
    logged, unfinished = max(_steps(run), default=0), bool(run.unfinished())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill = Kill(seed=seed, victim=victim, moment=moment, logged=logged, unfinished=unfinished)
    code = command.wait(200)
    assert code == (-signal.SIGKILL if victim == "the command" else 1) or code == 0, (kill, code, run.said())
    if victim == "torchrun" and code:
        assert "was killed by signal 9" in run.said().splitlines()[-1], run.said()
    deadline = time.monotonic() + _GONE
    while (left := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, (kill, left)
    return kill


def _wait_for(moment: str, run: Run, command: subprocess.Popen[bytes], draw: random.Random, seconds: float) -> bool:
    """Waits for the instant of a kill. Returns True if the command ended before."""
    began = time.monotonic()
    after = draw.uniform(0, seconds) if moment == "at any time" else draw.uniform(0, 0.05)
    more = draw.randint(1, STEPS // 3 - 1)
    before = len(seen := {path.name for path in run.unfinished()})
    while command.poll() is None:
        if moment == "at any time":
            if time.monotonic() - began >= after:
                return False
        elif moment == "in a checkpoint":
            seen |= {path.name for path in run.unfinished() if path.name.startswith(".step")}
            if len(seen) - before >= more:
                break
        elif (run.out / "checkpoints" / f"step-{STEPS:08d}").exists():
            break
        time.sleep(0.001)
    if moment != "at any time":
        with suppress(subprocess.TimeoutExpired):
            command.wait(after)
    return command.poll() is not None


def _steps(run: Run) -> Iterator[int]:
    if (run.out / "log.jsonl").is_file():
        for line in (run.out / "log.jsonl").read_text().splitlines():
            with suppress(ValueError):  # the last line may be cut short at this instant
                yield json.loads(line).get("step", 0)


def _as_calm(run: Run, calm: Run) -> None:
    """Checks that a run that was killed ended like the undisturbed run ``calm``, and left nothing behind."""
    expected, found = calm.losses(), run.losses()
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) <= 1e-6
    weights, whole = load_file(str(run.out / _WEIGHTS)), load_file(str(calm.out / _WEIGHTS))
    assert weights.keys() == whole.keys()
    assert all(torch.allclose(weights[name], whole[name], rtol=0, atol=1e-6) for name in whole)
    assert not run.torn()
    assert not run.unfinished()
    assert not run.processes()
