"""Proves that a dim's range begins at a size that the PyTorch model takes, that accel says so, and that an exported
model refuses an empty dim where PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.errors import BadFeeds
from accel.sources.notes import source_notes

CODE = """
import torch

class Windows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.window = torch.nn.Conv1d(2, 4, 5)

    def forward(self, x):
        return self.window(x).amax(2)

class Largest(torch.nn.Module):
    def forward(self, x):
        return x.amax(2)

class Tanh(torch.nn.Module):
    def forward(self, x):
        return x.tanh()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(CODE)
    return tmp_path / "nets.py"


def test_a_guessed_range_begins_at_what_the_model_takes(code: Path, cli: Any, tmp_path: Path) -> None:
    """Fails if the export of a model with undeclared sizes fails at a size that accel guessed, or if accel doesn't say
    where the range begins."""
    out = tmp_path / "m.onnx"
    ran = cli("export", f"{code}:Windows", "--input", "x:float32[batch,2,n]", "-o", out)
    assert ran.code == 0, ran.stderr
    assert "accel: note: the range of n begins at 5, because the model fails at 2; --dim declares" in ran.stderr
    assert accel.Source(out).open().signature.dims["n"].min == 5
    ran = cli("export", f"{code}:Windows", "--input", "x:float32[batch,2,n]", "--dim", "n=3:8:16", "-o", out)
    assert ran.code == 2  # a declared range is an error, not a note
    assert "give --dim n=5:8:16" in ran.stderr
    ran = cli("export", f"{code}:Tanh", "--input", "x:float32[batch,2,n]", "-o", out)
    assert ran.code == 0
    assert "range of n" not in ran.stderr


@pytest.mark.parametrize("live", [False, True])
def test_an_empty_dim(code: Path, tmp_path: Path, live: bool) -> None:
    """Fails if the exported model answers for a length of 0, at which PyTorch raises an error. Also fails if it refuses
    a batch of 0, which PyTorch takes."""
    if live:

        class Own(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.amax(2)

        made = accel.export(
            Own(), example=torch.randn(2, 2, 8), dynamic={"x": {0: "batch", 2: "n"}}, out=tmp_path / "m.onnx"
        )
    else:
        made = accel.export(f"{code}:Largest", inputs=["x:float32[batch,2,n]"], out=tmp_path / "m.onnx")
    (tmp_path / "elsewhere").mkdir()
    for artifact in (made, made.copy_to(tmp_path / "elsewhere" / "m.onnx")):
        with accel.load(artifact.path) as session:
            with pytest.raises(BadFeeds, match=r"'n' has size 0, at which the source fails \(amax.*\); give 1 or more"):
                session.run({"x": np.zeros((1, 2, 0), np.float32)})
            assert session.run({"x": np.zeros((0, 2, 3), np.float32)})["output"].shape == (0, 2)
            assert session.run({"x": np.zeros((1, 2, 1), np.float32)})["output"].shape == (1, 2)


def test_what_takes_an_empty_dim_keeps_it(code: Path, tmp_path: Path) -> None:
    """Fails if an exported model refuses an empty dim that PyTorch takes."""
    made = accel.export(f"{code}:Tanh", inputs=["x:float32[batch,2,n]"], out=tmp_path / "m.onnx")
    assert not [note for note in source_notes(made) if "range of" in note]
    with accel.load(made) as session:
        assert session.run({"x": np.zeros((1, 2, 0), np.float32)})["output"].shape == (1, 2, 0)


class Best(torch.nn.Module):
    """Reduces a dim by ArgMax, which ONNX Runtime computes with a wrong shape from an empty batch."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.argmax(-1), x.argmin(-1, keepdim=True), x.sum(-1)


def test_outputs_of_an_empty_batch() -> None:
    """Fails if the outputs of an empty batch have other shapes than in PyTorch."""
    session = accel.load(accel.export(Best(), example=(torch.randn(4, 3),)))
    with session:
        for rows in (0, 1, 5):
            x = torch.randn(rows, 3)
            for found, wanted in zip(session(x), Best()(x), strict=True):
                assert found.shape == wanted.shape
                assert torch.allclose(found, wanted)
