"""Proves that data that doesn't fit the model, or isn't finite, is named in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accel.cli import group, run
from accel.errors import BadData, TrainingFailed
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, trainer_of

# A model of three classes on four features, and its samples.
_PLAIN = """
import torch

class Plain(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

def model():
    return Plain()

def data():
    torch.manual_seed(0)
    return [(torch.rand(4), torch.tensor(index % 3)) for index in range(32)]
"""


def _source(folder: Path, code: str, before: str = "") -> Path:
    """Writes a module of the small GPT (or of the code ``before``) in which sample 17 is changed by ``code``."""
    file = folder / "source.py"
    file.write_text(
        (before or SMALL.read_text())
        + "\n\ndef changed():\n    samples = data()\n    inputs, targets = samples[17]\n"
        + f"    {code}\n    samples[17] = (inputs, targets)\n    return samples\n"
    )
    return file


def _step(folder: Path, **tables: Any) -> dict[str, float]:
    """Returns the figures of one step, which trains on sample 17."""
    trainer = trainer_of(folder, seed=9, **tables)
    return trainer.one_step(trainer.batches())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "inputs[3] = 99",
            "the inputs of sample 17 hold the id 99, but embed.tokens.weight has only 61 rows (0 to 60)",
        ),
        (
            "inputs[3] = -2",
            "the inputs of sample 17 hold the id -2, but embed.tokens.weight has only 61 rows (0 to 60)",
        ),
        ("targets[5] = 61", "the targets of sample 17 hold the class 61, but the model gives scores for 61 classes"),
        ("targets[5] = -7", "the targets of sample 17 hold the class -7, but the model gives scores for 61 classes"),
        ("inputs = inputs[:9]", "can't be in one batch, because their inputs differ (int64["),
        ("targets = targets[:9]", "can't be in one batch, because their targets differ (int64["),
        ("targets = (targets, 1)", "can't be in one batch, because their targets differ ("),
        ("targets = None", "can't be in one batch, because their targets differ ("),
    ],
)
def test_a_sample_that_does_not_fit_is_named(tmp_path: Path, code: str, said: str) -> None:
    """Fails if a sample that doesn't fit the other samples or the model isn't named, or if torch's own words are
    shown instead of the limit."""
    with pytest.raises(BadData, match=re.escape(said)) as caught:
        _step(tmp_path, data=f"{_source(tmp_path, code)}:changed")
    assert "17" in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "samples = [(torch.cat([a, a]), torch.cat([b, b])) for a, b in samples]; inputs, targets = samples[0]",
            "the model looks up row 16 on inputs of the shape [4, 32], but embed.positions.weight has only 16 rows",
        ),
        (
            "samples = [(a, b[0]) for a, b in samples]; inputs, targets = samples[0]",
            "scores of the shape [4, 16, 61], but the targets of the batch have the shape [4] instead of [4, 16]",
        ),
        (
            "samples = [((a, a, a), b) for a, b in samples]; inputs, targets = samples[0]",
            "the model's forward takes (too many positional arguments); let each sample have inputs for ids, pos",
        ),
        (
            "samples = [({'tokens': a}, b) for a, b in samples]; inputs, targets = samples[0]",
            "the model's forward takes (missing a required argument: 'ids'); let each sample have inputs for ids, pos",
        ),
        (
            "samples = [(a, 'a') for a, b in samples]; inputs, targets = samples[0]",
            "the samples hold a str; give tensors, arrays or numbers",
        ),
        (
            "samples = [(a, slice(0)) for a, b in samples]; inputs, targets = samples[0]",
            "has a slice among its targets; give tensors, arrays or numbers",
        ),
    ],
)
def test_samples_that_all_do_not_fit_are_explained(tmp_path: Path, code: str, said: str) -> None:
    """Fails if the shapes or kinds of all samples are wrong and the message doesn't tell which are expected."""
    with pytest.raises(BadData, match=re.escape(said)):
        _step(tmp_path, data=f"{_source(tmp_path, code)}:changed")


def test_classes_that_are_not_last_are_seen(tmp_path: Path) -> None:
    """Fails if a model whose classes are in the second dim, as in torch's own losses, gets an advice that doesn't
    help: the advised ``movedim`` must make the run work."""
    code = (
        "\n\nclass Second(GPT):\n    last = False\n    def forward(self, ids):\n        found = super().forward(ids)"
        ".movedim(-1, 1)\n        return found.movedim(1, -1) if self.last else found\n\n"
        "def second():\n    return Second(GPTConfig(vocab=VOCABULARY, layers=1, hidden=32, heads=4, seq=LENGTH))\n"
    )
    source = tmp_path / "source.py"
    source.write_text(SMALL.read_text() + code)
    trainer = trainer_of(tmp_path, model=f"{source}:second")
    with pytest.raises(BadData, match=r"with the classes in the last dim; return scores.movedim\(1, -1\)"):
        trainer.one_step(trainer.batches())
    type(trainer.module).last = True
    assert trainer.one_step(trainer.batches())["loss"] < 5


def test_a_regression_compares_each_output_with_its_own_target(tmp_path: Path) -> None:
    """Fails if outputs [batch, 1] are compared with targets [batch], which torch spreads to [batch, batch]."""
    source = tmp_path / "source.py"
    source.write_text(
        "import torch\n\ndef model():\n    return torch.nn.Linear(4, 1)\n\n"
        "def data():\n    return [(torch.rand(4), torch.rand(())) for _ in range(32)]\n\n"
        "def fixed():\n    return [(torch.rand(4), torch.rand(1)) for _ in range(32)]\n"
    )
    tables = {"model": f"{source}:model", "loss": "accel.train.loss:squared_error"}
    said = r"returns the shape \[4, 1\], but the targets of the batch have the shape \[4\]; let each .* the shape \[1\]"
    with pytest.raises(BadData, match=said):
        _step(tmp_path, data=f"{source}:data", **tables)
    _step(tmp_path, data=f"{source}:fixed", **tables)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_classes_may_be_any_integers(tmp_path: Path, dtype: str) -> None:
    """Fails if class numbers other than int64 are refused, or change the loss."""
    code = f"samples = [(a, b.to(torch.{dtype})) for a, b in samples]; inputs, targets = samples[17]"
    source = _source(tmp_path, code, _PLAIN)
    one, two = (
        _step(tmp_path, model=f"{source}:model", data=f"{source}:{name}")["loss"] for name in ("data", "changed")
    )
    assert one == two


@pytest.mark.parametrize(
    ("code", "mode", "said"),
    [
        ("inputs[2] = torch.nan", "fp32", "the inputs of sample 17 hold nan"),
        ("inputs[2] = -torch.inf", "autocast-fp16", "the inputs of sample 17 hold -inf"),
        ("inputs[2] = 70000", "fp16", "the inputs of sample 17 hold 70000, which float16 can't hold"),
        ("targets = targets * torch.nan", "fp32", "the targets of sample 17 hold nan"),
    ],
)
def test_a_sample_that_is_not_finite_is_named(tmp_path: Path, code: str, mode: str, said: str) -> None:
    """Fails if a NaN in the data is reported as a gradient of the model, or is skipped as an overflow."""
    before = _PLAIN.replace("torch.tensor(index % 3)", "torch.rand(3)")
    source = _source(tmp_path, code, before)
    tables = {"model": f"{source}:model", "loss": "accel.train.loss:squared_error", "precision": {"mode": mode}}
    _step(tmp_path, data=f"{source}:data", **tables)
    with pytest.raises(TrainingFailed, match=rf"^the loss is (nan|inf) at step 1, because {said}; .*correct the data$"):
        _step(tmp_path, data=f"{source}:changed", **tables)


def test_a_stream_names_the_sample_of_its_epoch(tmp_path: Path) -> None:
    """Fails if a sample of an iterable dataset is named by another number than its place in the epoch."""
    source = _source(tmp_path, "inputs[3] = 99")
    source.write_text(
        source.read_text() + "\n\nclass Read:\n    def __iter__(self):\n        return iter(changed())\n\n"
        "def stream():\n    return Read()\n"
    )
    trainer = trainer_of(tmp_path, data=f"{source}:stream")
    batches = trainer.batches()
    for _ in range(2):
        trainer.one_step(batches)
    with pytest.raises(BadData, match="the inputs of sample 17 hold the id 99"):
        trainer.one_step(batches)


@pytest.mark.parametrize("pipeline", [False, True])
def test_several_ranks_say_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], pipeline: bool) -> None:
    """Fails if the ranks that only lost their connection add gloo's words, or if the sentence is lost on the way from a
    process of the loader, or from a stage of a pipeline."""
    config, words = tmp_path / "run.toml", "targets[5] = 61" if pipeline else "inputs = inputs[:9]"
    layout = {"parallel": {"pp": 2}} if pipeline else {"loader_processes": 1, "micro_batch": 2}
    config.write_text(config_of(data=f"{_source(tmp_path, words)}:changed", seed=9, **layout).to_toml())
    assert run(group, ["train", str(config), "--nproc", "2", "--out", str(tmp_path / "run"), "-q"]) == 2
    said = capsys.readouterr().err
    other = "the class 61, but" if pipeline else "their inputs differ (int64[9] and int64[16]); bring them to one shape"
    assert other in said
    assert said.count("\n") == 1
    assert said.count("rank ") == 1


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path, processes: int) -> None:
    """Fails if the error of a dataset doesn't tell at which sample it was raised."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\nclass Torn(list):\n    def __getitem__(self, index):\n        if index == 17:\n"
        "            raise OSError('image file is truncated')\n        return super().__getitem__(index)\n\n"
        "def torn():\n    return Torn(data())\n"
    )
    said = r"^sample 17 can't be fetched \(OSError: image file is truncated; its traceback is in ranks.log\); correct "
    with pytest.raises(BadData, match=said):
        train(config_of(data=f"{source}:torn", seed=9, loader_processes=processes), tmp_path / "run")
    assert "in __getitem__" in (tmp_path / "run" / "ranks.log").read_text()
