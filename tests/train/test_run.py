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
from runs import SMALL, config_of, trainer_of

from accel.cli import group, run
from accel.errors import BadConfig, BadData, CannotWrite, InvalidModel, TrainingFailed
from accel.sources import open_source
from accel.train import watchdog
from accel.train.config import TrainConfig
from accel.train.launch import train
from accel.train.layout import join
from accel.train.loop import Trainer


@pytest.mark.slow
def test_the_documented_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the documented line doesn't train to 97 % on two sharded ranks, the checkpoint doesn't export as it is,
    or what is exported isn't bit for bit what was trained."""
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

    from accel.examples import digits

    test = digits.data()["test"]
    found = onnxruntime.InferenceSession(str(tmp_path / "digits.onnx")).run(None, {"image": test["image"]})[0]
    assert digits.top1({"logits": found}, test) == pytest.approx(body["metrics"]["top1"])


@pytest.mark.slow
def test_the_small_gpt_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if, after a quarter of its steps, the text model knows no more than how often each byte comes."""
    line = f"train examples/gpt.toml --steps 100 --schedule.warmup=10 --out {tmp_path / 'run'} --json -q"
    assert run(group, line.split()) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["loss"] < metrics["unigram"] - 0.6, metrics


@pytest.mark.slow
def test_a_model_cut_four_ways_exports_and_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if what FSDP and tensor parallel trained together, or a pipeline, isn't a source for export and bench as it
    is, or the exported model isn't what was trained."""
    out, model = tmp_path / "run", tmp_path / "gpt.onnx"
    small = "--global-batch=8 --micro-batch=2 --steps 12 --schedule.warmup=2 --evaluate= --checkpoint.best= --json -q"
    assert run(group, f"train examples/gpt.toml --nproc 4 --tp 2 --zero 3 {small} --out {out}".split()) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < 4.5  # log 128 is 4.85
    assert run(group, ["export", str(out), "-o", str(model), "--no-cache", "-q"]) == 0
    quick = "--rounds 5 --budget-seconds 0 --block-seconds 0.02 --json -q"
    capsys.readouterr()
    assert run(group, f"bench {model} --against {out} {quick}".split()) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert len(rows) == 2
    assert max(row["max_abs_diff"] for row in rows) < 1e-3


def _log(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    """Fails if a run in two halves (adamw, fp32 master weights, dropout seeds, schedule) differs from one in one
    piece."""
    tables = {"precision": {"mode": "bf16"}, "schedule": {"name": "constant"}}
    train(config_of(steps=6, **tables), tmp_path / "whole")
    train(config_of(steps=3, **tables), tmp_path / "halves")
    result = train(config_of(steps=6, **tables), tmp_path / "halves")
    assert result["steps"] == 6
    assert _log(tmp_path / "halves") == _log(tmp_path / "whole")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    """Fails if training goes on after a NaN, the step or the parameter isn't named, or the last checkpoint is lost."""
    config = config_of(steps=9, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 1.0})
    train(config_of(steps=2, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 0.1}), tmp_path)
    text = SMALL.read_text() + "\n\ndef broken(outputs, targets):\n    total, count = overflow_once(outputs, targets)\n"
    (tmp_path / "broken.py").write_text(text + "    return total * float('nan'), count\n")
    config = TrainConfig.from_dict({**_plain(config), "loss": f"{tmp_path / 'broken.py'}:broken"})
    with pytest.raises(TrainingFailed, match=r"the loss is nan at step 3; .* the gradient of embed.tokens.weight"):
        train(config, tmp_path)
    assert [f.name for f in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000002"]


def test_the_bad_weight_is_named_and_not_what_it_spoils(tmp_path: Path) -> None:
    """Fails if a weight that is no number is hidden behind the first gradient that it made so."""
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        trainer.module.get_parameter("blocks.1.up.weight")[3, 2] = torch.nan
    with pytest.raises(TrainingFailed, match=r"nan at step 1; the first that isn't finite is blocks.1.up.weight;"):
        trainer.one_step(trainer.batches())


@pytest.mark.parametrize("broken", ["a weight", "the loss"])
def test_what_is_no_number_in_float16_is_named(tmp_path: Path, broken: str) -> None:
    """Fails if a loss scale that can't help hides which weight is no number, or, where every step is skipped, what."""
    source = tmp_path / "broken.py"
    source.write_text(
        "from accel.train.loss import cross_entropy\n\ndef loss(outputs, targets):\n"
        "    total, count = cross_entropy(outputs, targets)\n    return total * float('nan'), count\n"
    )
    tables = {"loss": f"{source}:loss"} if broken == "the loss" else {}
    trainer = trainer_of(tmp_path, steps=60, precision={"mode": "fp16"}, **tables)
    batches = trainer.batches()
    if broken == "a weight":
        with torch.no_grad():
            trainer.module.get_parameter("blocks.1.up.weight")[3, 2] = torch.nan
        with pytest.raises(TrainingFailed, match=r"nan at step 1; the first that isn't finite is blocks.1.up.weight;"):
            trainer.one_step(batches)
        return
    for _ in range(49):
        assert trainer.one_step(batches)["skipped"]
    with pytest.raises(
        TrainingFailed, match=r"50 steps in a row overflowed, the loss is nan; .* the gradient of embed.tokens.weight;"
    ):
        trainer.one_step(batches)


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_for_convolutions_too(tmp_path: Path, tf32: bool) -> None:
    """Fails if ``precision.tf32`` doesn't switch both products and convolutions on a GPU, which torch sets apart."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = not tf32
        trainer_of(tmp_path, precision={"tf32": tf32})
        assert [place.allow_tf32 for place in places] == [tf32, tf32]
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


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
        train(config_of(loss=f"{source}:one_fails", micro_batch=4), tmp_path / "run", nproc=2)


@pytest.mark.slow
def test_what_ends_a_restarted_run_is_what_is_said(tmp_path: Path) -> None:
    """Fails if one process isn't restarted, or the error of the first attempt is told for what ended the second."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal\nfrom pathlib import Path\n\n"
        "def fails(outputs, targets):\n"
        "    flag = Path(__file__).with_name('begun')\n"
        "    if flag.exists():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    flag.touch()\n    raise ValueError('only the first attempt')\n"
    )
    with pytest.raises(TrainingFailed, match="the ranks died without a word") as caught:
        train(config_of(loss=f"{source}:fails"), tmp_path / "run", max_restarts=1)
    assert "only the first attempt" not in str(caught.value)


