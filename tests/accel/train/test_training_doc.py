"""Proves that the commands of docs/how-to/training.md work. Also proves that the error for an object of a wrong type
tells the user the right type."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from accel.cli import group, run
from accel.errors import AccelError
from accel.plan import rules
from accel.train.build import make_data
from accel.train.config import schema as config
from accel.train.config.schema import TrainConfig
from tests.support import ROOT
from tests.support.runs import SMALL, config_of, trainer_of

TEXT = (ROOT / "docs" / "how-to" / "training.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return str(found)


@pytest.mark.slow
def test_the_example_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that the commands in docs/how-to/training.md work with the files in the page, and that the example
    learns."""
    monkeypatch.chdir(tmp_path)
    Path("taxi.py").write_text(_block("python"))
    Path("taxi.toml").write_text(_block("toml"))
    commands = [line.removeprefix("$ ") for line in _block("console").splitlines()]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        capsys.readouterr()
        assert run(group, [*words[1:], "-q", "--json"]) == 0, command
        if words[1] == "train" and "--dry-run" not in words:
            assert json.loads(capsys.readouterr().out)["metrics"]["off_by"] < 0.15
    assert Path("taxi.onnx").is_file()


def test_the_page_names_what_is_refused() -> None:
    """Checks that the first table of docs/how-to/training.md lists exactly the config keys model, data, loss and
    evaluate."""
    keys = re.findall(r"^\| `(\w+)`", TEXT.partition("\n## ")[0], flags=re.MULTILINE)
    assert keys == ["model", "data", "loss", "evaluate"]
    assert all(hasattr(config_of(), key) for key in keys)


def test_the_page_has_every_key_and_style() -> None:
    """Fails if docs/how-to/training.md lacks a config key, a default, a choice or a tensor-parallel style. Also fails
    if the page names a key or a style that doesn't exist."""
    flat: dict[str, object] = {}
    for name, value in dataclasses.asdict(TrainConfig()).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    text = TEXT.partition("## Every key of the config")[2].partition("### What a pipeline")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \| (.*) \|$", text, flags=re.MULTILINE)
    found = {}
    for key, default, _ in rows:
        (value,) = tomllib.loads(f"x = {default}").values()
        found[key] = tuple(value) if isinstance(value, list) else value
    assert found == flat
    said = {key: words for key, _, words in rows}
    for key, choices in {
        "schedule.name": config.SCHEDULES,
        "optimizer.name": config.OPTIMIZERS,
        "precision.mode": config.MODES,
        "precision.fp8": config.FP8,
        "parallel.cp_method": rules.CP_METHODS,
        "parallel.recompute": rules.RECOMPUTE,
        "parallel.compression": config.COMPRESSION,
        "parallel.pipeline": rules.PIPELINES,
    }.items():
        assert set(choices) <= set(re.findall(r"`([^`]+)`", said[key])), key
    styles = TEXT.partition("| the style |")[2].partition("```")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", styles, flags=re.MULTILINE)) == config.STYLES


_WRONG = """

def number():
    return 3


def iterated():
    return iter(data())


def loaded():
    return torch.utils.data.DataLoader(data())


class ByName:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"first": 1}[index]


def nothing():
    return []


def named():
    return {"train": data()}


def inputs_alone():
    return [ids for ids, _ in data()]


def mean(outputs, targets):
    from accel.train.loss import cross_entropy
    total, count = cross_entropy(outputs, targets)
    return total / count


def by_target(outputs, targets):
    return outputs.sum((1, 2)), torch.tensor(1)


def bare(module):
    return 0.5


def forgotten(module):
    pass
"""


@pytest.mark.parametrize(
    ("key", "name", "says"),
    [
        ("model", "number", "returned an int as the model; return a torch.nn.Module"),
        (
            "data",
            "iterated",
            "returned a list_iterator as the data, which can be read only once; return an object whose __i",
        ),
        ("data", "loaded", "returned a DataLoader as the data; return a list of samples"),
        ("data", "ByName", r"sample 0 of .*:ByName can't be fetched \(KeyError: 0\); .* take indices from 0 to 2"),
        ("data", "nothing", "returned a list without samples as the data; return at least one sample"),
        ("data", "named", "returned a dict as the data; return a list"),
        ("data", "inputs_alone", r"sample 0 of .* is a Tensor; let each sample be a tuple \(inputs, targets\)"),
        ("loss", "mean", r"the loss returned a tensor \[\]; return two tensors"),
        ("loss", "by_target", r"the loss returned \(a tensor \[4\], a tensor \[\]\); return two tensors"),
        ("evaluate", "bare", "returned a float; return a dict of metrics"),
        ("evaluate", "forgotten", "returned None; return a dict of metrics"),
    ],
)
def test_a_wrong_piece_is_named(tmp_path: Path, key: str, name: str, says: str) -> None:
    """Checks that a factory, loss or metric that returns a wrong object causes an error with the fix, and not an error
    of torch."""
    source = tmp_path / "wrong.py"
    source.write_text(SMALL.read_text() + _WRONG)
    tables = {"evaluate_every": 1} if key == "evaluate" else {}
    with pytest.raises(AccelError, match=rf"{says}.*docs/how-to/training.md"):
        trainer_of(tmp_path, **{key: f"{source}:{name}"}, **tables).run()


@pytest.mark.slow
def test_samples_from_processes_are_the_same(tmp_path: Path) -> None:
    """Fails if ``loader_processes`` changes the samples, their order or the position after a resume."""
    from accel.train.run.launch import train

    assert len(make_data(config_of())) == 96
    alone = trainer_of(tmp_path / "alone", steps=4)
    batches = alone.batches()
    expected = [alone.one_step(batches)["loss"] for _ in range(4)]
    for steps in (2, 4):
        train(config_of(steps=steps, loader_processes=2), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(expected, abs=1e-6)
