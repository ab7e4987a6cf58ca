"""Proves that a run ends with the losses of an undisturbed run, whatever process is killed at whatever instant."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.accel.train.run.kills import Kill, Run, campaign

_PIECES, _KILLS = 20, 5  # A hundred kills are 20 pieces of 5 kills.
_RESULT = "train_kills.jsonl"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """Returns an undisturbed run and its seconds. A first run warms the caches of the machine up."""
    folder = tmp_path_factory.mktemp("calm")
    Run(folder / "first").finish()
    run = Run(folder / "calm")
    return run, run.finish()


@pytest.mark.proof(seconds=100)
def test_five_kills(tmp_path: Path, calm: tuple[Run, float]) -> None:
    """Fails if a kill of the command, of torchrun or of a rank leaves a process or a torn checkpoint. Also fails if the
    same command then doesn't end with the losses and weights of an undisturbed run."""
    assert len(campaign(tmp_path, calm[0], kills=_KILLS, seed=0, seconds=calm[1])) == _KILLS


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, _PIECES + 1))
def test_a_hundred_kills(tmp_path: Path, calm: tuple[Run, float], seed: int) -> None:
    """Fails like ``test_five_kills``, at a hundred instants. Writes the results to the folder in the environment
    variable ACCEL_SOAK_RESULTS, if it is set."""
    sent = campaign(tmp_path, calm[0], kills=_KILLS, seed=seed, seconds=calm[1])
    assert len(sent) == _KILLS
    if folder := os.environ.get("ACCEL_SOAK_RESULTS"):
        record(Path(folder) / _RESULT, seed, sent)


def record(file: Path, seed: int, sent: list[Kill]) -> None:
    """Writes one line for each kill, in place of the lines of an earlier campaign with the same seed."""
    before = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rows = [row for row in before if row["seed"] != seed] + [dataclasses.asdict(kill) for kill in sent]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
