"""Proves that data in float64, NumPy's default, is rounded to the model's floats with a note, and only if the numbers
survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import accel
from accel.errors import BadData
from accel.proof.data import Dataset, rounding_note
from accel.proof.stream import SampleStream
from accel.signature import Signature, TensorSpec
from tests.support import onnx_builder as build

SIGNATURE = Signature((TensorSpec("x", "float32", ("batch", 2)),))
NOTE = "the data holds x as float64; the numbers are rounded to float32, which the model takes"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = (TensorProto.FLOAT, ["batch", 2])
    return build.artifact(tmp_path / "m.onnx", [build.node("Tanh", "x", "y")], {"x": shape}, {"y": shape}).path


def test_every_command_that_reads_data_says_it_once(model: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if a command casts float64 data silently, or says so more than once."""
    data = build.save_data(tmp_path / "d.npz", x=np.random.default_rng(0).random((8, 2)))
    for arguments in (
        ("verify", model, model),
        ("bisect", model, model),
        ("bench", model, "--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0"),
        ("optimize", model, "--target", "ort-cpu", "--precision", "fp32", "--fixed-session", "-o", tmp_path / "out"),
    ):
        ran = cli(*arguments, "--data", data)
        assert ran.code == 0, ran.stderr
        said = " ".join(f"{ran.stdout} {ran.stderr}".split())
        assert said.count(NOTE) == 1, (arguments[0], said)


def test_no_note_where_nothing_is_rounded(tmp_path: Path) -> None:
    """Fails if data in the model's own dtype, or integers in another width, get the note."""
    kept = build.save_data(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), labels=np.ones(4))
    assert rounding_note(kept, SIGNATURE) == ""
    ids = Signature((TensorSpec("ids", "int32", ("batch",)),))
    assert rounding_note(build.save_data(tmp_path / "b.npz", ids=np.arange(4)), ids) == ""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1e39, "numbers that are too large for the dtype float32"),
        (1700000001.0, "sample 2 holds the whole number 1700000001 as float64, which float32 would change to 17000000"),
        (0.1, ""),
        (16777216.0, ""),
        (1e20, ""),
    ],
)
def test_numbers_that_float32_would_change(tmp_path: Path, number: float, said: str) -> None:
    """Fails if ids or time stamps in float64 are changed without an error, or if rounded fractions are refused."""
    values = np.zeros((4, 2))
    values[2, 1] = number
    data = build.save_data(tmp_path / "d.npz", x=values)
    for read in (lambda: Dataset.load(data, SIGNATURE), lambda: list(SampleStream(data, SIGNATURE).batches(8))):
        if said:
            with pytest.raises(BadData, match=said):
                read()
        else:
            read()


def test_following_the_advice(model: Path, tmp_path: Path) -> None:
    """Fails if the numbers are still refused after the user saved them as float32."""
    values = np.full((4, 2), 1700000001.0)
    with pytest.raises(BadData, match="or save them as float32"):
        accel.verify(model, model, data=build.save_data(tmp_path / "d.npz", x=values))
    saved = build.save_data(tmp_path / "e.npz", x=values.astype(np.float32))
    assert accel.verify(model, model, data=saved).passed
