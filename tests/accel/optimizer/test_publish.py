"""Proves that a decoder's folder is replaced only by another decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accel
from accel.api.optimized import Optimized
from accel.artifact import Artifact
from accel.errors import CannotWrite
from accel.optimizer.candidate import CandidateResult, Status
from accel.optimizer.measure.noise import noise_notes
from accel.signature import Signature
from tests.support.small_decoder import save_byte_tokenizer, save_decoder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a decoder that transformers saved, with a tokenizer."""
    folder = save_decoder(tmp_path_factory.mktemp("source") / "llama")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the exported decoder."""
    out = tmp_path_factory.mktemp("exported") / "qdec"
    accel.export(source, out=out, simplify=False)
    return out


def result(artifact: Artifact) -> Optimized:
    return Optimized(artifact=artifact, chosen="the source", candidates=(), max_drop=0.0, environment={})


def test_a_speedup_in_noise_is_said_to_be_none(tmp_path: Path) -> None:
    """Fails if the text of a result reads as if a measurement were good whose noise floor is 2500%."""
    one = result(Artifact(path=tmp_path / "m.onnx", kind="onnx", signature=Signature(())))
    assert "noisy" not in repr(one)
    noisy = replace(one, environment={"noise_floor": 25.0})
    assert "too noisy to tell the speedup (noise floor 2500%)" in repr(noisy)
    rows = [
        CandidateResult(name="source", status=Status.PASSED, measured={"median_ms": 26.12, "verdict": "baseline"}),
        CandidateResult(
            name="int8",
            status=Status.CHOSEN,
            measured={"median_ms": 12.34, "speedup": 189.8, "ci95": [10.2, 3655.8], "verdict": "too noisy"},
        ),
    ]
    noisy = replace(
        noisy, candidates=tuple(rows), notes=tuple(noise_notes(rows, rows[1], {"noise_floor": 25.0})), chosen="int8"
    )
    for shown in (noisy.table(), noisy._repr_html_()):
        assert "26.12" in shown
        assert "12.34" in shown
        assert "189.8" not in shown
        assert "too noisy │" in shown
        assert "too noisy to tell which candidate is faster (noise floor 2500.0%)" in " ".join(shown.split())


def test_another_model_does_not_replace_a_decoder(decoder: Path, tmp_path: Path) -> None:
    """Fails if a model that is no decoder lands beside the tokenizer and the configs of a decoder."""
    tabular = accel.export(torch.nn.Linear(4, 2), example=(torch.ones(2, 4),), out=tmp_path / "tab.onnx")
    before = {file.name: file.read_bytes() for file in decoder.iterdir()}
    said = r"holds a decoder \(genai_config.json\), but the new model is none; give another out="
    for model in (tabular.path, torch.nn.Linear(4, 2)):
        live = {} if isinstance(model, Path) else {"example": (torch.ones(2, 4),)}
        with pytest.raises(CannotWrite, match=said):
            accel.optimize(model, out=decoder, target="ort-cpu", **live)  # type: ignore[arg-type]
    with pytest.raises(CannotWrite, match=said):
        result(tabular).save(decoder)
    with pytest.raises(CannotWrite, match=said):
        accel.export(torch.nn.Linear(4, 2), example=(torch.ones(2, 4),), out=decoder / "model.onnx")
    assert {file.name: file.read_bytes() for file in decoder.iterdir()} == before


def test_a_decoder_replaces_a_decoder(source: Path, decoder: Path, tmp_path: Path) -> None:
    """Fails if export or ``save`` refuses a decoder's folder for a decoder, or if the other decoder's tokenizer stays
    there."""
    accel.export(source, out=decoder, simplify=False)
    (tmp_path / "old").mkdir()
    for name in ("genai_config.json", "tokenizer.json"):
        (tmp_path / "old" / name).write_text("{}")
    result(Artifact.open(decoder / "model.onnx")).save(tmp_path / "old")
    for name in ("genai_config.json", "tokenizer.json"):
        assert (tmp_path / "old" / name).read_bytes() == (decoder / name).read_bytes()
