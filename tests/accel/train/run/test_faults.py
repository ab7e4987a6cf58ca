"""Proves that a training run survives or reports these faults: a full disk, a killed or hung rank, and a terminated
command."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel.errors import CannotWrite, TrainingFailed
from accel.train import log
from accel.train.run import launch, watchdog
from accel.train.run.launch import first_errors, train
from accel.train.run.rank import leave
from tests.support.runs import SMALL, config_of, logged, rows_of

_COMMON = {"steps": 8, "checkpoint": {"every": 2}, "parallel": {"zero": 3}, "micro_batch": 2}
# To simulate a full disk, this code limits the size of each file to 50 kB. A checkpoint's shard is larger than 50 kB.
_SHARDS = """
from accel.train.checkpoints.checkpoint import Checkpoints
whole = Checkpoints.save
def save(self, state, run):
    if run["step"] == 6 and os.environ["RANK"] in %r:
        self.wait()
        full()
    whole(self, state, run)
Checkpoints.save = save
from accel.train.loss import cross_entropy as dies
"""
_FULL = {
    "a checkpoint": _SHARDS % "01",
    "the shard of one rank": _SHARDS % "1",
    "what rank 0 adds": """
import errno
import accel.train.checkpoints.checkpoint as checkpoint
whole = checkpoint._write
def _write(path, body):
    if body.get("step") == 6 and not Path(__file__).with_name("room").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    whole(path, body)
checkpoint._write = _write
from accel.train.loss import cross_entropy as dies
""",
    "final": """
import accel.train.checkpoints.final
whole = accel.train.checkpoints.final.write_final
def write_final(*arguments, **named):
    full()
    whole(*arguments, **named)
accel.train.checkpoints.final.write_final = write_final
from accel.train.loss import cross_entropy as dies
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", _FULL)
def test_a_full_disk_is_said_and_the_run_goes_on_with_room(tmp_path: Path, calm: Path, what: str) -> None:
    """Fails if a full disk during a save causes a traceback, deletes the previous checkpoint or leaves a half-written
    checkpoint. When the disk has free space again, the same command must resume with the same losses."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport resource\nfrom pathlib import Path\n\n"
        "def full():\n    if not Path(__file__).with_name('room').exists():\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n" + _FULL[what]
    )
    out, config = tmp_path / "run", config_of(loss=f"{source}:dies", **_COMMON)
    words = rf"^rank \d: [^|]*{'final' if what == 'final' else 'checkpoints/step-0'}[^|]* free some space[^|]*$"
    with pytest.raises(CannotWrite, match=words):  # the other rank's lost connection isn't shown
        train(config, out, nproc=2)
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left[-1] == ("step-00000008" if what == "final" else "step-00000004")
    assert not [path for path in (*out.iterdir(), *(out / "checkpoints").iterdir()) if path.name.startswith(".")]
    (tmp_path / "room").touch()
    assert train(config, out, nproc=2)["steps"] == 8
    assert logged(out)[-2:] == pytest.approx(logged(calm)[-2:], abs=1e-6)
    assert (out / "final" / "config.json").is_file()


# Each key names a moment in a run, and its value is code that kills a rank once at this moment. The code for "in its
# shards" kills a rank after some shards of a checkpoint are written. The code for "in a step" kills a rank in the
# second step after a checkpoint. The code for "in a checkpoint" kills a rank after all shards are written, but before
# the checkpoint's folder gets its final name. The code for "in the consolidation" kills a rank after half of final/ is
# written.
_KILLS = {
    "in its shards": """
import torch.distributed.checkpoint.filesystem as disk
from accel.train.checkpoints.checkpoint import Checkpoints
whole, item, begun = Checkpoints.save, disk._write_item, []
def save(self, state, run):
    self.wait()
    if run["step"] == 6:
        begun.append(0)
    whole(self, state, run)
Checkpoints.save = save
def _write_item(*arguments, **named):
    if begun:
        begun.append(0)
        if len(begun) == 4:
            kill("1")
    return item(*arguments, **named)
