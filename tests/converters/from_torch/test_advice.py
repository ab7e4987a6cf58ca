"""Proves that `accel export` explains outputs that vary from run to run or depend on the batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.errors import ExportFailed

NETS = """
import torch

class Ties(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x - 9).topk(5, 1)

class Routed(torch.nn.Module):
    def __init__(self, trained):
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.Parameter(torch.randn(4, 12))
        self.router = torch.nn.Linear(12, 4, bias=False)
        if not trained:
            torch.nn.init.zeros_(self.router.weight)

    def forward(self, x):
        chosen = self.router(x).sigmoid().topk(2)[1]
        return x * self.experts[chosen].sum(1)

class Narrow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(12, 8)
        self.norm = torch.nn.BatchNorm1d(8, eps=1e-14)
        with torch.no_grad():
            self.linear.weight.mul_(1e-6)
            self.linear.bias.fill_(1)
            self.norm.running_mean.fill_(1)
            self.norm.running_var.fill_(1e-14)

    def forward(self, x):
        return self.norm(self.linear(x))

class Training(torch.nn.Module):
    def __init__(self, dropout=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(12, 8)
        self.layer = torch.nn.Dropout(0.5) if dropout else torch.nn.BatchNorm1d(8)

    def forward(self, x):
        self.layer.train()
        return self.layer(self.linear(x))

class Shortcut(torch.nn.Module):
    def forward(self, x):
        if not torch.compiler.is_exporting() and (x > -99).all():
            return x.cumsum(1)
        return x

def shortcut():
    return Shortcut()

def ties():
    return Ties()

def routed():
    return Routed(False)

def trained():
    return Routed(True)

def narrow():
    return Narrow()

def dropout():
    return Training(True)

def norm():
    return Training()
"""


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("ties", ["only the integers of 'output_1' differ", "return the scores themselves"]),
        ("routed", ["scores in topk at net.py:18", "make the scores differ", "its weights are not trained"]),
        ("shortcut", ["computes other outputs while it is exported", " at net.py:49; make both ways equal"]),
        ("narrow", ["float32 is not enough for this model", "raise its eps"]),
        ("dropout", ["differs from run to run", "'layer' (Dropout) runs in training mode", "take that call out"]),
        ("norm", ["Expected more than 1 value per channel", "'layer' (BatchNorm1d) runs in training mode"]),
    ],
)
def test_the_model_itself_is_why(factory: str, words: list[str], tmp_path: Path, cli: Any) -> None:
    """Fails if the error suggests a fixed size or other inputs for a model whose outputs vary because of rounding or
    training mode."""
    (tmp_path / "net.py").write_text(NETS)
    given = ["--input", "x:float32[batch,12]", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli("export", f"{tmp_path / 'net.py'}:{factory}", *given)
    assert ran.code in (1, 2), ran.stderr
    for word in words:
        assert word in ran.stderr
    assert "one size" not in ran.stderr
    assert "correct --input" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_the_advice_works(tmp_path: Path, cli: Any) -> None:
    """Fails if a model that follows the advice about equal scores, or about a way of the export, can't be exported."""
    (tmp_path / "trained.py").write_text(NETS)
    (tmp_path / "equal.py").write_text(
        NETS.replace("        return x\n\ndef shortcut", "        return x.cumsum(1)\n\ndef shortcut")
    )
    apart = "(self.router(x).sigmoid() - 1e-3 * torch.arange(4))"
    (tmp_path / "apart.py").write_text(NETS.replace("self.router(x).sigmoid()", apart))
    for source in ("trained.py:trained", "apart.py:routed", "equal.py:shortcut"):
        given = ["--input", "x:float32[batch,12]", "-o", tmp_path / "m.onnx", "-q"]
        ran = cli("export", f"{tmp_path / source}", *given)
        assert ran.code == 0, ran.stderr


class Places(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([float(i) for i in range(x.shape[1])])


class Projected(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(5, 8, proj_size=3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x[..., None].expand(-1, -1, 5))[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_the_advice_to_fix_sizes_works(tmp_path: Path) -> None:
    """Fails if the advice about a model that computes with a size as a number fixes the batch too, doesn't work, or is
    given for a model that can't be exported at one size either."""
    given: Any = {"example": (torch.randn(2, 6),), "out": tmp_path / "m.onnx"}
    named = {"x": {0: "rows", 1: "n"}}
    with pytest.raises(ExportFailed, match="try one size") as raised:
        accel.export(Places(), **given, dynamic=named)
    advice = str(raised.value).rpartition(": inputs=")[2]
    assert advice == "['x:float32[rows,6]']"
    made = accel.export(Places(), inputs=eval(advice), out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        torch.testing.assert_close(session(torch.ones(5, 6)), Places()(torch.ones(5, 6)))
    with pytest.raises(ExportFailed) as refused:
        accel.export(Projected(), **given, dynamic=named)
    assert "one size" not in str(refused.value)


def test_statistics_of_the_batch_are_said(tmp_path: Path, cli: Any) -> None:
    """If a layer in training mode makes a sample's output depend on the other samples of the batch, export must print a
    warning. Also fails if export warns although no layer is in training mode."""
    (tmp_path / "net.py").write_text(NETS)
    (tmp_path / "right.py").write_text(NETS.replace("self.layer.train()", "pass"))
    ran = {}
    for file in ("net", "right"):
        given = ["--input", "x:float32[batch,12]", "--dim", "batch=2:4:8", "-o", tmp_path / f"{file}.onnx"]
        ran[file] = cli("export", f"{tmp_path / file}.py:norm", *given)
        assert ran[file].code == 0, ran[file].stderr
    assert "accel: warning: 'layer' (BatchNorm1d) runs in training mode" in ran["net"].stderr
    assert "the output of a sample depends on the other samples in its batch" in ran["net"].stderr
    assert "training mode" not in ran["right"].stderr


def test_a_model_that_leaves_a_mask_of_ones_out(tmp_path: Path) -> None:
    """Fails if a file passes that differs from the model for a mask of ones, or if the advice doesn't help. This model
    forgets that it is causal if it leaves the mask out."""
    config = transformers.Aimv2TextConfig(
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2},
    )
    torch.manual_seed(0)
    model = transformers.Aimv2TextModel(config).eval()
    given = {"input_ids": torch.arange(16).reshape(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    fix = re.escape('call model.set_attn_implementation("eager") before the export')
    with pytest.raises(ExportFailed, match=rf"leaves out a mask of ones, .*; {fix}"):
        accel.export(model, example=given, out=tmp_path / "m.onnx")
    model.set_attn_implementation("eager")
    made = accel.export(model, example=given, out=tmp_path / "m.onnx")
    with accel.load(made) as session, torch.no_grad():
        torch.testing.assert_close(session(**given).pooler_output, model(**given).pooler_output)
