"""Proves that a float input can declare the range of its random inputs, wherever accel draws random inputs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

import accel
from accel.errors import BadInputSpec
from accel.signature import DimRange, IntegerRanges, Signature, TensorSpec
from tests.support import onnx_builder as build

FLOAT = TensorProto.FLOAT
RANGES = ["x:float32[batch,2]{0..1}", "scale:float32[]{0.5..2}"]
numbers = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e30, 1e30))


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """Makes y = sqrt(x) * log(scale), which is NaN for normally distributed inputs."""
    nodes = [build.node("Sqrt", "x", "root"), build.node("Log", "scale", "log"), build.node("Mul", "root log", "y")]
    shape = (FLOAT, ["batch", 2])
    return build.artifact(tmp_path / "m.onnx", nodes, {"x": shape, "scale": (FLOAT, [])}, {"y": shape}).path


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["", "batch,3"])
def test_random_inputs_stay_in_the_range(dtype: str, shape: str) -> None:
    """Fails if a float input of any width or rank, scalars included, ignores its range."""
    spec = TensorSpec.parse(f"x:{dtype}[{shape}]{{-0.5..1.5}}")
    values = Signature((spec,), (), {"batch": DimRange(1, 99, 99)} if shape else {}).example_inputs()["x"]
    assert str(values.dtype) == dtype
    assert -0.5 <= float(values.min()) <= float(values.max()) <= 1.5
    if shape:
        assert float(values.min()) < 0 < 1 < float(values.max())


@given(numbers, numbers)
def test_a_range_reads_back(one: float, other: float) -> None:
    """Fails if a range changes when it is printed and read, or written to a manifest and read."""
    spec = TensorSpec("x", "float32", ("batch",), (min(one, other), max(one, other)))
    assert TensorSpec.parse(str(spec)) == spec
    signature = Signature((spec,))
    assert Signature.from_json(signature.to_json()) == signature
    assert spec.span_at({}) == (min(one, other), max(one, other))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x:float32[2]{1.5..1}", "empty range of values 1.5..1"),
        ("x:float32[2]{0..nan-1.5}", "can't read the bound"),
        ("x:float32[2]{0..1e999}", "can't read the bound"),
        ("ids:int64[2]{0.5..3}", "can't read the bound '0.5'"),
        ("x:float32[2]{0.5}", "can't read input"),
    ],
)
def test_a_wrong_range(text: str, said: str) -> None:
    """Fails if an empty range, an infinite range or a fraction for integers is accepted."""
    with pytest.raises(BadInputSpec, match=said):
        TensorSpec.parse(text)
    with pytest.raises(BadInputSpec, match="finite number"):
        TensorSpec("x", "float32", (), (0.0, math.inf))


def test_a_bound_may_be_a_dim() -> None:
    """Fails if the times of samples can't end at the length of their sequence."""
    spec = TensorSpec.parse("times:float32[batch,length]{0..length-0}")
    signature = Signature((spec,), (), {"batch": DimRange(1, 8, 8), "length": DimRange(1, 100, 100)})
    assert 50 < signature.example_inputs()["times"].max() <= 100
    assert signature.example_inputs(length=3)["times"].max() <= 3


def test_the_users_data_may_be_outside(roots: Path, tmp_path: Path) -> None:
    """Fails if the range of floats, which describes random inputs, is used to refuse data."""
    spec = TensorSpec.parse(RANGES[0])
    assert IntegerRanges((spec,)).first_outside({"x": np.full((1, 2), 9, np.float32)}) is None
    data = build.save_data(tmp_path / "d.npz", x=np.full((4, 2), 9.0, np.float32))
    one_input = build.artifact(
        tmp_path / "s.onnx", [build.node("Sqrt", "x", "y")], {"x": (FLOAT, ["batch", 2])}, {"y": (FLOAT, ["batch", 2])}
    )
    assert accel.verify(one_input, one_input, data=data, inputs=RANGES[:1]).passed


def test_optimize_follows_the_advice_on_nan(roots: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if the warning about NaN on random inputs doesn't name the input, if the range it advises is ignored, or if
    the result of the run without a range is taken from the cache."""
    options = ("--target", "ort-cpu", "--precision", "fp32", "--fixed-session", "--budget-seconds", "20")
    ran = cli("optimize", roots, *options, "-o", tmp_path / "a")
    assert ran.code == 0, ran.stderr
    advised = "give the range of random inputs with --input x:float32[batch,2]{0.1..1}"
    assert advised in " ".join(ran.stdout.split())
    ranges = [word for text in RANGES for word in ("--input", text)]
    ran = cli("optimize", roots, *options, "-o", tmp_path / "b", *ranges)
    assert ran.code == 0, ran.stderr
    assert "NaN" not in ran.stdout + ran.stderr
