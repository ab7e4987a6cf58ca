"""Proves that a run of one process keeps the right checkpoints, resumes from the right checkpoint, and refuses unusable
checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from accel.cli import group, run
from accel.errors import BadCheckpoint, BadConfig, TrainingFailed
from accel.train.loop import Trainer
from accel.train.parallel.layout import join
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, rows_of, trainer_of


def test_the_newest_and_the_best_checkpoint_stay(tmp_path: Path) -> None:
    """Fails if more than ``keep`` checkpoints remain, if the best checkpoint is deleted, or if an unfinished folder
    remains."""
    source = tmp_path / "scores.py"
    source.write_text(
        "score = [0.1, 0.9, 0.5, 0.4, 0.3, 0.2]\ndef evaluate(module):\n    return {'top1': score.pop(0)}\n"
    )
    checkpoint = {"every": 1, "keep": 2, "best": "top1"}
    train(config_of(steps=6, evaluate=f"{source}:evaluate", evaluate_every=1, checkpoint=checkpoint), tmp_path / "run")
    names = sorted(f.name for f in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best.json", "step-00000002", "step-00000005", "step-00000006"]


def test_a_kill_while_an_old_checkpoint_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a kill leaves a part of an old checkpoint under the name of a whole one, or if this part is still there
    after the next start."""
    keep = {"keep": 1, "asynchronous": False}
    trainer, folder = trainer_of(tmp_path, checkpoint=keep), tmp_path / "checkpoints"
    batches = trainer.batches()

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            next(path.glob("*.distcp")).unlink()
            raise KeyboardInterrupt

    trainer.one_step(batches)
    trainer.save()
    trainer.one_step(batches)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.save()
    monkeypatch.undo()
    assert [path.name for path in folder.glob("step-*")] == ["step-00000002"]
    again = trainer_of(tmp_path, checkpoint={"keep": 1})
    again.resume()
    assert again.step == 2
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("why", ["it was never written", "it is damaged", "another metric is asked for"])
def test_a_best_that_is_not_there_is_surpassed(tmp_path: Path, why: str) -> None:
    """Checks that a run no longer names its best checkpoint if this checkpoint was never written, is damaged, or is the
    best for another metric. The run must mark the next evaluated step as the best."""
    first = trainer_of(tmp_path, evaluate=f"{SMALL}:model", checkpoint={"best": "top1"})
    first.one_step(first.batches())
    assert first.checkpoints.mark_best(1, {"top1": 0.9})
    if why != "it was never written":
        first.save()
        assert first.checkpoints.standing() is not None
        assert not first.checkpoints.mark_best(2, {"top1": 0.9})
    if why == "it is damaged":
        next((tmp_path / "checkpoints" / "step-00000001").glob("*.distcp")).unlink()
    best = "-loss" if why == "another metric is asked for" else "top1"
    again = trainer_of(tmp_path, evaluate=f"{SMALL}:model", checkpoint={"best": best})
    if why == "it is damaged":
        with pytest.raises(BadCheckpoint):
            again.resume()
    assert again.checkpoints.standing() is None
    assert again.checkpoints.mark_best(2, {"top1": 0.5, "loss": 3.0})


def test_a_best_that_is_no_number_is_said(tmp_path: Path) -> None:
    """Checks that a run says why it saves no best checkpoint if the metric is NaN."""
    source = tmp_path / "source.py"
    source.write_text("def evaluate(model):\n    return {'top1': float('nan')}\n")
    trainer_of(tmp_path, steps=1, evaluate=f"{source}:evaluate", checkpoint={"best": "top1"}).run()
    assert {"note": f"top1 is nan at step 1 and can't be the best; check {source}:evaluate"} in rows_of(tmp_path)
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_a_best_that_nothing_measures_is_refused(tmp_path: Path) -> None:
    """Checks that a run with a mistyped metric in ``checkpoint.best`` raises an error."""
    source = tmp_path / "scores.py"
    source.write_text("def evaluate(module):\n    return {'top1': 0.5, 'loss': 1.0}\n")
    config = config_of(evaluate=f"{source}:evaluate", evaluate_every=1, checkpoint={"best": "-los"})
    with pytest.raises(BadConfig, match=r"best is '-los', but evaluate measures only top1, loss; use one of these"):
        Trainer(config, tmp_path, join(config)).run()


_FAILING = """
import torch

def raises(module):
    raise KeyError("labels")

def several(module):
    return {"off": torch.zeros(2)}

def scores(module):
    return {"top1": 0.5}
"""


