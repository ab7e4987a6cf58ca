"""Proves that several machines train one model together. Each machine has its own ``accel train`` command and ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import SMALL, config_of, rows_of, trainer_of

_SECONDS = 240


def _two(folders: list[Path], config: Path, *words: str, nnodes: str = "2") -> list[subprocess.CompletedProcess[str]]:
    """Runs two ``accel train`` commands with one rank each, like two machines, and returns the outputs of both
    commands."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "accel", "train", str(config), "--nnodes", nnodes]
    line += ["--rendezvous", f"127.0.0.1:{port}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*line, *words, "--json", "--out", str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    try:
        said = [agent.communicate(timeout=_SECONDS) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [
        subprocess.CompletedProcess(line, agent.returncode, *both) for agent, both in zip(agents, said, strict=True)
    ]


def _config(folder: Path, **more: object) -> Path:
    scores = folder / "scores.py"
    scores.write_text("def evaluate(module):\n    return {'layers': float(len(module.blocks))}\n")
    tables = {"parallel": {"zero": 3}, "checkpoint": {"every": 2}, "evaluate": f"{scores}:evaluate", **more}
    file = folder / "run.toml"
    file.write_text(config_of(optimizer={"name": "sgd", "lr": 0.1}, **tables).to_toml())
    return file


@pytest.mark.slow
def test_two_machines_train_one_model(tmp_path: Path) -> None:
    """Checks that the commands on both machines print the metrics of rank 0, although rank 0 runs on only one machine.
    Also checks that the losses match the losses of one process, and that both machines resume from the shared
    checkpoint.
    """
    out, config = tmp_path / "run", _config(tmp_path)
    ran = _two([out, out], config)
    assert [one.returncode for one in ran] == [0, 0], [one.stderr[-2000:] for one in ran]
    bodies = [json.loads(one.stdout) for one in ran]
    assert bodies[0] == bodies[1]
    assert bodies[0]["metrics"] == {"layers": 3}
    ran = _two([out, out], config, "--steps=6")
    assert [json.loads(one.stdout)["steps"] for one in ran] == [6, 6], [one.stderr[-2000:] for one in ran]
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert {"note": "resumed from step 4"} in rows
    alone = trainer_of(tmp_path / "alone", steps=6, optimizer={"name": "sgd", "lr": 0.1})
    batches = alone.batches()
    expected = [alone.one_step(batches)["loss"] for _ in range(6)]
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(expected, abs=2e-5)


@pytest.mark.slow
def test_a_killed_rank_restarts_all_machines(tmp_path: Path) -> None:
    """Fails if a killed rank on one of two machines ends the other machine's run. Also checks that both machines resume
    from the last checkpoint, and that the losses then match the losses of one process. Also checks that two machines
    train together with ``--nnodes 1:2``."""
    source, out = tmp_path / "source.py", tmp_path / "run"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal\nfrom pathlib import Path\n\ndef dies(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    global _calls\n    _calls += 1\n    flag = Path(__file__).with_name('killed')\n"
        "    if _calls == 4 and os.environ['RANK'] == '1' and not flag.exists():\n"
        "        flag.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    checkpoint = {"every": 2, "asynchronous": False}
    config = _config(tmp_path, steps=6, loss=f"{source}:dies", checkpoint=checkpoint)
    ran = _two([out, out], config, "--max-restarts", "1", nnodes="1:2")
    assert (tmp_path / "killed").exists(), [one.stderr[-2000:] for one in ran]
    assert [json.loads(one.stdout or "{}").get("steps") for one in ran] == [6, 6], [one.stderr[-2000:] for one in ran]
    rows = rows_of(out)
    assert {"note": "resumed from step 2"} in rows
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 3, 4, 5, 6]
    alone = trainer_of(tmp_path / "alone", steps=6, optimizer={"name": "sgd", "lr": 0.1})
    batches = alone.batches()
    expected = [alone.one_step(batches)["loss"] for _ in range(6)]
    assert [row["loss"] for row in rows if "loss" in row][-4:] == pytest.approx(expected[-4:], abs=2e-5)


@pytest.mark.slow
def test_machines_with_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    """Checks that machines without a shared folder save no parts of a checkpoint, and that each machine reports an
    error."""
    ran = _two([tmp_path / "one", tmp_path / "other"], _config(tmp_path))
    for one in ran:
        assert one.returncode == 2, one.stderr[-2000:]
        assert "give an --out folder on a network file system that all machines share" in one.stderr
    assert not [*tmp_path.glob("*/checkpoints"), *tmp_path.glob("*/final"), *tmp_path.glob("*/.*")]