disk._write_item = _write_item
from accel.train.loss import cross_entropy as dies
""",
    "in a step": """
from accel.train.checkpoints.checkpoint import Checkpoints
whole, saves = Checkpoints.save, []
def save(self, state, run):
    whole(self, state, run)
    saves.append(self)
Checkpoints.save = save
def dies(outputs, targets):
    from accel.train.loss import cross_entropy
    global _calls
    _calls += 1
    if _calls == 9:
        saves[-1]._pending[0].result(60)
    if _calls == 11:
        kill("1")
    return cross_entropy(outputs, targets)
""",
    "in a checkpoint": """
from accel.train.checkpoints.checkpoint import Checkpoints
finish = Checkpoints._finish
def _finish(self, final, run):
    if run["step"] == 6:
        kill("0")
    finish(self, final, run)
Checkpoints._finish = _finish
from accel.train.loss import cross_entropy as dies
""",
    "in the consolidation": """
import accel.train.checkpoints.final
sha256 = accel.train.checkpoints.final.file_sha256
def file_sha256(file):
    kill("0")
    return sha256(file)
accel.train.checkpoints.final.file_sha256 = file_sha256
from accel.train.loss import cross_entropy as dies
""",
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the output folder of a run without any fault."""
    out = tmp_path_factory.mktemp("calm")
    train(config_of(**_COMMON), out, nproc=2)
    return out


