"""Proves that ``accel optimize`` tries KV caches in lower precision, judges them where they are read, and records the
precision that the runtime really uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.artifact import Artifact
from accel.converters.to_openvino import openvino_from_onnx
from accel.errors import UnknownName, UnsupportedHere
from accel.optimizer.judge.cached import contexts_to_judge
from accel.optimizer.judge.decoder import DecoderJudge
from accel.optimizer.measure.decoding import DecodingPass
from accel.optimizer.measure.workload import decode_steps
from accel.runtimes.base import open_session
from accel.runtimes.openvino import OpenVinoSession
from accel.timing.blocks import Candidate
from tests.support.small_decoder import save_byte_tokenizer, save_decoder

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an exported decoder."""
    source = save_byte_tokenizer(save_decoder(tmp_path_factory.mktemp("source") / "llama"))
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(source, out=out, simplify=False)
    return out


@pytest.fixture(scope="module")
def stateful(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Returns the same decoder for OpenVINO."""
    return accel.export(folder, to="openvino", out=tmp_path_factory.mktemp("exported") / "dec-ov")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    return path


def opened(artifact: Artifact, **options: Any) -> OpenVinoSession:
    session = open_session(artifact, None, {"threads": 1, **options})
    assert isinstance(session, OpenVinoSession)
    return session


def test_the_precision_is_read_back(stateful: Artifact) -> None:
    """Fails if the attention of a layer isn't OpenVINO's operator, or if the session says what was asked for instead of
    what the compiled model does: OpenVINO keeps a float32 cache if bfloat16 is asked for, and says bfloat16."""
    assert stateful.manifest is not None
    assert stateful.history[-1]["notes"]["attention_fused"] == LAYERS
    for name in ("fp32", "fp16", "int8"):
        with opened(stateful, cache_precision=name) as session:
            assert session.cache_kept_in() == {name: LAYERS}
    with pytest.raises(UnsupportedHere, match="in fp32 instead of bf16; leave out cache_precision"):
        opened(stateful, cache_precision="bf16")
    with pytest.raises(UnknownName, match="use one of fp32, bf16, fp16, int8"):
        opened(stateful, cache_precision="u8")


def test_attention_of_single_operations_keeps_a_float32_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the property ``KV_CACHE_PRECISION`` of OpenVINO is believed."""
    # The conversion runs in this process, so that it can be changed.
    monkeypatch.setattr(openvino_from_onnx, "run_in_child", lambda _, **given: openvino_from_onnx.convert(**given))
    monkeypatch.setattr(openvino_from_onnx, "fuse_attention", lambda _: 0)
    made = accel.export(folder, to="openvino", out=tmp_path / "dec", use_cache=False)
    with pytest.raises(UnsupportedHere, match="in fp32 instead of int8"):
        opened(made, cache_precision="int8")
    with opened(made) as session:
        assert session.cache_kept_in() == {"fp32": LAYERS}


def test_the_judge_reads_the_cache(folder: Path, stateful: Artifact, text: Path) -> None:
    """Fails if a candidate is judged by texts that run at once, which read no rounded keys and values, or if the bytes
    of the cache are those of the file's dtype."""
    judge = DecoderJudge(accel.Source(folder).open(), text, contexts=(16, 64))
    found = {name: judge.judge(stateful, {"threads": 1, "cache_precision": name}) for name in ("fp32", "fp16", "int8")}
    assert found["fp32"].drop < 1e-9
    assert 1e-9 < found["fp16"].drop < found["int8"].drop / 10
    assert "with 64 tokens in the cache" in found["int8"].details
    values = LAYERS * 2 * 2 * 8  # keys and values of two heads of 8
    heads = LAYERS * 2 * 2
    bytes_of = {"fp32": 4 * values, "fp16": 2 * values, "int8": values + 8 * heads}
    assert {name: one.cache for name, one in found.items()} == {
        name: {"precision": name, "bytes_a_token": size} for name, size in bytes_of.items()
    }
    other = DecoderJudge(accel.Source(folder).open(), text, contexts=(16,))
    assert other.key(stateful, {}) != judge.key(stateful, {})


@pytest.mark.parametrize(
    ("asked", "most", "wanted"),
    [((), None, (128,)), ((), 100, (50,)), ((64, 16, 16), 160, (16, 64)), ((159,), 160, (80,)), ((9,), None, (9,))],
)
def test_contexts(asked: tuple[int, ...], most: int | None, wanted: tuple[int, ...]) -> None:
    assert contexts_to_judge(asked, most) == wanted


def test_a_step_is_timed_with_the_same_cache(folder: Path, stateful: Artifact) -> None:
    """Fails if the runtime's cache isn't filled with the request's keys and values, or isn't filled again after it has
    grown."""
    src = accel.Source(folder).open()
    work = decode_steps(src.signature, (16, 64), 2, "latency", 1)
    found = []
    for artifact in (src, stateful):
        candidate = work.candidate(Candidate(name="x", artifact=artifact, options={"threads": 1}))
        timed = DecodingPass(candidate)  # type: ignore[arg-type]
        found.append([timed.run({}) for _ in range(34)])
        timed.close()
    for name, wanted in found[0][0].items():
        for number in (0, 32):
            np.testing.assert_allclose(found[1][number][name], wanted, rtol=1e-3, atol=1e-4)
        assert not np.allclose(found[1][31][name], wanted, atol=1e-3)


@pytest.mark.parametrize(("target", "main"), [("openvino", "openvino_model.xml"), ("ort-cpu", "model.onnx")])
@pytest.mark.slow
def test_the_search_tries_lower_precisions(
    target: str, main: str, folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a cache that loses too much is chosen, if fp16 isn't tried after it, or if the published decoder is
    opened with another cache than was judged. ONNX Runtime's cache is part of the file, and its steps are found on
    texts."""

    def scripted(source: Any, rows: Any, *_: Any) -> dict[str, Any]:
        for row in (source, *rows):
            ms = 5.0 if "cache" in row.name else 10.0
            verdict = "faster" if ms < 10 else "no measurable difference"
            row.measured = {"median_ms": ms, "round_medians_ms": [ms] * 9, "verdict": verdict}
            row.measured |= {"speedup": 10 / ms, "ci95": [9 / ms, 11 / ms]}
        return {"noise_floor": 0.02}

    monkeypatch.setattr("accel.optimizer.search.measured", scripted)
    usual = {"target": target, "precision": "fp32", "text": text, "contexts": (16, 64), "vary_session": False}
    rough = accel.optimize(folder, out=tmp_path / "rough", max_kl=0.9, **usual)
    assert rough.chosen == f"{target} fp32 with int8 cache"
    fine = accel.optimize(folder, out=tmp_path / "fine", max_kl=1e-5, **usual)
    assert fine.chosen == f"{target} fp32 with fp16 cache"
    assert {row.name: row.status for row in fine.candidates}[f"{target} fp32 with int8 cache"] == "rejected"
    for made, name in ((rough, "int8"), (fine, "fp16")):
        assert made.artifact.path.name == main
        session = made.artifact.manifest.session  # type: ignore[union-attr]
        assert session["options"]["cache_precision"] == name
        assert session["judgement"]["cache"]["precision"] == name
        with accel.load(made.artifact.path.parent) as loaded:
            assert loaded.cache_kept_in() == {name: LAYERS}  # type: ignore[attr-defined]
        assert len(accel.generate(made.artifact.path.parent, "The", max_new_tokens=3).ids[0]) <= 3
