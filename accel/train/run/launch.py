"""Starts the ranks of a run, shows their progress, and turns their failures into one error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accel.errors
from accel.child import bound, own_temporary
from accel.errors import AccelError, BadConfig, TrainingFailed
from accel.folders.owner import owned
from accel.folders.writing import beside, make_folder
from accel.machine import available_cores
from accel.progress import report

from ..config.rules import problems, runnable
from ..config.schema import TrainConfig
from ..log import BOARD, LOG
from . import watchdog
from .rank import ERRORS, RESULT, disk_full

TORCHRUN = "torch.distributed.run"  # the module of torchrun, which starts the ranks
# The bytes of disk space that a rank needs to write its error report.
_ROOM = 2**16
# A rank with parameters on the disk gives freed memory from this size on back to the system at once.
_RETURNED = 2**20
_SETTINGS_SECONDS = 5.0
# The likely sender of each signal.
_SENT_BY: dict[int, str] = {
    signal.SIGKILL: " (the system does this if memory runs out)",
    signal.SIGABRT: " (a library does this, such as gloo if only some ranks use a parameter)",
}


def train(
    config: TrainConfig,
    out: Path,
    *,
    nproc: int = 1,
    nnodes: str = "1",
    max_restarts: int = 0,
    rendezvous: str | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Trains the model of ``config`` and writes into the folder ``out``. Returns the steps, loss and metrics of rank 0.

    ``nproc`` is the number of processes on this machine. ``nnodes`` is the number of machines or a range ``MIN:MAX``.
    ``rendezvous`` is the address where the machines find each other. If ``out`` holds checkpoints, training continues
    from the newest checkpoint. With ``fresh``, training starts over. If this process is killed, its ranks end too.

    Raises the error of the first rank that failed, with the first error of every rank in the message. Raises
    ``CannotWrite`` if another run writes into ``out``.
    """
    _valid(config, nproc, nnodes, rendezvous)
    runnable(config)
    make_folder(out)
    config_file = out / "train.json"
    settings = json.dumps(dataclasses.asdict(config), indent=2)

    def prepare() -> None:
        watchdog.end(out)  # a killed launcher's ranks may need a moment to end
        if fresh:
            for name in ("checkpoints", "final", BOARD):
                shutil.rmtree(out / name, ignore_errors=True)
            (out / LOG).unlink(missing_ok=True)
        shutil.rmtree(out / ERRORS, ignore_errors=True)
        watchdog.clear(out)
        (out / RESULT).unlink(missing_ok=True)
        with beside(config_file) as temporary:
            temporary.write_text(settings)

    with owned(out, rendezvous if nnodes != "1" else None, prepare) as first:
        if not first:
            _check_settings(config_file, settings)
        program = ["-m", watchdog.RANK, str(config_file), str(out), str(os.getpid())]
        if nproc > 1 or nnodes != "1" or max_restarts:
            where = ["--standalone"] if rendezvous is None else ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"]
            torchrun = ["-m", TORCHRUN, *where, f"--nnodes={nnodes}", f"--nproc-per-node={nproc}"]
            program = [*torchrun, f"--max-restarts={max_restarts}", *program]
        code, begin = _launched(program, config, out, nproc)
        if code < 0 and TORCHRUN in program:
            raise _torchrun_killed(out, -code)
        if code:
            ranks = range(nproc) if nnodes == "1" else watchdog.enrolled(out)
            raise first_errors(out, ranks, code, killed=_killed(out, begin, code))
        body: dict[str, Any] = json.loads((out / RESULT).read_text())
        return body


