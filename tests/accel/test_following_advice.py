"""Proves that the advice in the most frequent errors works. Each test causes an error, and then runs the command that
the error advises."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel

NET = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)

def image():
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), pool, torch.nn.Flatten(), torch.nn.Linear(4, 2))

def gray():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(1352, 2))

def words():
    return torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 2))

class Rows(torch.nn.GRU):
    def forward(self, x):
        return super().forward(x)[0][:, -1]

def rows():
    return Rows(6, 4, batch_first=True)
"""
OWN = "--input x:float32[batch,4]"
EXPORT = "export net.py:make --input x:float32[batch,4] -o net.onnx"
OPTIMIZE = "optimize made.onnx --target ort-cpu --precision fp32 --fixed-session --rounds 5 -o out"
BENCH = "bench made.onnx --budget-seconds 0.1"
VERIFY = "verify made.onnx made.onnx"
# Each row holds a wrong command, some words of the error message's advice, and the corrected command.
COMMANDS = [
    ("export net.py:make -o net.onnx", "--input", EXPORT),
    ("export net.py:maker --input x:float32[batch,4] -o net.onnx", "make", EXPORT),
    ("export nett.py:make --input x:float32[batch,4] -o net.onnx", "nett.py", EXPORT),
    ("export net.py:make --input x:float32[batch,4] -o net.bin", "has to end in .onnx; rename the file", EXPORT),
    ("export net.py:make --input x:float33[batch,4] -o net.onnx", "float32", EXPORT),
    (f"{EXPORT} --opset 99", "pass an opset from 13 to 23 with --opset", f"{EXPORT} --opset 23"),
    (f"{EXPORT} --to tflight", "--to takes onnx", f"{EXPORT} --to onnx"),
    (f"{EXPORT} --limit 2", "give a relative error such as 1e-3", f"{EXPORT} --limit 1e-3"),
    (f"{EXPORT} --channels last", "leave out --channels", EXPORT),
    (f"{EXPORT} --dim rows=1:2:8", "batch", f"{EXPORT} --dim batch=1:2:8"),
    ("export made.onnx -o again.onnx", "request a change with --opset", "export made.onnx --opset 21 -o again.onnx"),
    ("verify made.onnx made.onnx --data y.npz", "x", "verify made.onnx made.onnx --data x.npz"),
    ("optimize made.onnx --target ort-gpu -o out", "ort-cpu", OPTIMIZE),
    ("export net.py:make --input 'x:float32[batch 4]' -o net.onnx", "commas between the dims", EXPORT),
    (
        "export made.onnx --input x:float32[batch,5] -o again.onnx",
        f"the file itself has {OWN}",
        f"export made.onnx {OWN} -o again.onnx",
    ),
    ("export nade.onnx -o again.onnx", "does not exist", "export made.onnx --opset 21 -o again.onnx"),
    (f"{BENCH} --length 8", "leave out --length", BENCH),
    (f"{BENCH} --sizes rows=8", "the dims are: batch", f"{BENCH} --sizes batch=8"),
    (f"{BENCH} --data x.npz --sizes batch=8", "or a smaller batch", f"{BENCH} --data x.npz --sizes batch=4"),
    (f"{VERIFY} --data wide.npz", "give 4 on axis 1", f"{VERIFY} --data x.npz"),
    (f"{OPTIMIZE} --lengths 8,16", "leave out --lengths 8,16", OPTIMIZE),
    (
        f"{OPTIMIZE} --lengths batch=8,16",
        "pass --dim batch=1:1:16",
        f"{OPTIMIZE} --lengths batch=8,16 --dim batch=1:1:16",
    ),
    (f"{OPTIMIZE} --labels labels.npz", "pass --data or --eval-data", f"{OPTIMIZE} --labels labels.npz --data x.npz"),
    (
        f"{OPTIMIZE} --label-metric top1 --data x.npz",
        "pass the labels with --labels",
        f"{OPTIMIZE} --label-metric top1 --data x.npz --labels labels.npz",
    ),
    (
        "inspect made.onnx --against made.onnx",
        "--graph out.html",
        "inspect made.onnx --against made.onnx --graph out.html",
    ),
]
# Each row holds a factory, a wrong declaration of its input, and the declaration that the error advises.
DECLARED = [
    ("make", "float32[batch,5]", "float32[batch,4]"),
    ("make", "float32[batch,features]", "float32[batch,4]"),
    ("make", "int64[batch,4]", "float32[batch,4]"),
    ("image", "float32[batch,8,8,3]", "float32[batch,3,8,8]"),
    ("image", "float32[batch,1,height,width]", "float32[batch,3,height,width]"),
    ("gray", "float32[batch,1,32,32]", "float32[batch,1,28,28]"),
    ("words", "float32[batch,length]", "int64[batch,length]"),
    ("rows", "float32[batch,length,5]", "float32[batch,length,6]"),
    ("words", "int64[batch,length]{0..99}", "int64[batch,length]{0..49}"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Path:
    """Makes a folder with the nets, an ONNX file and data files, once for all tests."""
    folder = tmp_path_factory.mktemp("advice")
    (folder / "net.py").write_text(NET)
    accel.export(f"{folder / 'net.py'}:make", inputs=["x:float32[batch,4]"], out=folder / "made.onnx")
    np.savez(folder / "x.npz", x=np.ones((4, 4), np.float32))
    np.savez(folder / "y.npz", y=np.ones((4, 4), np.float32))
    np.savez(folder / "wide.npz", x=np.ones((4, 5), np.float32))
    np.savez(folder / "labels.npz", label=np.zeros(4, np.int64))
    return folder


@pytest.mark.parametrize(("wrong", "advice", "right"), COMMANDS)
def test_a_command(wrong: str, advice: str, right: str, made: Path, cli: Any, monkeypatch: Any) -> None:
    """Fails if the error of a wrong command lacks the advice, or if the command that follows the advice fails."""
    monkeypatch.chdir(made)
    ran = cli(*shlex.split(wrong), "-q")
    assert ran.code in (1, 2), ran.stdout
    assert advice in ran.stderr
    ran = cli(*shlex.split(right), "-q")
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize(("factory", "wrong", "right"), DECLARED)
def test_a_declared_input(factory: str, wrong: str, right: str, made: Path, cli: Any, monkeypatch: Any) -> None:
    """Fails if the error of a wrong size, order of axes, dtype or range doesn't advise a declaration that the model
    takes, or if the source can't be opened with this declaration."""
    monkeypatch.chdir(made)
    ran = cli("export", f"net.py:{factory}", "--input", f"x:{wrong}", "-o", "wrong.onnx", "-q")
    assert ran.code == 2, ran.stdout
    advice = ran.stderr.rstrip().rpartition("declare --input ")[2]
    assert advice == f"x:{right}"
    assert accel.Source(f"net.py:{factory}", inputs=[advice]).open().signature.outputs
