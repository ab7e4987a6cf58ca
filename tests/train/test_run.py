"""``accel train`` from the outside: the documented commands, what it leaves, and what stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accel.cli import group, run
from accel.errors import BadCheckpoint, BadConfig, BadData, InvalidModel, TrainingFailed
from accel.sources import open_source
from accel.train.config import TrainConfig
from accel.train.launch import train
from accel.train.layout import join
from accel.train.loop import Trainer

SMALL = Path(__file__).parent / "small.py"


def _config(**tables: object) -> TrainConfig:
    body = {"model": f"{SMALL}:model", "data": f"{SMALL}:data", "steps": 4, "global_batch": 8, "micro_batch": 4}
    return TrainConfig.from_dict({**body, "log_every": 1, **tables})


@pytest.mark.slow
def test_the_documented_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the documented line doesn't train to 97 % on two sharded ranks, the checkpoint doesn't export as it
    is, or
    what is exported isn't bit for bit what was trained."""
    out = tmp_path / "run"
    line = f"train examples/digits.toml --nproc 2 --zero 3 --steps 200 --out {out}/ --json -q"
    assert run(group, line.split()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["metrics"]["top1"] >= 0.97
    from safetensors.torch import load_file

    from accel.train.config import TrainConfig as Config

    final = load_file(str(out / "final" / "model-00001-of-00001.safetensors"))
    config = Config.from_dict(json.loads((out / "train.json").read_text()))
    trained = Trainer(config, out, join(config))
    trained.resume()
    assert trained.step == 200
    assert all(torch.equal(value, final[name]) for name, value in trained.module.state_dict().items())
    assert run(group, ["export", f"{out}/", "-o", str(tmp_path / "digits.onnx"), "--no-cache", "-q"]) == 0
    import onnxruntime

    from accel.examples.digits_train import _split

    images, labels = _split(held_out=True)
    found = onnxruntime.InferenceSession(str(tmp_path / "digits.onnx")).run(None, {"image": images.numpy()})[0]
    assert float((found.argmax(1) == labels.numpy()).mean()) == pytest.approx(body["metrics"]["top1"])


def _log(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    """Fails if a run in two halves (adamw, fp32 master weights, dropout seeds, schedule) differs from one in one
    piece."""
    tables = {"precision": {"mode": "bf16"}, "schedule": {"name": "constant"}}
    train(_config(steps=6, **tables), tmp_path / "whole")
    train(_config(steps=3, **tables), tmp_path / "halves")
    result = train(_config(steps=6, **tables), tmp_path / "halves")
    assert result["steps"] == 6
    assert _log(tmp_path / "halves") == _log(tmp_path / "whole")


def test_the_newest_and_the_best_checkpoint_stay(tmp_path: Path) -> None:
    """Fails if more than ``keep`` are kept, the best one goes, or a finished run leaves an unfinished folder."""
    source = tmp_path / "scores.py"
    source.write_text(
        "score = [0.1, 0.9, 0.5, 0.4, 0.3, 0.2]\ndef evaluate(module):\n    return {'top1': score.pop(0)}\n"
    )
    checkpoint = {"every": 1, "keep": 2, "best": "top1"}
    train(_config(steps=6, evaluate=f"{source}:evaluate", evaluate_every=1, checkpoint=checkpoint), tmp_path / "run")
    names = sorted(f.name for f in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best.json", "step-00000002", "step-00000005", "step-00000006"]


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    """Fails if training goes on after a NaN, the step or the parameter isn't named, or the last checkpoint is lost."""
    config = _config(steps=9, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 1.0})
    train(_config(steps=2, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 0.1}), tmp_path)
    text = SMALL.read_text() + "\n\ndef broken(outputs, targets):\n    total, count = overflow_once(outputs, targets)\n"
    (tmp_path / "broken.py").write_text(text + "    return total * float('nan'), count\n")
    config = TrainConfig.from_dict({**_plain(config), "loss": f"{tmp_path / 'broken.py'}:broken"})
    with pytest.raises(TrainingFailed, match=r"the loss is nan at step 3; .* the gradient of embed.tokens.weight"):
        train(config, tmp_path)
    assert [f.name for f in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000002"]


def _plain(config: TrainConfig) -> dict[str, object]:
    import dataclasses

    return dataclasses.asdict(config)


def test_each_ranks_first_error_is_shown(tmp_path: Path) -> None:
    """Fails if what a rank met is lost among the others' tracebacks: the message names the rank and what it raised."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\ndef one_fails(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('the disk of this rank is gone')\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    with pytest.raises(TrainingFailed, match="rank 1: ValueError: the disk of this rank is gone"):
        train(_config(loss=f"{source}:one_fails", micro_batch=4), tmp_path / "run", nproc=2)


def test_data_shorter_than_a_batch(tmp_path: Path) -> None:
    """Fails if the refusal of a rank doesn't reach the caller with its own kind and words."""
    with pytest.raises(BadData, match="the data has 96 samples, a global batch takes 128"):
        train(_config(global_batch=128), tmp_path)


def _trainer(out: Path, **tables: object) -> Trainer:
    config = _config(**tables)
    return Trainer(config, out, join(config))


def test_damaged_checkpoints_are_named_and_unfinished_ones_left_alone(tmp_path: Path) -> None:
    """Fails if a cut shard is loaded or not named, or a folder without its last file is resumed from."""
    trainer = _trainer(tmp_path)
    trainer.one_step(trainer.batches())
    trainer.save()
    trainer.one_step(trainer.batches())
    trainer.save()
    newest = tmp_path / "checkpoints" / "step-00000002"
    shard = next(newest.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadCheckpoint, match=rf"{shard.name} is missing or cut short; delete step-00000002"):
        _trainer(tmp_path).resume()
    shard.write_bytes(whole)
    (newest / "run.json").unlink()
    resumed = _trainer(tmp_path)
    resumed.resume()
    assert resumed.step == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Fails if a run takes up weights of another model that happen to be in its folder."""
    trainer = _trainer(tmp_path)
    trainer.one_step(trainer.batches())
    trainer.save()
    other = tmp_path / "other.py"
    other.write_text(SMALL.read_text())
    with pytest.raises(BadCheckpoint, match=r"is of the model .*small.py:model, not .*other.py:model"):
        _trainer(tmp_path, model=f"{other}:model").resume()


def test_a_changed_final_folder_is_refused(tmp_path: Path) -> None:
    """Fails if a file of ``final/`` that training didn't write is exported, or a whole one isn't opened."""
    train(_config(steps=1), tmp_path)
    artifact = open_source(tmp_path)
    assert [str(spec) for spec in artifact.signature.inputs] == ["ids:int64[batch,16]{0..60}"]
    weights = tmp_path / "final" / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(InvalidModel, match="not the file that training wrote"):
        open_source(tmp_path)


def test_bad_options_end_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a mistyped option starts processes, or ends in a traceback."""
    for words, says in (
        (["nothing.toml"], "does not exist"),
        (["examples/digits.toml", "--learning-rate=3"], "has no learning_rate"),
        (["examples/digits.toml", "--nproc", "3"], "use --global-batch="),
        (["examples/digits.toml", "stray"], "write --key=value"),
        (
            ["examples/digits.toml", "--parallel.tp=2", "--nproc", "2", "--micro-batch=32"],
            "needs a plan of what is cut",
        ),
    ):
        assert run(group, ["train", *words, "--out", str(tmp_path / "run"), "-q"]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_dry_run_launches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if ``--dry-run`` leaves a folder, or plans another layout than the one asked for."""
    line = f"train examples/digits.toml --nproc 2 --zero 3 --dry-run --json --out {tmp_path / 'run'}"
    assert run(group, line.split()) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["zero"] == 3
    assert not (tmp_path / "run").exists()


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    """Fails if a config that ``accel plan`` wrote from numbers alone starts processes."""
    with pytest.raises(BadConfig, match="needs model and data"):
        train(TrainConfig.from_dict({}), tmp_path)


@pytest.mark.slow
def test_a_killed_rank_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Fails if a SIGKILL in the middle ends the run, or what follows isn't the curve of a run that nobody disturbed."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal\nfrom pathlib import Path\nFLAG = Path(__file__).with_name('killed')\n\n"
        "def dies_once(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    global _calls\n    _calls += 1\n"
        "    if _calls == 11 and os.environ['RANK'] == '1' and not FLAG.exists():\n"
        "        FLAG.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    common = {"steps": 8, "checkpoint": {"every": 2}, "parallel": {"zero": 3}, "micro_batch": 2}
    config = _config(loss=f"{source}:dies_once", **common)
    result = train(config, tmp_path / "killed_run", nproc=2, max_restarts=1)
    assert (tmp_path / "killed").exists()
    train(_config(**common), tmp_path / "calm", nproc=2)
    calm, disturbed = _log(tmp_path / "calm"), _log(tmp_path / "killed_run")
    assert result["steps"] == 8
    assert len(disturbed) > len(calm) == 8
    assert disturbed[-4:] == pytest.approx(calm[-4:], abs=1e-6)


@pytest.mark.slow
def test_a_killed_command_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Fails if ending ``accel train`` by SIGTERM leaves torchrun or a rank running."""
    line = ["-m", "accel", "train", "examples/digits.toml", "--nproc", "2", "--steps", "100000", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, *line], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(p) and "train.rank" in _read(p)]
    assert len(ranks) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert not [p for p in ranks if str(tmp_path) in _read(p)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
