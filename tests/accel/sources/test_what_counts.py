"""Proves that the hash of a model covers what its factory reads and what its code imports."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import accel

READS = """
import pathlib, torch, layers_of_mine
class Net(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        import later_of_mine
        return later_of_mine.last(layers_of_mine.first(x * self.factor))
def make():
    return Net(float(pathlib.Path(__file__).with_name("factor.txt").read_text()))
"""


def test_what_a_factory_reads_is_part_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Fails if the cache returns the file of the old model after an edit of a file that the factory reads, of a module
    that the model's file imports, or of a module that forward imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    texts = {"factor.txt": "1", "layers_of_mine.py": "def first(x): return x * 1", "net.py": READS}
    texts |= {"later_of_mine.py": "SCALE = 1\ndef last(x): return x * SCALE"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    def value() -> float:
        for name in ("layers_of_mine", "later_of_mine"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        made = accel.export(f"{tmp_path}/net.py:make", inputs=["x:float32[batch,2]"], out=tmp_path / "net.onnx")
        with accel.load(made) as session:
            return float(session.run({"x": np.ones((1, 2), np.float32)})["output"][0, 0])

    assert value() == 1
    for name, factor, product in (("factor.txt", 2, 2), ("layers_of_mine.py", 3, 6), ("later_of_mine.py", 5, 30)):
        (tmp_path / name).write_text(texts[name].replace("1", str(factor)))
        assert value() == product, name