@pytest.mark.parametrize(
    ("name", "tables", "says"),
    [
        (
            "raises",
            {},
            r"evaluate .*failing.py:raises failed at step 2 \(KeyError: 'labels'; .*; the weights are in .*/",
        ),
        ("several", {}, r"a Tensor for the metric 'off', which is not a number; .*; the weights are in .*/final"),
        ("scores", {"checkpoint": {"best": "top5"}}, r"best is 'top5', but evaluate measures only top1; use .*/final"),
        (
            "raises",
            {"evaluate_every": 1},
            "evaluate .* failed at step 1 .*; step 1 is saved; correct the function and run",
        ),
    ],
)
def test_an_evaluation_that_fails_costs_no_step(
    tmp_path: Path, name: str, tables: dict[str, object], says: str
) -> None:
    """Fails if the trained weights are lost when the evaluation raises an error, or when a metric is missing or not a
    number. Also checks that the error names the evaluation function. With a corrected function, the same command must
    resume at the step of the failed evaluation."""
    source = tmp_path / "failing.py"
    source.write_text(_FAILING)
    (tmp_path / "run").mkdir()
    out = tmp_path / "run"
    with pytest.raises((BadConfig, TrainingFailed), match=says):
        trainer_of(out, steps=2, evaluate=f"{source}:{name}", **tables).run()
    at = 1 if "evaluate_every" in tables else 2
    assert (out / "final" / "config.json").is_file() == (at == 2)
    mended = trainer_of(out, steps=2, evaluate=f"{source}:scores")
    assert mended.run()["metrics"] == {"top1": 0.5}
    rows = rows_of(out)
    assert {"note": f"resumed from step {at}"} in rows
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    for file in (out / "final" / "config.json", out / "checkpoints" / "step-00000002" / "run.json"):
        assert json.loads(file.read_text())["metrics"] == {"top1": 0.5}


_SCORED = """
import torch

score = [0.1, 0.9, 0.5]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 7)

    def forward(self, ids):
        return self.table(ids)

def model():
    return Model()

def data():
    return [(torch.tensor([i, i + 1, i + 2]) % 7, torch.tensor([i, i, i]) % 7) for i in range(16)]

def evaluate(module):
    return {"loss": score.pop(0)}
"""


