"""Proves that a run's processes end with their launcher, and that a run folder has one owner at a time."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accel.cli import group, run
from accel.errors import BadConfig, CannotWrite
from accel.folders import owner
from accel.folders.owner import OWNER, owned
from accel.train.run import launch
from tests.support.runs import config_of

_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def _processes(out: Path) -> list[Path]:
    """Returns the running ranks, loader processes and torchruns of the run in ``out``."""
    return [
        path
        for path in Path("/proc").glob("[0-9]*")
        if str(out) in _read(path / "cmdline") and "train.run.rank" in _read(path / "cmdline")
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_killed_launcher_takes_its_ranks_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    """Fails if a rank, a loader's process or torchrun outlives its killed launcher. Also fails if a second command
    starts in the folder of a running run, or doesn't start after the kill."""
    out, config = tmp_path / "run", tmp_path / "run.toml"
    config.write_text(config_of(steps=100_000, loader_processes=1, checkpoint={"every": 20}).to_toml())
    line = ["train", str(config), "--nproc", str(ranks), "--out", str(out), "-q"]
    first = subprocess.Popen([sys.executable, "-m", "accel", *line], env=_ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while not list(out.glob("checkpoints/step-*/run.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(_processes(out)) == {1: 2, 2: 5}[ranks]
        assert run(group, [*line, "--fresh"]) == 1
        said = capsys.readouterr().err
        assert f"another run writes into {out}: process {first.pid} on {socket.gethostname()} since 2" in said
        assert "wait until that run ends, end it, or choose another folder" in said
        assert list(out.glob("checkpoints/step-*/run.json"))
    finally:
        first.kill()
        first.wait()
    deadline = time.monotonic() + 5
    while (left := _processes(out)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    step = max(int(file.parent.name[-8:]) for file in out.glob("checkpoints/step-*/run.json"))
    assert run(group, [*line, "--steps", str(step + 1), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == step + 1
    assert f'"resumed from step {step}"' in (out / "log.jsonl").read_text()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    """Fails if two runs own a folder, or if the folder stays owned after the run."""
    for _ in range(2):
        with owned(tmp_path, None) as first:
            assert first
            with pytest.raises(CannotWrite, match=f"process {os.getpid()} on {socket.gethostname()} since 2"):
                owned(tmp_path, None).__enter__()
        assert (tmp_path / OWNER).read_text() == ""


def test_a_dead_owner_owns_nothing(tmp_path: Path) -> None:
    """Fails if the folder of a killed launcher can't be used again."""
    code = "import sys, pathlib, accel.folders.owner as o; held = o.owned(pathlib.Path(sys.argv[1]), None)"
    line = [sys.executable, "-c", f"{code}; held.__enter__(); print(flush=True); input()", str(tmp_path)]
    with subprocess.Popen(line, env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CannotWrite, match=f"process {other.pid} on"):
            owned(tmp_path, None).__enter__()
        other.send_signal(signal.SIGKILL)
    assert str(other.pid) in (tmp_path / OWNER).read_text()
    with owned(tmp_path, None) as first:
        assert first


def test_the_machines_of_a_run_own_a_folder_together(tmp_path: Path) -> None:
    """Fails if the second machine of a run is refused, or if a machine of another run isn't."""
    with owned(tmp_path, "first:29500") as first, owned(tmp_path, "first:29500") as second:
        assert (first, second) == (True, False)
        for other in (None, "second:29500"):
            with pytest.raises(CannotWrite, match=r"process \d+ on .* and process \d+ on "):
                owned(tmp_path, other).__enter__()
    with owned(tmp_path, None) as first:
        assert first


def test_machines_that_start_at_the_same_time_own_a_folder_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a machine is refused while the first machine of its run takes the folder, for example because the file
    still names an earlier run. Also fails if it joins before the first machine has prepared the folder."""
    _owner(tmp_path, host="elsewhere", pid=7, rendezvous="earlier:29500")
    steps: list[str] = []
    with (tmp_path / OWNER).open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # the first machine has the lock, but didn't name itself yet

        def first_goes_on(_: float) -> None:
            steps.append("waits")
            if len(steps) == 1:
                _owner(tmp_path, host="first", pid=7, rendezvous="first:29500")
            else:
                fcntl.flock(stream, fcntl.LOCK_SH)

        monkeypatch.setattr(time, "sleep", first_goes_on)
        with owned(tmp_path, "first:29500", lambda: steps.append("prepares")) as first:
            assert not first
    assert steps == ["waits", "waits"]


@pytest.mark.parametrize("rendezvous", [None, "second:29500"])
def test_a_run_that_starts_owns_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendezvous: str | None
) -> None:
    """Fails if another run takes a folder while the first run prepares it, or waits for ever."""
    monkeypatch.setattr(owner, "_START_SECONDS", 0.5)

    def prepare() -> None:
        with pytest.raises(CannotWrite, match=f"process {os.getpid()} on"):
            owned(tmp_path, rendezvous).__enter__()
        (tmp_path / OWNER).write_text("")  # as if the first run had not named itself yet
        with pytest.raises(CannotWrite, match="its launcher has just started"):
            owned(tmp_path, rendezvous).__enter__()

    with owned(tmp_path, "first:29500", prepare) as first:
        assert first


def test_machines_with_different_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine trains with other settings than the first machine of its run without a word."""
    monkeypatch.setattr(launch, "_SETTINGS_SECONDS", 0.2)
    settings = dataclasses.asdict(config_of(steps=6))
    said = r"has other settings \(seed, steps\); pass the same config"
    with (
        owned(tmp_path, "first:29500", lambda: (tmp_path / "train.json").write_text(json.dumps(settings))),
        pytest.raises(BadConfig, match=said),
    ):
        launch.train(config_of(steps=7, seed=3), tmp_path, nnodes="2", rendezvous="first:29500")


def _owner(folder: Path, **replaced: object) -> None:
    body = {"pid": os.getpid(), "host": socket.gethostname(), "began": owner._began(os.getpid()), "rendezvous": None}
    (folder / OWNER).write_text(json.dumps({**body, "since": "2026-01-01 12:00:00+00:00", **replaced}) + "\n")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Fails if a living process of this machine loses its folder on a file system without locks. Also fails if a dead
    process keeps the folder because another process got its number."""

    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    _owner(tmp_path)
    with pytest.raises(CannotWrite, match="since 2026-01-01 12:00:00"):
        owned(tmp_path, None).__enter__()
    _owner(tmp_path, began="1")
    with owned(tmp_path, None) as first:
        assert first


@pytest.mark.parametrize("alive", [True, False])
def test_an_owner_on_a_machine_whose_locks_are_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """Fails if a folder is taken from a run on another machine that touches the file, or stays with a dead machine."""
    monkeypatch.setattr(owner, "_SILENT_SECONDS", 1.0)
    _owner(tmp_path, host="elsewhere", pid=7)
    stopped = threading.Event()

    def lives() -> None:
        while alive and not stopped.wait(0.05):
            (tmp_path / OWNER).touch()

    thread = threading.Thread(target=lives)
    thread.start()
    try:
        if alive:
            with pytest.raises(CannotWrite, match="process 7 on elsewhere"):
                owned(tmp_path, None).__enter__()
        else:
            with owned(tmp_path, None) as first:
                assert first
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize("text", ["\x00\xff{", "[1]\n", '{"pid": "7"}\n', "null\n"])
def test_a_damaged_owner_file_owns_nothing(tmp_path: Path, text: str) -> None:
    """Fails if a damaged file makes a folder unusable."""
    (tmp_path / OWNER).write_text(text)
    with owned(tmp_path, None) as first:
        assert first
        (line,) = (tmp_path / OWNER).read_text().splitlines()
        assert json.loads(line)["pid"] == os.getpid()
