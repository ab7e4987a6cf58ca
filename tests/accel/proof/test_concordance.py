"""Proves that concordance, the agreement of outputs sample by sample, finds errors that a norm over all samples
hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from accel.optimizer.judge.comparison import Judge
from accel.proof.concordance import discordance, sample_errors
from accel.sources.source import Source

vectors = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 5)), elements=st.floats(-100, 100))


@given(vectors, st.floats(0.1, 10))
def test_of_vectors(value: np.ndarray, factor: float) -> None:
    """Fails if equal outputs count as different, or if a wrong scale counts as agreement. Also checks that the result
    for vectors of equal norm is 1 minus their cosine."""
    assert discordance([value], [value]) == 0
    value = value[np.abs(value).max(axis=1) > 1e-3]
    if not len(value):
        return
    scaled = discordance([value], [value * factor])
    assert scaled == pytest.approx(1 - 2 * factor / (1 + factor**2), abs=1e-9)
    turned = value[:, ::-1]
    cosine = (value * turned).sum(axis=1) / (value**2).sum(axis=1)
    assert discordance([value], [turned]) == pytest.approx(1 - cosine.mean(), abs=1e-9)


def test_batches_of_other_lengths() -> None:
    """Fails if the weight of a sample depends on its length, or if batches with different lengths raise an error."""
    short, long = np.ones((3, 2)), np.ones((1, 200))
    assert discordance([short, long], [short, -long]) == pytest.approx(2 / 4)


@pytest.mark.parametrize("columns", [1, 4])
def test_batches_without_samples(columns: int) -> None:
    """Fails if an output without rows, such as the boxes of an image without objects, is an error, or if it hides a
    difference in another batch."""
    none, some = np.zeros((0, columns), np.float32), np.arange(1, 1 + 3 * columns, dtype=np.float32).reshape(3, columns)
    assert discordance([none], [none]) == 0.0
    assert discordance([none, some], [none, some]) == pytest.approx(0.0, abs=1e-9)
    assert discordance([none, some], [none, -some]) > 1
    assert sample_errors(none, none).size == 0


def test_one_number_a_sample() -> None:
    """Fails if scalar outputs count as correct although they are three times too large. Also fails if a few correct
    large samples hide the errors of many small samples, or if a constant output counts as correct although the
    reference differs from sample to sample."""
    prices = np.random.default_rng(0).lognormal(0, 3, (256, 1)).astype(np.float32)
    step = prices.max() / 127
    assert discordance([prices], [prices * 1.01]) < 1e-3
    assert discordance([prices], [prices * 3]) > 0.3
    assert discordance([prices], [np.round(prices / step) * step]) == 1
    years = np.float32(2000) + 100 * np.random.default_rng(1).random((64,), np.float32)
    assert discordance([years], [np.full_like(years, years.mean())]) == pytest.approx(1)
    assert discordance([years], [np.full_like(years, years.mean())], about_the_mean=False) < 1e-3
    # Seven of the eight samples hold only rounding errors.
    residue = np.where(np.arange(64) % 8, 1e-9, 1.0)
    assert discordance([residue], [np.where(residue == 1, 1.0, -1e-9)]) < 1e-3
    # The values in ``alike`` are nearly equal, so replacing each value by their mean is only a small error.
    alike = np.float32(1) + np.float32(1e-6) * years
    assert discordance([alike], [np.full_like(alike, alike.mean())]) < 1e-3


@given(hnp.arrays(np.float64, 20, elements=st.floats(-10, 10)), st.integers(0, 9))
def test_lins_coefficient(value: np.ndarray, seed: int) -> None:
    """Checks that the concordance of all samples together is Lin's coefficient, with variances divided by n as in the
    paper."""
    noise = np.random.default_rng(seed).normal(0, 1e-3 * (1 + np.abs(value).max()), 20)
    if value.std() < 0.1:
        return
    got = value + noise + 0.1 * value.std()
    cov = np.cov(value, got, bias=True)
    lin = 2 * cov[0, 1] / (cov[0, 0] + cov[1, 1] + (value.mean() - got.mean()) ** 2)
    middle = np.median((value - got) ** 2 / (value**2 + got**2))
    assert discordance([value], [got]) == pytest.approx(max(middle, 1 - lin), abs=1e-9)


def test_what_isnt_float() -> None:
    """Checks that class numbers and strings are compared only for equality, and that bfloat16 counts as a float
    dtype."""
    assert discordance([np.array([1, 2, 3, 900])], [np.array([1, 2, 4, 900])]) == 0.25
    assert discordance([np.array(["a", "b"])], [np.array(["a", "c"])]) == 0.5
    narrow = np.linspace(1, 9, 64, dtype=np.float32)[:, None]
    assert discordance([narrow.astype(ml_dtypes.bfloat16)], [narrow]) < 1e-4


def test_errors_of_samples() -> None:
    """Fails if a sample's error depends on the other samples, or if the error divides by a zero in the reference."""
    reference = np.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0], [1e-9, 0.0]])
    candidate = np.array([[3.0, 9.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    # The last sample is smaller than the rounding error of the first sample.
    assert sample_errors(reference, candidate).tolist() == pytest.approx([1.0, 0.0, 1.0, 2e-4])
    assert sample_errors(np.zeros((1, 2)), np.ones((1, 2))).tolist() == [np.inf]


def _rounding(path: Path, step: float) -> Path:
    """Saves a model that rounds its input to multiples of ``step``. An int8 model rounds an output in the same way. A
    sample is one number."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[batch, 1] x) => (float[batch, 1] y) '
        f"<float s = {{{step:g}}}> {{ a = Div(x, s) b = Round(a) y = Mul(b, s) }}"
    )
    onnx.save(model, path)
    return path


def test_a_scalar_beside_the_samples(cli: Any, tmp_path: Path) -> None:
    """Fails if `accel verify` takes the number of samples from a scalar input."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float t, float[batch, 2] x) => (float[batch, 2] y) '
        "{ y = Mul(x, t) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    ran = cli("verify", tmp_path / "m.onnx", tmp_path / "m.onnx", "--json")
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout)["middle_sample"] == {"y": 0}


def test_small_outputs_that_became_zero(cli: Any, tmp_path: Path) -> None:
    """All small outputs of the model are wrongly 0, and a few large outputs are correct. Fails if `accel verify` or the
    judge accepts this model."""
    prices = np.random.default_rng(0).uniform(0.1, 0.3, (64, 1)).astype(np.float32)
    prices[::8] = 100  # each batch has one large output
    np.savez(tmp_path / "prices.npz", x=prices)
    fine = _rounding(tmp_path / "fine.onnx", 1e-6)
    coarse = _rounding(tmp_path / "coarse.onnx", 100 / 127)
    words = ("verify", fine, coarse, "--data", tmp_path / "prices.npz", "--limit", "0.25")
    ran = cli(*words, "--json")
    assert ran.code == 1
    found = json.loads(ran.stdout)
    assert found["outputs"]["y"]["rel_l2"] < 0.01  # the norm over all samples hides the error of the small outputs
    assert found["middle_sample"]["y"] == 1
    assert "half of the samples have a relative error of 1 or more" in found["problems"][0]
    assert "middle sample" in cli(*words).stdout
    assert cli("verify", fine, fine, "--data", tmp_path / "prices.npz").code == 0
    judge = Judge(Source(fine).open(), tmp_path / "prices.npz", None)
    assert judge.judge(Source(coarse).open(), {}).drop == 1
    assert judge.judge(Source(_rounding(tmp_path / "other.onnx", 1e-3)).open(), {}).drop < 0.01
