"""Makes configs and trainers of the small GPT for the tests of ``accel train``, and reads their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel.cli import group, run
from accel.train.config.schema import TrainConfig
from accel.train.loop import Trainer
from accel.train.parallel.layout import join

SMALL = Path(__file__).parent / "small_gpt.py"


def config_of(**tables: object) -> TrainConfig:
    """Returns a config with four steps of 8 samples, in micro-batches of 4. Each argument in ``tables`` replaces the
    config's entry of the same name."""
    body = {"model": f"{SMALL}:model", "data": f"{SMALL}:data", "steps": 4, "global_batch": 8, "micro_batch": 4}
    return TrainConfig.from_dict({**body, "log_every": 1, **tables})


def trainer_of(out: Path, **tables: object) -> Trainer:
    """Makes a trainer that runs in this process alone."""
    config = config_of(**tables)
    return Trainer(config, out, join(config))


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def logged(out: Path) -> list[float]:
    """Reads the losses in a run's log."""
    return [row["loss"] for row in rows_of(out) if "note" not in row]


def plan_of(config: TrainConfig, file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Returns what ``accel plan`` says of ``config`` on two ranks. Writes the config to ``file``."""
    file.write_text(config.to_toml())
    assert run(group, ["plan", str(file), "--world", "2", "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def check_disk_bytes(row: dict[str, Any], plan: dict[str, Any]) -> None:
    """Checks that the step in a ``row`` of a run's log read and wrote the bytes of the plan, within 1%."""
    for what in ("read", "written"):
        assert row[f"disk_{what}_bytes"] == pytest.approx(plan[f"disk_bytes_{what}_per_step"], rel=0.01)