def test_data_shorter_than_a_batch(tmp_path: Path) -> None:
    """Fails if the refusal of a rank doesn't reach the caller with its own kind and words."""
    with pytest.raises(BadData, match="the data has 96 samples, a global batch takes 128"):
        train(config_of(global_batch=128), tmp_path)


# Where a disk is full: files can't grow beyond 50 kB from then on, which a shard of a checkpoint has to.
_FULL = {
    "a checkpoint": """
from accel.train.checkpoint import Checkpoints
whole = Checkpoints.save
def save(self, state, run):
    if run["step"] == 6:
        self.wait()
        full()
    whole(self, state, run)
Checkpoints.save = save
from accel.train.loss import cross_entropy as dies
""",
    "final": """
import accel.train.final
whole = accel.train.final.write_final
def write_final(*arguments, **named):
    full()
    whole(*arguments, **named)
accel.train.final.write_final = write_final
from accel.train.loss import cross_entropy as dies
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", _FULL)
def test_a_full_disk_is_said_and_the_run_goes_on_with_room(tmp_path: Path, calm: Path, what: str) -> None:
    """Fails if a disk that is full in the middle of a save ends in a traceback, costs the checkpoint before it, leaves
    half of one, or the same command, with room again, doesn't go on to the same curve."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport resource\nfrom pathlib import Path\n\n"
        "def full():\n    if not Path(__file__).with_name('room').exists():\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n" + _FULL[what]
    )
    out, config = tmp_path / "run", config_of(loss=f"{source}:dies", **_COMMON)
    with pytest.raises(CannotWrite, match=rf"{'final' if what == 'final' else 'checkpoints/step-0'}.* free some space"):
        train(config, out, nproc=2)
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left[-1] == ("step-00000008" if what == "final" else "step-00000004")
    assert not [path for path in (*out.iterdir(), *(out / "checkpoints").iterdir()) if path.name.startswith(".")]
    (tmp_path / "room").touch()
    assert train(config, out, nproc=2)["steps"] == 8
    assert _log(out)[-2:] == pytest.approx(_log(calm)[-2:], abs=1e-6)
    assert (out / "final" / "config.json").is_file()


def test_a_changed_final_folder_is_refused(tmp_path: Path) -> None:
    """Fails if a file of ``final/`` that training didn't write is exported, or a whole one isn't opened."""
    train(config_of(steps=1), tmp_path)
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
        (["examples/digits.toml", "--nnodes", "2"], "pass --rendezvous HOST:PORT, the same on each"),
        (["examples/digits.toml", "--nnodes", "1:2"], "pass --rendezvous HOST:PORT, the same on each"),
        (["examples/digits.toml", "--nnodes", "2:1"], "write a number of machines, or MIN:MAX"),
        (["examples/digits.toml", "--nnodes", "3", "--rendezvous", "localhost:1"], "use --global-batch=96"),
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


