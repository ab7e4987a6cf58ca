"""Proves that GPTQ loses less than plain rounding, and that texts calibrate a decoder's 4-bit weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel.artifact import Artifact
from accel.converters.quantize.gptq import rounded
from accel.converters.quantize.stage import AWQ, GPTQ, QuantizeConfig, quantize
from accel.converters.quantize.texts import write_texts
from accel.errors import BadData, UnsupportedHere
from tests.support.small_decoder import BYTE_VOCABULARY, save_byte_tokenizer, small_decoder


def _correlated(seed: int, channels: int) -> np.ndarray:
    """Returns 600 tokens of activations, of which 8 directions have nearly all of the energy."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((600, 8)) @ draw.standard_normal((8, channels)) + 0.1 * draw.standard_normal(
        (600, channels)
    )


def _lost(rounded_weights: np.ndarray, weights: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(x @ (rounded_weights - weights)) / np.linalg.norm(x @ weights))


@pytest.mark.parametrize("block", [32, 128])
def test_errors_are_compensated(block: int) -> None:
    """Fails if the wrong triangle of the factor is read: then no error is compensated, and the loss is that of plain
    rounding, which is over four times as large."""
    x = _correlated(0, 256)
    weights = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    steps, scales = rounded(weights, x.T @ x, block)
    found = steps * np.repeat(scales, block, axis=0)
    largest = np.abs(weights.reshape(-1, block, 64)).max(axis=1).repeat(block, axis=0) / 7
    plain = np.rint(weights / largest) * largest
    assert _lost(found, weights, x) < _lost(plain, weights, x) / 4


@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([16, 32]), st.integers(0, 9))
def test_every_step_has_4_bits_and_a_scale(inputs: int, outputs: int, block: int, seed: int) -> None:
    """Fails if a step leaves the range, a scale isn't finite, or an odd size, a channel without activations or a column
    of zeros breaks the rounding. Weights that fit the steps exactly stay as they are, where activations don't mix."""
    draw = np.random.default_rng(seed)
    weights = draw.integers(-7, 8, (inputs, outputs)).astype(np.float32)
    weights[::block] = -8.0
    weights[:, 0] = 0.0
    kept = weights.copy()
    steps, scales = rounded(weights, np.diag((np.arange(inputs) % 3).astype(float)), block)
    assert np.isfinite(scales).all()
    assert ((steps >= -8) & (steps <= 7)).all()
    np.testing.assert_allclose(steps * np.repeat(scales, block, axis=0)[:inputs], kept, atol=1e-5)
    np.testing.assert_array_equal(weights, kept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an exported decoder whose embeddings have 12 directions, so that the channels of its activations are
    correlated as in trained models."""
    module = small_decoder("llama", hidden_size=256, intermediate_size=512, initializer_range=0.05)
    torch.manual_seed(1)
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.randn(BYTE_VOCABULARY, 12) @ torch.randn(12, 256) / 2)
        module.lm_head.weight.mul_(4)
    source = tmp_path_factory.mktemp("decoder") / "llama"
    module.save_pretrained(source)
    save_byte_tokenizer(source)
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(source, out=out, simplify=False)
    return out


@pytest.mark.slow
def test_gptq_keeps_a_budget_that_plain_rounding_misses(folder: Path, tmp_path: Path) -> None:
    """Fails if the search gives up 4 bits before it calibrates, tries GPTQ although plain rounding is good enough, or
    GPTQ loses as much as plain rounding. A smaller cache can't mend weights that lose too much, so it isn't tried."""
    options = {"target": "ort-cpu", "precision": "int4", "rounds": 5, "vary_session": False}
    found = accel.optimize(folder, out=tmp_path / "q", max_kl=0.01, **options)
    drops = {row.name: row.judgement.drop for row in found.candidates if row.judgement is not None and row.recipe}
    assert min(drops["ort-cpu int4 in blocks of 128"], drops["ort-cpu int4"]) > 0.02
    assert drops["ort-cpu int4 GPTQ"] < 0.01
    assert "ort-cpu int4 AWQ" not in drops
    reasons = {row.name: row.reason for row in found.candidates}
    assert reasons["ort-cpu int4 in blocks of 128 with int8 cache"].endswith("loses too much without it")
    found = accel.optimize(folder, out=tmp_path / "easy", max_kl=0.5, **options)
    rows = [row.name for row in found.candidates if row.recipe and not row.base and "cache" not in row.name]
    assert rows == ["ort-cpu int4 in blocks of 128"]


@pytest.mark.proof
@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_awq_is_the_last_to_be_tried(target: str, folder: Path, tmp_path: Path) -> None:
    """Fails if AWQ can't read a decoder with fused attention, or isn't tried after the others."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {m} is {n * m}. " for n in range(99) for m in range(3)))
    found = accel.optimize(
        folder, out=tmp_path / "q", max_kl=1e-5, target=target, precision="int4", rounds=5, text=text
    )
    rows = [row for row in found.candidates if row.recipe is not None and not row.base and "cache" not in row.name]
    before = (
        ["ort-cpu int4 in blocks of 128", "ort-cpu int4", "ort-cpu int4 GPTQ"]
        if target == "ort-cpu"
        else ["openvino int4"]
    )
    assert [row.name for row in rows] == [*before, f"{target} int4 AWQ"]
    assert all(row.judgement is not None and 1e-5 < row.judgement.drop < 0.5 for row in rows)


def test_what_is_no_text(folder: Path, tmp_path: Path) -> None:
    """Fails if samples without token ids, or a model without a cache, end in a traceback of the child process."""
    artifact = Artifact.open(folder / "model.onnx")
    np.savez(tmp_path / "other.npz", pixels=np.zeros((2, 3)))
    for mode in (GPTQ, AWQ):
        with pytest.raises(BadData, match="holds no token ids"):
            quantize(artifact, QuantizeConfig(mode=mode, data=tmp_path / "other.npz"), tmp_path / "q.onnx")
    write_texts(np.ones((2, 8), np.int64), tmp_path / "texts.npz")
    made = accel.export(torch.nn.Linear(4, 4), example=(torch.ones(2, 4),), out=tmp_path / "one.onnx")
    with pytest.raises(UnsupportedHere, match="is for decoders"):
        quantize(made, QuantizeConfig(mode=GPTQ, data=tmp_path / "texts.npz", smallest=1), tmp_path / "q.onnx")
