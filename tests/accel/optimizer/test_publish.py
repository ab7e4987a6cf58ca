"""Proves that a decoder's folder is replaced only by another decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel
from accel.api.optimized import Optimized
from accel.artifact import Artifact
from accel.errors import CannotWrite
from tests.support.small_decoder import save_byte_tokenizer, save_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an exported decoder with a tokenizer."""
    source = save_decoder(tmp_path_factory.mktemp("source") / "llama")
    save_byte_tokenizer(source)
    out = tmp_path_factory.mktemp("exported") / "qdec"
    accel.export(source, out=out, simplify=False)
    return out


def result(artifact: Artifact) -> Optimized:
    return Optimized(artifact=artifact, chosen="the source", candidates=(), max_drop=0.0, environment={})


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
    assert {file.name: file.read_bytes() for file in decoder.iterdir()} == before


def test_a_decoder_replaces_a_decoder(decoder: Path, tmp_path: Path) -> None:
    """Fails if ``save`` refuses a decoder's folder for a decoder, or leaves the other decoder's tokenizer there."""
    (tmp_path / "old").mkdir()
    for name in ("genai_config.json", "tokenizer.json"):
        (tmp_path / "old" / name).write_text("{}")
    result(Artifact.open(decoder / "model.onnx")).save(tmp_path / "old")
    for name in ("genai_config.json", "tokenizer.json"):
        assert (tmp_path / "old" / name).read_bytes() == (decoder / name).read_bytes()