def _launched(program: Sequence[str], config: TrainConfig, out: Path, nproc: int) -> tuple[int, int]:
    """Runs ``program`` to its end, and shows the progress of the ranks. Returns the exit code and the size of
    ``ranks.log`` at the start."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
        # If ranks and torchrun's rendezvous shared a store, restarted ranks would read the killed ranks' stale keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // nproc)),
    }
    if config.parallel.disk_parameters:  # otherwise glibc would keep the memory of freed tensors
        environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(_RETURNED))
    temporary = tempfile.TemporaryDirectory(prefix="accel-", ignore_cleanup_errors=True)
    with temporary as folder, (out / "ranks.log").open("ab") as log:
        process = subprocess.Popen(
            bound([sys.executable, *program]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, **own_temporary(folder)},
            start_new_session=True,
        )
        begin = log.tell()
        try:
            _follow(process, out, config.hang_seconds)
        except BaseException as error:
            if isinstance(error, TrainingFailed):
                watchdog.end(out)  # torchrun would wait in vain for a stopped rank to end
            _end(process)
            watchdog.end(out)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"interrupted; run the same command again, {_goes_on(out)}") from error
            raise
    return process.returncode, begin


def _valid(config: TrainConfig, nproc: int, nnodes: str, rendezvous: str | None) -> None:
    """Raises ``BadConfig`` if ``config`` can't run on ``nnodes`` machines. If ``nnodes`` is a range, one number in the
    range has to work."""
    least, _, most = nnodes.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise BadConfig(f"can't read --nnodes {nnodes!r}; write a number of machines, or a range MIN:MAX")
    if int(most or least) > 1 and rendezvous is None:
        raise BadConfig(f"{nnodes} machines need an address to meet at; pass the same --rendezvous HOST:PORT on each")
    found = [next(problems(config, nproc * count), "") for count in range(int(least), int(most or least) + 1)]
    if all(found):
        raise BadConfig(found[-1])


def _check_settings(config_file: Path, settings: str) -> None:
    """Raises ``BadConfig`` if the first machine of this run trains with other ``settings`` than this machine.

    Waits a few seconds for the file of the first machine, because a file system without locks lets this machine start
    before the first has written it.
    """
    own, deadline = json.loads(settings), time.monotonic() + _SETTINGS_SECONDS
    while True:
        first = json.loads(config_file.read_text()) if config_file.is_file() else {}
        other = sorted(name for name in own if own[name] != first.get(name))
        if not other:
            return
        if time.monotonic() > deadline:
            raise BadConfig(
                f"the first machine of this run has other settings ({', '.join(other)}); pass the same config and the "
                "same options on each machine"
            )
        time.sleep(0.1)


def _goes_on(out: Path) -> str:
    """Returns words for a message, which tell whether the same command continues after a checkpoint or starts over."""
    steps = [int(file.parent.name.rpartition("-")[2]) for file in (out / "checkpoints").glob("step-*/run.json")]
    if steps:
        return f"it goes on after step {max(steps)}"
    return "it starts over, because there is no checkpoint yet (checkpoint.every writes checkpoints)"


def _torchrun_killed(out: Path, number: int) -> TrainingFailed:
    """Returns the error of a run whose torchrun was killed by a signal. The ranks end with torchrun."""
    return TrainingFailed(
        f"torchrun, which starts the ranks, was killed by signal {number}{_SENT_BY.get(number, '')}, and the ranks "
        f"ended with it; run the same command again, {_goes_on(out)} (see {out / 'ranks.log'})"
    )


def _killed(out: Path, begin: int, code: int) -> dict[int, int]:
    """Returns the killed ranks, each with the signal that killed the rank.

    Reads torchrun's report in the log after the offset ``begin``, or the exit ``code`` of a single process. Skips
    SIGTERM, because torchrun ends the other ranks with SIGTERM.
    """
    if code < 0:
        return {0: -code}
    with (out / "ranks.log").open("rb") as stream:
        stream.seek(begin)
        said = stream.read().decode(errors="replace")
    found = re.findall(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+) ", said)
    return {int(rank): int(number) for rank, number in found if int(number) != signal.SIGTERM}


def first_errors(
    out: Path, ranks: Collection[int], code: int, killed: Mapping[int, int] = MappingProxyType({})
) -> AccelError:
    """Returns one error for the whole run.

    ``ranks`` are the ranks of this machine. ``killed`` maps each killed rank to the signal that killed it. If no rank
    was killed, the error has the class and the message of the earliest error. The first errors of the other ranks
    follow in the message, but not if another rank's end caused them.
    """
    found = []
    for file in (out / ERRORS).glob("rank-*.json"):
        with contextlib.suppress(ValueError):
            found.append(json.loads(file.read_text()))
    found.sort(key=lambda body: (body.get("lost", False), body["time"]))
    silent = [str(r) for r in ranks if r not in {body["rank"] for body in found}]
    if killed:  # the other ranks failed only because a rank was killed
        words = []
        for rank, number in killed.items():
            where = watchdog.where_it_died(out, rank)
            words.append(f"rank {rank} was killed by signal {number}{_SENT_BY.get(number, '')}{where and f' {where}'}")
        words += [
            f"then rank {body['rank']}: {body['error'][:100]}"
            for body in found
            if body["rank"] not in killed and not body.get("lost")
        ]
        return TrainingFailed(
            f"{' | '.join(words)}; run the same command again, {_goes_on(out)}, or pass --max-restarts to restart "
            f"automatically (see {out / 'ranks.log'})"
        )
    if all(body.get("lost") for body in found) and shutil.disk_usage(out).free < _ROOM:
        return disk_full(out)  # the rank that met the full disk couldn't write its error
    if not found:
        lines = (out / "ranks.log").read_text(errors="replace").strip().splitlines()
        return TrainingFailed(
            f"the ranks ended without an error message (exit code {code}): {lines[-1] if lines else ''}; see "
            f"{out / 'ranks.log'}"
        )
    first, *others = found
    told = {first["error"]}
    words = (
        [f"rank {first['rank']}: {first['message'] or first['error']}"]
        if len(ranks) > 1
        else [first["message"] or first["error"]]
    )
    for body in others:
        if body["error"] not in told and (first.get("lost") or not body.get("lost")):
            told.add(body["error"])
            words.append(f"rank {body['rank']}: {body['error'][:200]}")
    if silent and first.get("lost"):
        words.append(
            f"rank {', '.join(silent)}: ended without an error of its own (killed, or stopped after the others)"
        )
    kind = getattr(accel.errors, first["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, AccelError)) or kind is accel.errors.MissingExtra:
        kind = TrainingFailed
    said = " | ".join(words)
    if kind is TrainingFailed and not first["message"]:
        said += f"; the tracebacks are in {out / ERRORS}"
    error = kind(said)
    assert isinstance(error, AccelError)
    return error


def _follow(process: subprocess.Popen[bytes], out: Path, hang_seconds: float) -> None:
    log = out / LOG
    position = log.stat().st_size if log.is_file() else 0
    while True:
        code = process.poll()
        if log.is_file():
            with log.open("rb") as stream:
                stream.seek(position)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    _tell(json.loads(line))
        if code is not None:
            return
        if hang_seconds and (late := watchdog.overdue(out, hang_seconds)):
            raise TrainingFailed(
                f"{late}: {watchdog.who_hangs(out)}; the stacks of the ranks are in "
                f"{out / watchdog.STACKS}; if a step may take longer, use a larger hang_seconds"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


def _tell(body: dict[str, Any]) -> None:
    if "note" in body:
        report(body["note"])
        return
    if "evaluate" in body:
        found = ", ".join(f"{k} {'nan' if v is None else f'{v:.4f}'}" for k, v in body["evaluate"].items())
        report(f"step {body['step']}/{body['steps']}  evaluate: {found}", body["step"] / body["steps"])
        return
    loss = "nan" if body["loss"] is None else f"{body['loss']:.4f}"
    mfu = f"  MFU {body['mfu']:.1%}" if "mfu" in body else ""
    scale = f"loss scale {body['loss_scale']:g}, {body['skipped']} skipped  " if "loss_scale" in body else ""
    report(
        f"step {body['step']}/{body['steps']}  loss {loss}  {scale}{body['targets_per_second']:,.0f} targets/s{mfu}  "
        f"{body['memory_bytes'] / 1e9:.2f} GB  {body['eta_seconds']:.0f} s left",
        body["step"] / body["steps"],
    )
    if body["step"] == body["steps"]:  # for a large model, this takes minutes
        report("writing the last checkpoint and final/", 1.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and the ranks, which run in a separate session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def find_config(path: Path) -> Path:
    """Returns ``path`` if the file exists, or else accel's example config of the same name. The path
    ``examples/digits.toml`` therefore works in any folder."""
    if path.is_file() or path.parent.name != "examples":
        return path
    root = Path(accel.__file__).resolve().parent
    for folder in (root / "examples", root.parent / "examples"):
        if (folder / path.name).is_file():
            return folder / path.name
    return path
