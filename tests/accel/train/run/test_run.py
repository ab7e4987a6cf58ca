"""Proves that ``accel train`` works as documented."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import torch

from accel.cli import group, run
from accel.errors import TrainingFailed
from accel.progress import watched_by
from accel.train import log
from accel.train.build import make_data
from accel.train.config.schema import TrainConfig
from accel.train.loop import Trainer
from accel.train.optimizer import scale
from accel.train.parallel.layout import join
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, logged, rows_of, trainer_of


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_interpreters")
def test_the_documented_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the documented command reaches an accuracy of 97% with ZeRO 3 on two ranks. Also checks that the run
    folder can be exported, and that the weights in ``final/`` are exactly the trained weights."""
    out = tmp_path / "run"
    line = f"train examples/digits.toml --nproc 2 --zero 3 --steps 200 --out {out}/ --json -q"
    assert run(group, line.split()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["metrics"]["top1"] >= 0.97
    from safetensors.torch import load_file

    from accel.train.config.schema import TrainConfig as Config

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
def test_the_text_example_begins_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before training, the loss on the held-out text is log(128) = 4.85. Checks that the held-out loss is below 3.34
    after 30 steps with small batches. A model that knows only how often each byte occurs has a loss of 3.14."""
    line = f"train examples/gpt.toml --steps 30 --global-batch=8 --schedule.warmup=3 --out {tmp_path / 'run'} --json -q"
    assert run(group, line.split()) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["loss"] < metrics["unigram"] + 0.2, metrics


@pytest.mark.proof
def test_the_small_gpt_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the text model is clearly better than a model of byte frequencies after a quarter of its steps."""
    line = f"train examples/gpt.toml --steps 100 --schedule.warmup=10 --out {tmp_path / 'run'} --json -q"
    assert run(group, line.split()) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["loss"] < metrics["unigram"] - 0.6, metrics


@pytest.mark.proof
def test_the_writer_learns_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the run folder of a model of transformers isn't exported with its KV cache, or its decoder doesn't write
    text. Before training, the held-out loss is log(1024) = 6.93."""
    from accel.examples import writer

    out, decoder = tmp_path / "run", tmp_path / "writer"
    assert run(group, f"train examples/writer.toml --steps 40 --out {out} --json -q".split()) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["loss"] < 6.2
    assert run(group, ["export", str(out), "--decoder", "-o", str(decoder), "-q"]) == 0
    writer.write_texts(decoder)
    capsys.readouterr()
    asked = "--max-new-tokens 9 --temperature 1 --seed 1 --json"
    assert run(group, ["generate", str(decoder), "--prompt", "The statement", *asked.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert writer.tokenizer().decode(answer["ids"]) == answer["text"]
    assert len(set(answer["ids"])) > 1


@pytest.mark.proof
def test_a_model_cut_four_ways_exports_and_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the run folder of a model trained with FSDP and tensor parallel can be exported and benchmarked. Also
    checks that the exported model gives the same outputs as the trained model."""
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


def test_a_run_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    """Fails if the losses of an interrupted and resumed run differ from the losses of an uninterrupted run. Also checks
    that the progress shows the step at which the run resumes, and that a run on the CPU gets no advice for a GPU."""
    tables = {"precision": {"mode": "bf16"}, "schedule": {"name": "constant"}}
    train(config_of(steps=6, **tables), tmp_path / "whole")
    train(config_of(steps=3, **tables), tmp_path / "halves")
    said: list[str] = []
    with watched_by(lambda words, _: said.append(words)):
        result = train(config_of(steps=6, **tables), tmp_path / "halves")
    assert result["steps"] == 6
    assert said[0] == "resumed from step 3"
    advice = [words for words in said if "MFU" in words]
    gpu = "MFU isn't shown; give one GPU's FLOP/s, e.g. --peak-flops=989e12 for an H100 in bf16"
    assert advice == ([gpu] if torch.cuda.is_available() else [])
    assert {"note": "resumed from step 3"} in rows_of(tmp_path / "halves")
    assert logged(tmp_path / "halves") == logged(tmp_path / "whole")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    """Checks that training stops after a NaN, and that the error names the step and the parameter. Also fails if the
    last checkpoint is lost."""
    config = config_of(steps=9, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 1.0})
    train(config_of(steps=2, checkpoint={"every": 2}, optimizer={"name": "sgd", "lr": 0.1}), tmp_path)
    text = SMALL.read_text() + "\n\ndef broken(outputs, targets):\n    total, count = overflow_once(outputs, targets)\n"
    (tmp_path / "broken.py").write_text(text + "    return total * float('nan'), count\n")
    config = TrainConfig.from_dict({**_plain(config), "loss": f"{tmp_path / 'broken.py'}:broken"})
    with pytest.raises(
        TrainingFailed, match=r"the loss is nan at step 3; .* the gradient of embed.tokens.weight; the last chec"
    ):
        train(config, tmp_path)
    assert [f.name for f in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000002"]


def test_the_bad_weight_is_named_and_not_what_it_spoils(tmp_path: Path) -> None:
    """Checks that the error names the NaN weight, and not a gradient that became NaN because of this weight."""
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        trainer.module.get_parameter("blocks.1.up.weight")[3, 2] = torch.nan
    with pytest.raises(
        TrainingFailed, match=r"nan at step 1; the first that isn't finite is blocks.1.up.weight; there is no"
    ):
        trainer.one_step(trainer.batches())


@pytest.mark.parametrize("broken", ["a weight", "the loss"])
def test_what_is_no_number_in_float16_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Fails if a float16 run with a NaN weight skips the step instead of naming the weight. Also checks that the error
    names the cause if a run skips every step."""
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
    monkeypatch.setattr(scale, "MOST_SKIPPED", 5)
    for _ in range(4):
        assert trainer.one_step(batches)["skipped"]
    named = "the loss is nan, and the gradient of head.weight overflows first"
    with pytest.raises(TrainingFailed, match=rf"^5 steps in a row overflowed although .*{named}"):
        trainer.one_step(batches)


_SPLIT = """
import random
import numpy

def split(samples):
    order = numpy.random.permutation(len(samples)).tolist()
    random.shuffle(order)
    order = [order[i] for i in torch.randperm(len(order))]
    return [samples[i] for i in order[:48]], [samples[i] for i in order[48:]]

whole = data
held_out = split(whole())[1]

def data():
    return split(whole())[0]

def evaluate(module):
    again = split(whole())[1]
    return {name: float(sum(ids.sum() for ids, _ in part)) for name, part in (("import", held_out), ("call", again))}
"""


def test_a_split_that_is_drawn_is_the_same_everywhere(tmp_path: Path) -> None:
    """The data factory in this test shuffles without a seed of its own. Fails if the factory gives different samples to
    the ranks or to a resumed run. Also checks that ``evaluate`` uses the samples that training left out, and that the
    user's random generators keep their state.
    """
    source = tmp_path / "drawn.py"
    source.write_text(SMALL.read_text() + _SPLIT)
    tables = {"data": f"{source}:data", "evaluate": f"{source}:evaluate", "steps": 1, "seed": 3}
    numpy.random.seed(1)
    random.seed(1)
    one = trainer_of(tmp_path, **tables)
    after = numpy.random.rand(), random.random()
    other = trainer_of(tmp_path, **tables)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one.data, other.data, strict=True))
    everything = sum(int(ids.sum()) for ids, _ in make_data(config_of()))
    left_out = everything - sum(int(ids.sum()) for ids, _ in one.data)
    assert one.run()["metrics"] == {"import": left_out, "call": left_out}
    numpy.random.seed(1)
    random.seed(1)
    assert (numpy.random.rand(), random.random()) == after


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_for_convolutions_too(tmp_path: Path, tf32: bool) -> None:
    """Checks that ``precision.tf32`` sets TF32 for both matrix products and convolutions on a GPU. Torch has separate
    settings for matrix products and convolutions."""
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


def test_dry_run_launches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if ``--dry-run`` creates a folder, if the layout in the printed plan differs from the requested layout, or
    if the plan doesn't say for which machine its times are."""
    line = f"train examples/digits.toml --nproc 2 --zero 3 --dry-run --out {tmp_path / 'run'}"
    assert run(group, [*line.split(), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["layout"]["zero"] == 3
    assert "TFLOP/s a rank" in planned["assumptions"][0]
    assert run(group, line.split()) == 0
    said = capsys.readouterr().out
    assert "ZeRO 3" in said
    assert f"assumed: {planned['assumptions'][0]}" in said
    assert "nothing was started" in said
    assert not (tmp_path / "run").exists()


def test_targets_may_be_several(tmp_path: Path) -> None:
    """Checks that targets in a dict or a tuple are batched and passed to the loss."""
    source = tmp_path / "several.py"
    source.write_text(
        SMALL.read_text() + "\n\nfrom accel.train.loss import cross_entropy\n\n"
        "def named():\n    return [(ids, {'ids': t, 'weight': torch.tensor(1.0)}) for ids, t in data()]\n\n"
        "def two():\n    return [(ids, (t, torch.tensor(1.0))) for ids, t in data()]\n\n"
        "def loss(outputs, targets):\n    t, weight = targets.values() if isinstance(targets, dict) else targets\n"
        "    assert weight.shape == (4,)\n    return cross_entropy(outputs, t)\n"
    )
    plain = trainer_of(tmp_path)
    expected = plain.one_step(plain.batches())["loss"]
    for name in ("named", "two"):
        trainer = trainer_of(tmp_path, data=f"{source}:{name}", loss=f"{source}:loss")
        assert trainer.one_step(trainer.batches())["loss"] == expected


def test_a_model_with_named_inputs_has_its_mfu(tmp_path: Path) -> None:
    """Checks that the FLOPs of a model with named inputs are counted. If the model's code reads tensor values, the log
    must say that FLOPs can't be counted."""
    source = tmp_path / "named.py"
    source.write_text(
        SMALL.read_text() + "\n\ndef named():\n    return [({'ids': ids}, targets) for ids, targets in data()]\n\n"
        "class Looks(GPT):\n    def forward(self, ids):\n"
        "        return super().forward(ids) * (1 if int(ids.max()) < 99 else 2)\n\n"
        "def looks():\n    return Looks(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))\n"
    )
    plain, named = (trainer_of(tmp_path, peak_flops=1e12, data=f"{source}:{data}") for data in ("data", "named"))
    assert plain.built.flops == named.built.flops > 0
    looks = trainer_of(tmp_path, peak_flops=1e12, steps=1, model=f"{source}:looks")
    looks.run()
    note, row = rows_of(tmp_path)
    assert note["note"].startswith(f"MFU isn't shown: the FLOPs of {source}:looks can't be counted on fake tensors")
    assert "mfu" not in row


# A model that adds a view of a parameter, which a module returns. The model is a chain for a pipeline.
_VIEW = """

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(LENGTH, 32))

    def forward(self, ids):
        with torch.set_grad_enabled(TRAINED):
            return self.rows[: ids.shape[1]]

class First(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.table = torch.nn.Embedding(VOCABULARY, 32), Table()

    def forward(self, ids):
        return self.tokens(ids) + self.table(ids)

def view():
    return torch.nn.Sequential(First(), torch.nn.Linear(32, 32), torch.nn.Linear(32, VOCABULARY))
"""


def test_a_module_that_returns_its_own_parameter_has_flops(tmp_path: Path) -> None:
    """Fails if FLOPs can't be counted in a model with a module that returns a view of its parameter, or if a pipeline
    refuses the model. The FLOPs are those of the two matrix products, three times, for 16 positions."""
    flops = 3 * 2 * 16 * 32 * (32 + 61)
    for trained in (True, False):
        source = tmp_path / f"{trained}.py"
        source.write_text(SMALL.read_text() + _VIEW.replace("TRAINED", str(trained)))
        assert trainer_of(tmp_path, peak_flops=1e12, model=f"{source}:view").built.flops == flops
    tables = {"parallel": {"pp": 2}, "micro_batch": 2, "steps": 1}
    assert train(config_of(model=f"{tmp_path}/True.py:view", **tables), tmp_path / "run", nproc=2)["steps"] == 1


@pytest.mark.slow
def test_the_log_says_how_busy_the_machine_is(tmp_path: Path) -> None:
    """Checks that the MFU is the FLOP/s of the model's matrix products divided by the peak FLOP/s. Also checks that the
    TensorBoard file contains every step. The progress must show the loss, the speed, the MFU, the memory and the
    remaining time, and that the weights are written at the end. The remaining time is computed from the speed of the
    last steps."""
    config = config_of(steps=3, peak_flops=1e12, tensorboard=True, data=f"{SMALL}:data")
    said: list[tuple[str, float | None]] = []
    with watched_by(lambda words, fraction: said.append((words, fraction))):
        train(config, tmp_path)
    rows = rows_of(tmp_path)
    *steps, end = said
    assert end == ("writing the last checkpoint and final/", 1.0)
    for number, (row, (words, fraction)) in enumerate(zip(rows, steps, strict=True), 1):
        assert row["eta_seconds"] == pytest.approx((3 - number) * row["seconds_per_step"])
        assert row["targets_per_second"] == pytest.approx(row["targets"] / row["seconds_per_step"])
        assert 2e7 < row["memory_bytes"] < 64e9
        assert words == (
            f"step {number}/3  loss {row['loss']:.4f}  {row['targets_per_second']:,.0f} targets/s  "
            f"MFU {row['mfu']:.1%}  {row['memory_bytes'] / 1e9:.2f} GB  {row['eta_seconds']:.0f} s left"
        )
        assert fraction == number / 3
    # Each linear layer takes 2 FLOPs per weight and position. The model has 3 blocks with the linear layers of
    # attention and of the MLP, and a linear head. In each block, attention also computes 2 matrix products, each of
    # sequence x sequence x hidden.
    forward = 2 * 16 * (3 * 12 * 32**2 + 61 * 32) + 3 * 2 * 2 * 16 * 16 * 32
    for row in rows:
        assert row["mfu"] == pytest.approx(3 * 8 * forward / row["seconds_per_step"] / 1e12, rel=1e-6)
    log.keep_tensorflow_out()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [
        (event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "loss"
    ]
    assert found == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