def test_a_disk_too_full_for_the_reason_is_still_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error names the full disk if a run can't write its log. A rank that can't write its error to the
    full disk must not be reported as "ended without an error message"."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "log.jsonl"))
    leave(tmp_path, 0, full)
    assert isinstance(error := first_errors(tmp_path, [0], 1), CannotWrite)
    assert f"no space left for {tmp_path}/log.jsonl; free some space" in str(error)
    (tmp_path / "errors" / "rank-0.json").write_text("")
    (tmp_path / "ranks.log").touch()
    assert "without an error message" in str(first_errors(tmp_path, [0, 1], 1))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=4096))
    error = first_errors(tmp_path, [0, 1], 1)
    assert isinstance(error, CannotWrite)
    assert f"no space left for {tmp_path}; free some space" in str(error)
    leave(tmp_path, 1, RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert str(first_errors(tmp_path, [0, 1], 1)) == str(error)


def _unreadable(index: int) -> int:
    raise ValueError(f"sample {index} is cut short")


def test_what_a_process_of_the_loader_meets_is_said(tmp_path: Path) -> None:
    """Checks that the message shows the error of the sample, not the truncated traceback of a data loader's process."""
    batches = DataLoader([0, 1], num_workers=1, collate_fn=lambda rows: _unreadable(rows[0]))
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(ValueError, match="DataLoader worker") as caught:
        next(iter(batches))
    # The loader has set a handler for SIGCHLD. In a process with threads of other runtimes, a later SIGCHLD could end
    # the process.
    signal.signal(signal.SIGCHLD, before)
    leave(tmp_path, 0, caught.value)
    said = str(first_errors(tmp_path, [0], 1))
    assert said.startswith("ValueError: sample 0 is cut short (in a process of the loader); the tracebacks are in")


@pytest.mark.slow
@pytest.mark.parametrize("where", _KILLS)
def test_a_killed_rank_restarts_from_the_last_checkpoint(tmp_path: Path, calm: Path, where: str) -> None:
    """Checks that the run restarts after a SIGKILL, and resumes from the last complete checkpoint. Also checks that the
    losses after the restart and the final weights are the same as in a run without faults, and that no half-written
    file remains."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal\nfrom pathlib import Path\n\n"
        "def kill(rank):\n    flag = Path(__file__).with_name('killed')\n"
        "    if os.environ['RANK'] == rank and not flag.exists():\n"
        "        flag.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n\n" + _KILLS[where]
    )
    out = tmp_path / "killed_run"
    result = train(config_of(loss=f"{source}:dies", **_COMMON), out, nproc=2, max_restarts=1)
    assert (tmp_path / "killed").exists()
    assert result["steps"] == 8
    rows = rows_of(out)
    steps = [row["step"] for row in rows if "note" not in row]
    first = {"in the consolidation": []}.get(where, [5, 6, 7, 8])  # the losses of the steps after the restart
    assert steps[len(steps) - len(first) :] == first
    assert steps[: len(steps) - len(first)] == list(range(1, len(steps) - len(first) + 1))
    assert {"note": f"resumed from step {8 - len(first)}"} in rows
    undisturbed, disturbed = logged(calm), logged(out)
    assert len(undisturbed) == 8
    assert len(disturbed) >= 8
    assert disturbed[-2:] == pytest.approx(undisturbed[-2:], abs=1e-6)
    assert not [path.name for path in (*out.iterdir(), *(out / "checkpoints").iterdir()) if path.name.startswith(".")]
    from safetensors.torch import load_file

    weights, expected = (
        load_file(str(folder / "final" / "model-00001-of-00001.safetensors")) for folder in (out, calm)
    )
    assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_hung_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Fails if a sleeping or stopped rank blocks the run forever, or still runs when torchrun is told to end, because
    torchrun would wait for it. Also fails if the error names a rank that only waits for the hung rank."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal, time\n\n"
        "def hangs(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    global _calls\n    _calls += 1\n"
        f"    if _calls == 4 and os.environ['RANK'] == '1':\n        {how}\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    config = config_of(steps=50, loss=f"{source}:hangs", hang_seconds=10.0, parallel={"zero": 3})
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 3.0)
    whole, left_to_torchrun = launch._end, list[str]()

    def end(process: subprocess.Popen[bytes]) -> None:
        left_to_torchrun.extend(line for line in _processes(tmp_path) if "torch.distributed.run" not in line)
        whole(process)

    monkeypatch.setattr(launch, "_end", end)
    where = "is in hangs at .*source.py" if "sleep" in how else "doesn't answer"
    with pytest.raises(TrainingFailed, match=rf"no step in 10 s: rank 1 {where}") as caught:
        train(config, tmp_path / "run", nproc=2)
    assert "rank 0" not in str(caught.value)
    assert not left_to_torchrun
    assert not _processes(tmp_path)


def test_a_start_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """Fails if slow imports or a restart count as a hung step. Also checks that accel reports a run that never reaches
    its first step."""

    def made_before(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds,) * 2)

    watchdog.clear(tmp_path)
    made_before(tmp_path / watchdog.STACKS, 100)
    assert watchdog.overdue(tmp_path, 15) == ""
    made_before(tmp_path / watchdog.STACKS, 200)
    assert watchdog.overdue(tmp_path, 15) == "no first step in 150 s"
    log.beat(tmp_path)
    assert watchdog.overdue(tmp_path, 15) == ""
    made_before(tmp_path / log.ALIVE, 20)
    assert watchdog.overdue(tmp_path, 15) == "no step in 15 s"
    again = "import sys, pathlib, accel.train.run.watchdog as w; w.enrol(pathlib.Path(sys.argv[1]), 0)"
    subprocess.run([sys.executable, "-c", again, str(tmp_path)], check=True)  # calls ``enrol`` like a restarted rank
    assert watchdog.overdue(tmp_path, 15) == ""


@pytest.mark.slow
def test_a_killed_command_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Fails if torchrun or a rank continues after SIGTERM ended ``accel train``."""
    line = ["-m", "accel", "train", "examples/digits.toml", "--nproc", "2", "--steps", "100000", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, *line], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (tmp_path / "log.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "log.jsonl").is_file()
    assert len(_processes(tmp_path)) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 1
    assert not _processes(tmp_path)


def _processes(folder: Path) -> list[str]:
    """Returns the command lines of the running ranks and torchruns of the run in ``folder``."""
    lines = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(folder) in line and "train.run.rank" in line]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
