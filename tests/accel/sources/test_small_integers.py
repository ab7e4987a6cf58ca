"""Proves that random inputs of a dtype of 8 bits hold all its integers, and that no range is beyond its dtype."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.errors import BadInputSpec, ExportFailed
from accel.signature import TensorSpec

MODELS = """
import torch

class Over(torch.nn.Module):
    def forward(self, x):
        if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export():
            return x.float() * 0
        return (x > 100).float()

class Ids(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = torch.nn.Embedding(rows, 4)

    def forward(self, x):
        return self.table(x.int())

class Flags(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.one_hot(x.long(), 2).float() if not torch.compiler.is_compiling() else (
            torch.stack((1 - x.float(), x.float()), -1))

def over(): return Over()
def ids(): return Ids(20)
def many(): return Ids(1000)
def flags(): return Flags()
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path / "models.py"


@pytest.mark.parametrize(("dtype", "low", "high"), [("uint8", 0, 255), ("int8", -128, 127)])
def test_random_inputs_hold_every_integer_of_the_dtype(models: Path, dtype: str, low: int, high: int) -> None:
    """Fails if random pixels are only 0 and 1. A wrong export of ``x > 100`` would pass every gate then."""
    with pytest.raises(ExportFailed):
        accel.export(f"{models}:over", inputs=[f"x:{dtype}[n,4]"], out=models.with_name("x.onnx"))
    signature = accel.Source(f"{models}:over", inputs=[f"x:{dtype}[n,4]"]).open().signature
    drawn = signature.example_inputs(n=4000)["x"]
    assert (drawn.min(), drawn.max()) == (low, high)
    assert signature.unknown_integers == ()


@pytest.mark.parametrize(("model", "values"), [("ids", (0, 19)), ("many", (0, 255))])
def test_the_rows_of_a_table_still_bound_ids(models: Path, model: str, values: tuple[int, int]) -> None:
    """Fails if the search for tables gives the model an integer beyond a table, or a range beyond the dtype."""
    made = accel.export(f"{models}:{model}", inputs=["x:uint8[n,4]"], out=models.with_name("x.onnx"))
    assert made.signature.inputs[0].values == values


def test_a_model_that_takes_only_flags(models: Path, cli: Any) -> None:
    """Fails if a model that refuses most integers of its input's dtype isn't exported, or if nothing is said."""
    ran = cli("export", f"{models}:flags", "--input", "x:uint8[n]", "-o", models.with_name("x.onnx"), "-q")
    assert ran.code == 0, ran.stderr
    assert "the model fails on other integers of x, so random inputs hold only 0 and 1" in ran.stderr


def test_a_range_beyond_the_dtype_is_an_error_whose_advice_works(models: Path, cli: Any) -> None:
    """Fails if a range beyond the dtype is accepted, in any notation, or if the range in the message isn't."""
    words = ("export", f"{models}:over", "--input")
    ran = cli(*words, "x:uint8[n,4]{0..999}", "-o", models.with_name("x.onnx"), "-q")
    assert ran.code == 2
    assert "which holds 0..255" in ran.stderr
    found = re.search(r"--input (\S+)[,;]", ran.stderr)
    assert found is not None
    assert TensorSpec.parse(found[1].strip("'\"")).values == (0, 255)
    for bad in (["x:int8[n]{-129..5}"], {"x": TensorSpec("x", "uint16", ("n",), (0, 1 << 16))}):
        with pytest.raises(BadInputSpec, match="which holds"):
            accel.Source(f"{models}:over", inputs=bad).open()
    assert TensorSpec.parse("x:uint8[n]{0..n}").values == (0, "n")
    assert np.iinfo("uint64").max == TensorSpec.parse(f"x:uint64[n]{{0..{(1 << 64) - 1}}}").range_at({})[1]  # type: ignore[index]
