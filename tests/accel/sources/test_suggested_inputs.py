"""Proves that the error about missing or wrong inputs suggests inputs that fit the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import accel
from accel.errors import BadInputSpec, BadSource

NETS = """
import torch

class Wave(torch.nn.Conv1d):
    def forward(self, waveform):
        return super().forward(waveform[:, None])

class Last(torch.nn.GRU):
    def forward(self, x):
        return super().forward(x)[0][:, -1]

def wave():
    return Wave(1, 2, 400, 160)

def words():
    return torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 2))

def rows():
    return Last(6, 4, batch_first=True)

def gray():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(1352, 2))

class Text(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.kinds = torch.nn.Embedding(500, 4), torch.nn.Embedding(2, 4)

    def forward(self, ids, mask, types):
        return ((self.words(ids) + self.kinds(types)) * mask[..., None]).mean(1)

text = Text

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.words = torch.nn.Linear(6, 4), torch.nn.Embedding(50, 4)

    def forward(self, features, ids):
        return self.head(features) + self.words(ids).mean(1)

mixed = Mixed

class Odd(torch.nn.Module):
    def forward(self, left, right):
        return left.reshape(-1, 7, 11) @ right.reshape(-1, 11, 7)

odd = Odd
"""


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("wave", "waveform:float32[batch,16000]"),
        ("words", "input:int64[batch,length]{0..49}"),
        ("rows", "x:float32[batch,length,6]"),
        ("gray", "input:float32[batch,1,28,28]"),
    ],
)
def test_the_suggested_input_fits_the_model(name: str, example: str, tmp_path: Path) -> None:
    """Checks that the error about missing inputs suggests a valid input for sound, token ids, rows of features and
    images. The test opens each model with the suggested input."""
    (tmp_path / "nets.py").write_text(NETS)
    with pytest.raises(BadInputSpec, match=re.escape(example)):
        accel.Source(f"{tmp_path / 'nets.py'}:{name}").open()
    assert accel.Source(f"{tmp_path / 'nets.py'}:{name}", inputs=[example]).open().signature.outputs


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("text", ["ids:int64[batch,length]{0..499}", "mask:int64[batch,length]", "types:int64[batch,length]{0..1}"]),
        ("mixed", ["features:float32[batch,6]", "ids:int64[batch,length]{0..49}"]),
    ],
)
def test_several_suggested_inputs_fit_the_model(name: str, examples: list[str], tmp_path: Path) -> None:
    """Fails if an input of a text model is suggested as an image, or if the model fails with the suggestions."""
    (tmp_path / "nets.py").write_text(NETS)
    spec = f"{tmp_path / 'nets.py'}:{name}"
    with pytest.raises(BadInputSpec, match=re.escape(f"e.g. inputs={examples}") + "$"):
        accel.Source(spec).open()
    assert accel.Source(spec, inputs=examples).open().signature.outputs


def test_unknown_inputs_are_suggested_with_gaps(tmp_path: Path) -> None:
    """Fails if a suggestion that nothing supports looks like one that fits."""
    (tmp_path / "nets.py").write_text(NETS)
    said = "['left:DTYPE[batch,...]', 'right:DTYPE[batch,...]'], with its dtype for DTYPE and its other dims for ..."
    with pytest.raises(BadInputSpec, match=re.escape(said)):
        accel.Source(f"{tmp_path / 'nets.py'}:odd").open()


def test_a_declared_range_beyond_the_table_names_the_largest_id(tmp_path: Path) -> None:
    """Fails if the error about a declared range doesn't name the number of rows, or if its advice doesn't work."""
    (tmp_path / "nets.py").write_text(NETS)
    spec = f"{tmp_path / 'nets.py'}:text"
    inputs = ["ids:int64[batch,length]{0..999}", "mask:int64[batch,length]", "types:int64[batch,length]{0..1}"]
    fitting = [inputs[0].replace("999", "499"), *inputs[1:]]
    with pytest.raises(BadSource, match=re.escape(f"ids takes at most 499: declare inputs={fitting}") + "$"):
        accel.Source(spec, inputs=inputs).open()
    assert accel.Source(spec, inputs=fitting).open().signature.input("ids").values == (0, 499)
