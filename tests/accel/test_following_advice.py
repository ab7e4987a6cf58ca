"""Proves that the advice in the most frequent errors works. Each test causes an error, and then runs the command that
the error advises."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NET = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)
"""
EXPORT = "export net.py:make --input x:float32[batch,4] -o net.onnx"
OPTIMIZE = "optimize made.onnx --target ort-cpu --precision fp32 --fixed-session --rounds 5 -o out"
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
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _one_cache: None) -> Path:
    """Makes a folder with the net, its ONNX file and two data files, once for all tests."""
    import accel

    folder = tmp_path_factory.mktemp("advice")
    (folder / "net.py").write_text(NET)
    accel.export(f"{folder / 'net.py'}:make", inputs=["x:float32[batch,4]"], out=folder / "made.onnx")
    np.savez(folder / "x.npz", x=np.ones((4, 4), np.float32))
    np.savez(folder / "y.npz", y=np.ones((4, 4), np.float32))
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
