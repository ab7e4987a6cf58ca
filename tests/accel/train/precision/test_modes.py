"""Proves that the loss scale of a single process grows, halves and is restored on resume. Also proves that a run logs a
note if its precision has a name from apex, such as O1."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.train.config.schema import OptimizerConfig
from tests.support.runs import rows_of, trainer_of

GROWING = {"precision": {"mode": "autocast-fp16", "loss_scale": 1024.0, "growth_interval": 3}}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("O1", "O1 is autocast-fp16: if the device has bfloat16, use autocast-bf16, which needs no loss scale"),
        (
            "O2",
            "O2 is fp16 with float32 batch norm: if the device has bfloat16, use bf16, which needs no loss scale",
        ),
        ("O3", "O3 is fp16-only: small updates vanish in float16; use it only to measure how fast a run could be"),
    ],
)
def test_a_name_of_apex_comes_with_its_limits(tmp_path: Path, name: str, says: str) -> None:
    """Checks that a run with an apex precision name, such as O1, logs what the name means and when not to use it."""
    precision = {"mode": name, "loss_scale": 1024.0}
    trainer_of(tmp_path, steps=1, precision=precision, optimizer={"name": "sgd", "lr": 0.1}).run()
    assert rows_of(tmp_path)[0] == {"note": says}


@pytest.mark.parametrize("mode", ["O0", "autocast-fp16", "fp32"])
def test_nothing_is_said_of_what_has_no_limits(tmp_path: Path, mode: str) -> None:
    """Fails if a run logs a note about its precision although there is nothing to warn about."""
    precision = {"mode": mode, "loss_scale": 1024.0}
    trainer_of(tmp_path, steps=1, precision=precision, optimizer={"name": "sgd", "lr": 0.1}).run()
    assert not [row for row in rows_of(tmp_path) if "note" in row and "MFU" not in row["note"]]


def test_the_loss_scale_grows_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Checks that the loss scale doubles after ``growth_interval`` steps without overflow. Also checks that an overflow
    halves the scale and resets the count of steps. A resumed run must keep the scale and the count."""
    trainer = trainer_of(tmp_path, steps=12, **GROWING)
    batches = trainer.batches()
    assert [trainer.one_step(batches)["loss_scale"] for _ in range(7)] == [1024, 1024, 2048, 2048, 2048, 4096, 4096]
    trainer.save()
    again = trainer_of(tmp_path, steps=12, **GROWING)
    again.resume()
    batches = again.batches()
    assert [again.one_step(batches)["loss_scale"] for _ in range(3)] == [4096, 8192, 8192]
    again.scale.scale = 2.0**40  # a loss times 2**40 overflows float16
    after = [again.one_step(batches) for _ in range(2)]
    assert [step["skipped"] for step in after] == [1, 2]
    assert (again.scale.scale, again.scale.good) == (2.0**38, 0)
    assert again.optimizer.inner.param_groups[0]["lr"] == OptimizerConfig().lr