def test_a_best_that_is_not_the_last_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the log has the evaluations, and that the output separates the loss of ``evaluate`` from the training
    loss. Also checks that the output names the best checkpoint if it isn't the last checkpoint. The printed command
    must export the best checkpoint. The printed command must quote paths for the shell, and must declare the inputs
    that the factory doesn't declare."""
    source, out, onnx = tmp_path / "scores.py", tmp_path / "my run", tmp_path / "best.onnx"
    source.write_text(_SCORED)
    config = tmp_path / "run.toml"
    tables = {name: f"{source}:{name}" for name in ("model", "data", "evaluate")}
    tables |= {"evaluate_every": 1, "checkpoint": {"best": "loss"}, "steps": 3}
    config.write_text(config_of(**tables).to_toml())
    assert run(group, ["train", str(config), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert [row["evaluate"] for row in rows_of(out) if "evaluate" in row] == [{"loss": x} for x in (0.1, 0.9, 0.5)]
    assert "step 2/3  evaluate: loss 0.9000" in said.err
    first, export, best = said.out.strip().splitlines()
    assert "; evaluate: loss 0.5000" in first
    assert export == f"now: accel export '{out}' -o model.onnx"
    assert "the best weights (step 2, loss 0.9000)" in best
    words = shlex.split(best.partition(": accel ")[2])
    assert words[2:4] == ["--weights", str(out / "checkpoints" / "step-00000002")]
    assert words[4:] == ["--input", "ids:int64[batch,3]", "-o", "model.onnx"]
    assert run(group, [*words[:-1], str(onnx), "--no-cache", "-q"]) == 0
    assert onnx.is_file()


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "metadata"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, damage: str) -> None:
    """Checks that a run names a damaged shard, and doesn't load the shard. Also fails if the run stops instead of using
    the previous checkpoint. The damaged shard is truncated, missing, or changed in one bit."""
    trainer = trainer_of(tmp_path, optimizer={"name": "sgd", "lr": 0.1})
    batches = trainer.batches()
    losses = []
    for _ in range(3):
        losses.append(trainer.one_step(batches)["loss"])
        trainer.save()
    newest = tmp_path / "checkpoints" / "step-00000003"
    shard = newest / ".metadata" if damage == "metadata" else next(newest.glob("*.distcp"))
    whole = bytearray(shard.read_bytes())
    if damage == "gone":
        shard.unlink()
    else:
        whole[len(whole) // 2] ^= 1
        shard.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole)
    resumed = trainer_of(tmp_path, optimizer={"name": "sgd", "lr": 0.1})
    resumed.resume()
    assert resumed.step == 2
    assert shard.name in resumed.checkpoints.damaged[0]
    assert resumed.one_step(resumed.batches())["loss"] == losses[2]
    resumed.save()  # overwrites the damaged checkpoint
    again = trainer_of(tmp_path, optimizer={"name": "sgd", "lr": 0.1})
    again.resume()
    assert (again.step, again.checkpoints.damaged) == (3, [])


def test_unfinished_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """Fails if a run resumes from a folder without run.json, or starts over although its only checkpoints
    are damaged."""
    trainer = trainer_of(tmp_path)
    trainer.one_step(trainer.batches())
    trainer.save()
    trainer.one_step(trainer.batches())
    trainer.save()
    (tmp_path / "checkpoints" / "step-00000002" / "run.json").unlink()
    resumed = trainer_of(tmp_path)
    resumed.resume()
    assert resumed.step == 1
    shard = next((tmp_path / "checkpoints" / "step-00000001").glob("*.distcp"))
    size = shard.stat().st_size
    os.truncate(shard, 7)
    for damage in (f"has 7 of {size} bytes", "is missing"):
        said = f"no checkpoint can be read: {shard} {damage}; restore a checkpoint, or start with --fresh"
        with pytest.raises(BadCheckpoint, match=re.escape(said)):
            trainer_of(tmp_path).resume()
        shard.unlink(missing_ok=True)


def test_another_order_of_samples_is_said(tmp_path: Path) -> None:
    """If a run resumes with another batch, seed or number of samples, the log must have a note that the samples come in
    another order. Also fails if a run with the same batch, seed and number of samples logs a note about the order."""
    source = tmp_path / "growing.py"
    source.write_text(SMALL.read_text())
    said = []
    for steps, tables, words in (
        (1, {}, ""),
        (2, {}, ""),
        (3, {"global_batch": 16, "seed": 5}, "global_batch, seed changed"),
        (4, {"global_batch": 16, "seed": 5}, "the number of samples changed"),
    ):
        if steps == 4:
            source.write_text(SMALL.read_text().replace("SAMPLES = 61, 16, 96", "SAMPLES = 61, 16, 200"))
        trainer_of(tmp_path, steps=steps, model=f"{source}:model", data=f"{source}:data", **tables).run()
        said += [words] if words else []
        notes = [row["note"] for row in rows_of(tmp_path) if "note" in row]
        assert [note.partition(": the samples come in another order")[0] for note in notes if "changed" in note] == said


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Checks that a run refuses to resume if the checkpoint in the run's folder is of another model."""
    trainer = trainer_of(tmp_path)
    trainer.one_step(trainer.batches())
    trainer.save()
    other = tmp_path / "other.py"
    other.write_text(SMALL.read_text())
    with pytest.raises(BadCheckpoint, match=r"checkpoint of the model .*small_gpt.py:model, not of .*other.py:model"):
        trainer_of(tmp_path, model=f"{other}:model").resume()


def test_a_checkpoint_of_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    """If the model's shape has changed, a resumed run must raise an error. Fails if the run loads some of the old
    weights, or silently starts over."""
    source = tmp_path / "source.py"
    source.write_text(SMALL.read_text())
    trainer = trainer_of(tmp_path, model=f"{source}:model")
    trainer.one_step(trainer.batches())
    trainer.save()
    source.write_text(SMALL.read_text().replace("hidden=32", "hidden=64"))
    os.utime(source, (0, 0))  # Python takes its compiled file for current if neither the size nor the second changed
    with pytest.raises(
        BadCheckpoint,
        match=r"the model has changed since .*step-00000001: embed.* had the shape \[61, 32\], and has the shape "
        r"\[61, 64\] now; .*"
        "give another --out, or start with --fresh",
    ):
        train(config_of(model=f"{source}:model"), tmp_path)


_LATE = """

class Late(GPT):
    used = False

    def __init__(self):
        super().__init__(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))
        self.spare = torch.nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, ids):
        logits = super().forward(ids)
        return logits * self.spare if self.used else logits


def overflows(outputs, targets):
    total, count = cross_entropy(outputs, targets)
    return total * (float("inf") if Path(__file__).with_name("overflows").exists() else 1), count
"""


@pytest.mark.parametrize(("mode", "overflows"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_a_run_is_taken_up_before_every_parameter_was_stepped(tmp_path: Path, mode: str, overflows: bool) -> None:
    """Checks that a run resumes from a checkpoint that lacks the optimizer state of some parameters. The state is
    missing for a parameter that had no gradient yet, and for all parameters if all steps were skipped. Also fails if
    the losses after the resume differ from the losses of a run that never stopped."""
    source = tmp_path / "source.py"
    first = "from pathlib import Path\n\nfrom accel.train.loss import cross_entropy\n"
    source.write_text(SMALL.read_text().replace("import os\n", f"import os\n{first}", 1) + _LATE)
    tables = {"model": f"{source}:Late", "loss": f"{source}:overflows", "precision": {"mode": mode}}
    tables["optimizer"] = {"lr": 0.01}
    if overflows:
        (tmp_path / "overflows").touch()
    trainer = trainer_of(tmp_path, **tables)
    assert trainer.one_step(trainer.batches()).get("skipped", 0) == overflows
    trainer.save()
    (tmp_path / "overflows").unlink(missing_ok=True)
    resumed = trainer_of(tmp_path, **tables)
    resumed.resume()
    losses = []
    for one in (trainer, resumed):
        assert one.step == 1
        batches = one.batches()
        vars(one.module)["used"] = True
        losses.append([one.one_step(batches)["loss"] for _ in range(3)])
    assert losses[0] == losses[1]
    with pytest.raises(
        BadCheckpoint, match=r"the optimizer has changed since .* is not in the checkpoint; give another"
    ):  # the checkpoint lacks the optimizer state of SGD
        trainer_of(tmp_path, **{**tables, "optimizer": {"name": "sgd"}}).resume()
