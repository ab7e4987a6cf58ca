"""Proves that the steps which an fp16 run skips are counted, logged and shown, and that a hopeless run stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.cli import group, run
from accel.errors import TrainingFailed
from accel.progress import watched_by
from accel.train.optimizer import scale
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, rows_of, trainer_of

_HIGH = {"precision": {"mode": "fp16", "loss_scale": 1e7}, "steps": 12}


def test_skipped_steps_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if skipped steps are missing in the progress line, the log or the result, or if a resumed run forgets the
    skipped steps of before."""
    out, said = tmp_path / "run", list[str]()
    with watched_by(lambda words, _: said.append(words)):
        result = train(config_of(**{**_HIGH, "log_every": 5}), out)
    notes = [row for row in rows_of(out) if "is skipped" in row.get("note", "")]
    assert 3 < len(notes) < 12
    assert result["skipped"] == json.loads((out / "result.json").read_text())["skipped"] == len(notes)
    assert notes[0] == {
        "note": "step 1 is skipped: a gradient overflowed at the loss scale 1e+07, which is 5e+06 now",
        "step": 1,
        "skipped": 1,
        "loss_scale": 5e6,
    }
    assert [row["skipped"] for row in notes] == list(range(1, len(notes) + 1))
    assert [words for words in said if "is skipped" in words] == [row["note"] for row in notes]
    last = next(words for words in said if words.startswith("step 12/12"))
    assert f"loss scale {result['loss_scale']:g}, {len(notes)} skipped" in last
    file = tmp_path / "run.toml"
    file.write_text(config_of(**_HIGH).to_toml())
    assert run(group, ["train", str(file), "--steps", "13", "--out", str(out), "-q"]) == 0
    rows = rows_of(out)
    total = sum("is skipped" in row.get("note", "") for row in rows)
    assert rows[-1]["skipped"] == total >= len(notes)
    assert f"13 steps, loss {rows[-1]['loss']:.4f}, {total} of them skipped" in capsys.readouterr().out


def test_the_result_of_a_skipped_last_step_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the infinite norm of a skipped step makes the result invalid JSON."""
    file = tmp_path / "run.toml"
    tables = {"steps": 2, "micro_batch": 8, "loss": f"{SMALL}:overflow_second"}
    file.write_text(config_of(precision={"mode": "fp16", "loss_scale": 1024.0}, **tables).to_toml())
    line = ["train", str(file), "--out", str(tmp_path / "run"), "-q"]
    assert run(group, [*line, "--json"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert (body["grad_norm"], body["skipped"]) == (None, 1)


def test_a_hopeless_run_names_what_overflows_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run that skips every step goes on. The gradient of the last module overflows first, because the
    backward pass begins there."""
    assert scale.MOST_SKIPPED == 100
    monkeypatch.setattr(scale, "_FLOOR", 2.0**14)
    source = tmp_path / "source.py"
    source.write_text(
        "import torch\n\ndef loss(outputs, targets):\n"
        "    return outputs.float().sum() * 1e3, torch.tensor(targets.numel())\n"
    )
    tables = {"steps": 200, "loss": f"{source}:loss", "precision": {"mode": "fp16"}}
    trainer = trainer_of(tmp_path, **tables)
    batches = trainer.batches()
    for skipped in range(1, 100):
        assert trainer.one_step(batches)["skipped"] == skipped
    last = trainer.optimizer.names[-1]
    with pytest.raises(
        TrainingFailed,
        match=r"^100 steps in a row overflowed although the loss scale fell to its floor, 16384 \(the loss is .*, and "
        rf"the gradient of {last} overflows first\); there is no checkpoint.* use --precision.mode=bf16 or a lower lr",
    ):
        trainer.one_step(batches)
