"""Proves that optimizer states on the disk change nothing but the memory they take."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.errors import BadConfig, CannotWrite, TrainingFailed
from accel.train.optimizer import master
from accel.train.run.launch import train
from tests.support.runs import check_disk_bytes, config_of, logged, plan_of, rows_of, trainer_of

MODES = [("fp32", "adamw"), ("bf16", "adamw"), ("fp16", "adam"), ("bf16-only", "adamw"), ("fp32", "sgd")]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the optimizer's step of the small GPT into several parts."""
    monkeypatch.setattr(master, "DISK_PART", 100_000)


def _tables(precision: str, optimizer: str, disk: Path | None) -> dict[str, Any]:
    return {
        "precision": {"mode": precision, "loss_scale": 256.0},
        "optimizer": {"name": optimizer, "lr": 1e-2, "groups": {"*.bias": {"weight_decay": 0.1}}},
        "steps": 6,
        "parallel": {"disk": str(disk) if disk else ""},
    }


@pytest.mark.parametrize(("precision", "optimizer"), MODES)
def test_the_same_losses_checkpoints_and_weights(tmp_path: Path, precision: str, optimizer: str) -> None:
    """Fails if states on the disk change a loss, a weight or a tensor of a checkpoint by one bit, if the states stay in
    memory between the steps, or if a run doesn't go on from a checkpoint of a run of the other kind."""
    kinds = {"memory": None, "disk": tmp_path / "states"}
    runs = {kind: trainer_of(tmp_path / kind, **_tables(precision, optimizer, disk)) for kind, disk in kinds.items()}
    losses: dict[str, list[float]] = {}
    for kind, trainer in runs.items():
        batches = trainer.batches()
        losses[kind] = [trainer.one_step(batches)["loss"] for _ in range(3)]
        trainer.save()
        losses[kind] += [trainer.one_step(batches)["loss"] for _ in range(3)]
    assert losses["disk"] == losses["memory"]
    disk = runs["disk"].optimizer.disk
    assert disk is not None
    disk.wait()
    assert len(runs["disk"].optimizer._cut([True] * len(runs["disk"].optimizer.names))) > 3
    held = [t.untyped_storage().nbytes() for t in runs["disk"].optimizer.tensors()]
    assert held
    assert not any(held)
    whole, kept = (runs[kind].optimizer.weights(runs[kind].module) for kind in kinds)
    assert all(torch.equal(kept[name], value) for name, value in whole.items())
    for source, kind in (("memory", "disk"), ("disk", "memory"), ("disk", "disk")):
        again = trainer_of(tmp_path / source, **_tables(precision, optimizer, kinds[kind]))
        again.resume()
        batches = again.batches()
        assert [again.one_step(batches)["loss"] for _ in range(3)] == losses["memory"][3:]


def test_a_changed_byte_ends_the_run(tmp_path: Path) -> None:
    """Fails if a run goes on with states that the disk gave back changed."""
    trainer = trainer_of(tmp_path / "run", **_tables("bf16", "adamw", tmp_path))
    batches = trainer.batches()
    trainer.one_step(batches)
    disk = trainer.optimizer.disk
    assert disk is not None
    disk.wait()
    (before,) = os.pread(disk._file, 1, 5000)
    os.pwrite(disk._file, bytes([before ^ 1]), 5000)
    with pytest.raises(TrainingFailed, match=r"can't be read \(it has changed since it was written\); check this"):
        trainer.one_step(batches)


def test_ranks_move_the_bytes_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the shards of two ranks train to other losses on the disk, if a run on one rank doesn't go on from
    their checkpoint, or if the counted bytes of a step aren't the bytes of ``accel plan``."""
    common: dict[str, Any] = {"precision": {"mode": "bf16"}, "steps": 3, "checkpoint": {"every": 2}}
    disk = {"zero": 3, "disk": str(tmp_path / "states")}
    configs = {"disk": config_of(**common, parallel=disk), "memory": config_of(**common, parallel={"zero": 3})}
    for name, config in configs.items():
        train(config, tmp_path / name, nproc=2)
    assert logged(tmp_path / "disk") == logged(tmp_path / "memory")
    plan = plan_of(configs["disk"], tmp_path / "run.toml", capsys)
    assert plan["disk_bytes_per_rank"] == plan["disk_bytes_read_per_step"] > plan["optimizer_bytes_per_rank"] == 0
    first, *later = [row for row in rows_of(tmp_path / "disk") if "note" not in row]
    assert first["disk_read_bytes"] < later[0]["disk_read_bytes"]
    for row in later:
        check_disk_bytes(row, plan)
    losses = []
    for name in configs:
        again = trainer_of(tmp_path / name, **common, parallel={"disk": str(tmp_path) if name == "disk" else ""})
        again.resume()
        assert again.step == 3
        losses.append(again.one_step(again.batches())["loss"])
    assert losses[0] == losses[1]
    assert not list((tmp_path / "states").iterdir())


def test_a_full_disk_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    """Fails if a step ends in anything but a sentence when the states find no room."""
    trainer = trainer_of(tmp_path / "run", **_tables("fp32", "adamw", tmp_path))
    batches, before = trainer.batches(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CannotWrite, match=r"^no space left for the states in .*; free some space or name"):
            trainer.one_step(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_cant_hold_is_refused(tmp_path: Path) -> None:
    """Fails if a folder that can't hold a file, or an optimizer that needs all parameters at once, ends in anything but
    a sentence that names the fix."""
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"can't be kept in .*file.*name a folder as parallel\.disk"):
        trainer_of(tmp_path / "run", parallel={"disk": str(tmp_path / "file")})
    with pytest.raises(BadConfig, match=r"Adafactor may need all parameters at once.*leave out parallel\.disk"):
        trainer_of(
            tmp_path / "run", parallel={"disk": str(tmp_path)}, optimizer={"name": "torch.optim.Adafactor", "lr": 1e-2}
        )
