"""Proves that the KV cache of a fused decoder is kept in 16 or 8 bits, and that ONNX Runtime really keeps it so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import accel
from accel.artifact import Artifact
from accel.converters.decoder.lower_cache import CacheNotLowered, LowerCacheConfig
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.converters.quantize.texts import write_texts
from accel.decoders.proof import DecoderGate
from accel.errors import BadData, UnknownName, UnsupportedHere
from accel.runtimes.base import open_session
from accel.stage import run_stage
from tests.support.small_decoder import BYTE_VOCABULARY, save_decoder

LAYERS = 2
# The relative error of the logits, as a random decoder amplifies that of its attention.
LIMITS = {"fp16": 2e-3, "int8": 5e-2}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    source = save_decoder(tmp_path_factory.mktemp("source") / "llama")
    return accel.export(source, out=tmp_path_factory.mktemp("exported") / "dec", simplify=False)


@pytest.fixture(scope="module")
def fused(exported: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return run_stage("fuse_decoder", exported, FuseDecoderConfig(), out=tmp_path_factory.mktemp("f") / "model.onnx")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.npz"
    write_texts(np.random.default_rng(0).integers(0, BYTE_VOCABULARY, (32, 128)), path)
    return path


def lowered(fused: Artifact, precision: str, texts: Path, folder: Path) -> Artifact:
    config = LowerCacheConfig(precision=precision, data=texts if precision == "int8" else None)
    return run_stage("lower_cache", fused, config, out=folder / "model.onnx")


@pytest.mark.parametrize("precision", LIMITS)
def test_every_scenario_holds(precision: str, exported: Artifact, fused: Artifact, texts: Path, tmp_path: Path) -> None:
    """Fails if padding, reordered rows, a batch or a growing buffer breaks with a cache in fewer bits, if the cache
    isn't rounded at all, or if the session reads another precision than the file has."""
    made = lowered(fused, precision, texts, tmp_path)
    results = DecoderGate(limit=LIMITS[precision], context=160).check(exported, made)
    assert not [result for result in results if not result.passed]
    assert max(result.value or 0 for result in results) > LIMITS[precision] / 20
    dtype = {"fp16": "float16", "int8": "int8"}[precision]
    assert {spec.dtype for spec in made.signature.inputs if spec.name.startswith("past")} == {dtype}
    with open_session(made, None, {"cache_precision": precision}) as session:
        assert session.cache_kept_in() == {precision: LAYERS}  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedHere, match=f"in {precision} instead of fp32; leave out cache_precision"):
        open_session(made, None, {"cache_precision": "fp32"})


def test_each_channel_has_its_own_step(fused: Artifact, texts: Path, tmp_path: Path) -> None:
    """Fails if an int8 cache has one step for all channels, or none for values that the texts don't reach."""
    found = onnx.load(lowered(fused, "int8", texts, tmp_path).path)
    steps = [numpy_helper.to_array(one) for one in found.graph.initializer if "step" in one.name]
    assert len(steps) == 2 * LAYERS
    for step in steps:
        assert step.shape == (2, 1, 8)
        assert len(np.unique(step)) == step.size
        assert step.min() > 0


def test_what_cant_be_lowered(exported: Artifact, fused: Artifact, texts: Path, tmp_path: Path) -> None:
    """Fails if an advice of an error doesn't name what helps."""
    with pytest.raises(CacheNotLowered, match="run the stage fuse_decoder first"):
        lowered(exported, "fp16", texts, tmp_path)
    with pytest.raises(CacheNotLowered, match="needs texts to calibrate on"):
        run_stage("lower_cache", fused, LowerCacheConfig(), out=tmp_path / "model.onnx")
    with pytest.raises(UnknownName, match="use one of fp16, int8"):
        lowered(fused, "bf16", texts, tmp_path)
    with pytest.raises(CacheNotLowered, match="start from the float32 decoder"):
        lowered(lowered(fused, "fp16", texts, tmp_path / "a"), "int8", texts, tmp_path / "b")
    np.savez(tmp_path / "other.npz", other=np.zeros(3))
    with pytest.raises(BadData, match="holds no token ids"):
        lowered(fused, "int8", tmp_path / "other.npz", tmp_path / "c")
