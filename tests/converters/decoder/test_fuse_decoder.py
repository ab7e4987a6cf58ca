"""Proves that a fused decoder computes what its source computes, and that its cache grows in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import accel
from accel.artifact import Artifact
from accel.converters.decoder.stage import DecoderNotFused, FuseDecoderConfig
from accel.decoders.proof import DecoderGate
from accel.decoders.replay import cache_of
from accel.runtimes.base import open_session
from accel.runtimes.kv.cache import KvCache, grows_in_place, open_cache
from accel.runtimes.kv.in_place import InPlaceCache
from accel.signature.decoder import IDS, MASK, POSITIONS
from accel.stage import GateResult, run_stage
from tests.support.small_decoder import save_decoder

CONTEXT = 160
Make = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(kind: str) -> Artifact:
        source = save_decoder(tmp_path_factory.mktemp("decoder") / kind, kind)
        return accel.export(source, out=tmp_path_factory.mktemp("exported") / kind)

    return make


def _fused(src: Artifact, folder: Path) -> Artifact:
    return run_stage("fuse_decoder", src, FuseDecoderConfig(), out=folder / "model.onnx")


def _failed(src: Artifact, out: Artifact) -> list[GateResult]:
    return [result for result in DecoderGate(limit=1e-4, context=CONTEXT).check(src, out) if not result.passed]


# Rotary positions and shared heads; bounded scores, windows and scaled norms; learned positions and joined dims.
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_the_fused_decoder_passes_every_scenario(exported: Make, tmp_path: Path, kind: str) -> None:
    """Fails if the scale, the softcap, the mask, the rotary positions or the order of heads is wrong in a layer, or if
    an attention or the cache in place is missing."""
    src = exported(kind)
    out = _fused(src, tmp_path)
    ops = Counter(node.op_type for node in onnx.load(out.path).graph.node)
    assert ops["GroupQueryAttention"] == 2
    assert ops["Softmax"] == 0
    assert ops["RotaryEmbedding"] == (0 if kind == "gpt2" else 4)
    assert out.signature.inputs == src.signature.inputs
    assert grows_in_place(out.path, cache_of(out.signature))
    assert not grows_in_place(src.path, cache_of(src.signature))
    assert _failed(src, out) == []


@pytest.mark.parametrize("change", ["scale", "swapped", "mask", "heads"])
def test_the_gate_finds_a_wrong_fusion(exported: Make, tmp_path: Path, change: str) -> None:
    """Shows that the gate of the stage can fail: one attribute or input of one fused layer is wrong."""
    src = exported("llama")
    out = _fused(src, tmp_path)
    model = onnx.load(out.path)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    if change == "scale":
        next(a for a in node.attribute if a.name == "scale").f *= 1.1
    elif change == "swapped":
        node.input[1], node.input[2] = node.input[2], node.input[1]
    elif change == "mask":
        node.input[10] = ""
    else:
        rotary = next(node for node in model.graph.node if node.op_type == "RotaryEmbedding")
        rotary.input[2], rotary.input[3] = rotary.input[3], rotary.input[2]
    onnx.save(model, out.path)
    assert _failed(src, out)


def test_another_attention_is_refused_by_name(exported: Make, tmp_path: Path) -> None:
    """Fails if a decoder whose scores aren't a product of queries and keys is changed or half fused."""
    with pytest.raises(DecoderNotFused, match="2 of its layers have another form of attention"):
        _fused(exported("bloom"), tmp_path)


def _feeds(ids: np.ndarray, past: int) -> dict[str, np.ndarray]:
    rows, new = ids.shape
    positions = np.tile(np.arange(past, past + new), (rows, 1))
    return {IDS: ids, MASK: np.ones((rows, past + new), np.int64), POSITIONS: positions}


def test_the_cache_grows_in_place(exported: Make, tmp_path: Path) -> None:
    """Fails if a step gives other logits than the copied cache, a longer text doesn't fit, or a step copies buffers
    that have room."""
    out = _fused(exported("llama"), tmp_path)
    draw = np.random.default_rng(0)
    layout = cache_of(out.signature)
    with open_session(out) as session:
        own, copied = open_cache(session, layout, 2), KvCache(session, layout, 2)
        assert isinstance(own, InPlaceCache)
        past, places = 0, []
        for new in (5, 1, 3, 1, 300, 1):
            feeds = _feeds(draw.integers(3, 90, (2, new)), past)
            peeked = own.peek(feeds)
            wanted = copied.step(feeds)
            assert np.allclose(own.step(feeds), wanted, atol=1e-5)
            assert np.allclose(peeked, wanted, atol=1e-5)
            places.append({name: value.__array_interface__["data"][0] for name, value in own.arrays().items()})
            past += new
        assert places[0] == places[3] != places[4] == places[5]
        assert all(np.allclose(value, copied.arrays()[name], atol=1e-5) for name, value in own.arrays().items())


def test_a_loaded_cache_and_new_orders(exported: Make, tmp_path: Path) -> None:
    """Fails if a loaded cache shares the caller's arrays, or rows in a new order keep old buffers."""
    out = _fused(exported("llama"), tmp_path)
    draw = np.random.default_rng(0)
    layout = cache_of(out.signature)
    arrays = {
        spec.name: draw.standard_normal((3, spec.shape[1], 7, spec.shape[3])).astype(np.float32)  # type: ignore[call-overload]
        for spec in layout.past
    }
    kept = {name: value.copy() for name, value in arrays.items()}
    with open_session(out) as session:
        caches = [open_cache(session, layout, 3), KvCache(session, layout, 3)]
        ids = draw.integers(3, 90, (3, 2))
        for cached in caches:
            cached.load(arrays)
            cached.step(_feeds(ids[:, :1], 7))
            cached.reorder([2, 0])
        own, wanted = (cached.step(_feeds(ids[:2, 1:], 8)) for cached in caches)
        assert np.allclose(own, wanted, atol=1e-5)
    assert all(np.array_equal(value, kept[name]) for name, value in arrays.items())


def test_a_plain_run_takes_several_rows_after_others(exported: Make, tmp_path: Path) -> None:
    """Fails if a session refuses what the operator alone refuses: several new tokens of several rows with a cache."""
    src = exported("llama")
    feeds = src.signature.example_inputs(batch=3, sequence=4, past=6)
    feeds[MASK][:] = 1
    with open_session(src) as session, open_session(_fused(src, tmp_path)) as fused:
        wanted, found = session.run(feeds), fused.run(feeds)
        assert list(found) == list(wanted)
        assert all(np.allclose(found[name], wanted[name], atol=1e-4) for name in wanted)