_COMMON = {"steps": 8, "checkpoint": {"every": 2}, "parallel": {"zero": 3}, "micro_batch": 2}
# Where a rank is killed, once: in the second step after a checkpoint that is on the disk in the first one (so that only
# its name is missing then), with its shards of a checkpoint written, with half of final/ written.
_KILLS = {
    "in a step": """
from accel.train.checkpoint import Checkpoints
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
from accel.train.checkpoint import Checkpoints
finish = Checkpoints._finish
def _finish(self, final, run):
    if run["step"] == 6:
        kill("0")
    finish(self, final, run)
Checkpoints._finish = _finish
from accel.train.loss import cross_entropy as dies
""",
    "in the consolidation": """
import accel.train.final
sha256 = accel.train.final.file_sha256
def file_sha256(file):
    kill("0")
    return sha256(file)
accel.train.final.file_sha256 = file_sha256
from accel.train.loss import cross_entropy as dies
""",
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("calm")
    train(config_of(**_COMMON), out, nproc=2)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("where", _KILLS)
def test_a_killed_rank_restarts_from_the_last_checkpoint(tmp_path: Path, calm: Path, where: str) -> None:
    """Fails if a SIGKILL ends the run, it costs more than what came after the last checkpoint on the disk, what follows
    isn't the curve of a run that nobody disturbed, the weights differ in the end, or something half-written is left."""
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
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    first = {"in the consolidation": []}.get(where, [5, 6, 7, 8])  # the steps after the restart
    assert steps[len(steps) - len(first) :] == first
    assert steps[: len(steps) - len(first)] == list(range(1, len(steps) - len(first) + 1))
    undisturbed, disturbed = _log(calm), _log(out)
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
def test_a_hung_rank_is_named(tmp_path: Path, how: str) -> None:
    """Fails if a rank that sleeps or is stopped keeps the run for ever, or one that waits for it is blamed."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nimport signal, time\n\n"
        "def hangs(outputs, targets):\n"
        "    from accel.train.loss import cross_entropy\n"
        "    global _calls\n    _calls += 1\n"
        f"    if _calls == 4 and os.environ['RANK'] == '1':\n        {how}\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    config = config_of(steps=50, loss=f"{source}:hangs", hang_seconds=15.0, parallel={"zero": 3})
    where = "is in hangs at .*source.py" if "sleep" in how else "doesn't answer"
    with pytest.raises(TrainingFailed, match=rf"no step in 15 s: rank 1 {where}") as caught:
        train(config, tmp_path / "run", nproc=2)
    assert "rank 0" not in str(caught.value)
    left = [f for f in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(f) and "train.rank" in _read(f)]
    assert not left


def test_a_start_may_take_longer_than_a_step(tmp_path: Path) -> None:
    """Fails if slow imports or a restart count as a hung step, or a start that never ends is waited for for ever."""

    def made_before(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds,) * 2)

    watchdog.clear(tmp_path)
    made_before(tmp_path / watchdog.STACKS, 100)
    assert watchdog.overdue(tmp_path, 15) == ""
    made_before(tmp_path / watchdog.STACKS, 200)
    assert watchdog.overdue(tmp_path, 15) == "no first step in 150 s"
    watchdog.beat(tmp_path)
    assert watchdog.overdue(tmp_path, 15) == ""
    made_before(tmp_path / watchdog.ALIVE, 20)
    assert watchdog.overdue(tmp_path, 15) == "no step in 15 s"
    again = "import sys, pathlib, accel.train.watchdog as w; w.enrol(pathlib.Path(sys.argv[1]), 0)"
    subprocess.run([sys.executable, "-c", again, str(tmp_path)], check=True)  # a rank, started anew after a crash
    assert watchdog.overdue(tmp_path, 15) == ""


@pytest.mark.slow
def test_a_killed_command_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Fails if ending ``accel train`` by SIGTERM leaves torchrun or a rank running."""
    line = ["-m", "accel", "train", "examples/digits.toml", "--nproc", "2", "--steps", "100000", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, *line], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (tmp_path / "log.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "log.jsonl").is_file()
    ranks = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _read(p) and "train.rank" in _read(p)]
    assert len(ranks) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 1
    assert not [p for p in ranks if str(tmp_path) in _read(p)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_the_log_says_how_busy_the_machine_is(tmp_path: Path) -> None:
    """Fails if the MFU isn't what the model's products take of the peak, or the TensorBoard file lacks a step."""
    config = config_of(steps=3, peak_flops=1e12, tensorboard=True, data=f"{SMALL}:data")
    train(config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    # 2 FLOPs a weight of a product and position, three products in the MLP and attention of 3 blocks, and the head;
    # attention itself: 2 products of s x s x h in each block.
    forward = 2 * 16 * (3 * 12 * 32**2 + 61 * 32) + 3 * 2 * 2 * 16 * 16 * 32
    for row in rows:
        assert row["mfu"] == pytest.approx(3 * 8 * forward / row["seconds_per_step"] / 1e12, rel=1e-6)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [
        (event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "loss"
    ]
    assert found == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
