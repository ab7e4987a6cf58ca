"""Proves that the folders of onnxruntime-genai's builder, optimum and optimum-intel are sources of accel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import accel
from accel.artifact import Artifact
from accel.decoders.decoder import special_tokens
from accel.errors import UsageError
from accel.sources.source import Source
from tests.support.small_decoder import save_decoder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return accel.export(source, out=tmp_path_factory.mktemp("exported") / "dec", simplify=False)


def like_optimum(exported: Artifact, folder: Path) -> Path:
    """Writes the decoder as optimum does: no manifest, no genai_config.json, but the configs of transformers."""
    folder.mkdir()
    for name in ("model.onnx", "config.json", "generation_config.json"):
        shutil.copy(exported.path.with_name(name), folder / name)
    return folder


def test_a_folder_of_optimum(source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if the special tokens aren't read from the configs, or the folder can't be verified or generate."""
    folder = like_optimum(exported, tmp_path / "optimum")
    found = special_tokens(Source(folder).open())
    assert (found.ends, found.first, found.context) == ((2,), 1, 160)
    assert accel.verify(source, folder).passed
    wanted = accel.generate(source, [[5, 6, 7]], max_new_tokens=6).ids
    assert accel.generate(folder, [[5, 6, 7]], max_new_tokens=6).ids == wanted


def test_a_folder_of_the_builder(source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if the sizes that the builder leaves open aren't read from genai_config.json."""
    folder = like_optimum(exported, tmp_path / "builder")
    shutil.copy(exported.path.with_name("genai_config.json"), folder)
    model = onnx.load(folder / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    onnx.save(model, folder / "model.onnx")
    opened = Source(folder).open()
    assert opened.signature.input("past_key_values.0.key").shape[3] == 8
    assert "kv_cache_dim" not in opened.signature.dims
    wanted = accel.generate(source, [[5, 6, 7]], max_new_tokens=6).ids
    assert accel.generate(folder, [[5, 6, 7]], max_new_tokens=6).ids == wanted
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"head_size": "x"}}}))
    assert "kv_cache_dim" in Source(folder).open().signature.dims


def test_a_decoder_without_positions(exported: Artifact, tmp_path: Path) -> None:
    """Fails if another tool's decoder that counts its tokens itself gets rows that are padded on the left."""
    folder = like_optimum(exported, tmp_path / "counting")
    model = onnx.load(folder / "model.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[0]]), "position_ids"))
    kept = [value for value in model.graph.input if value.name != "position_ids"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    onnx.save(model, folder / "model.onnx")
    assert accel.generate(folder, [[5]], max_new_tokens=1).ids
    with pytest.raises(UsageError, match="has no position_ids, so prompts of unequal lengths can't share a batch"):
        accel.generate(folder, [[5, 6], [7]], max_new_tokens=2)


@pytest.mark.slow
def test_a_folder_of_optimum_intel(source: Path, tmp_path: Path) -> None:
    """Fails if a stateful IR without a manifest can't be verified or generate."""
    made = accel.export(source, to="openvino", out=tmp_path / "dec", simplify=False)
    made.path.with_name("openvino_model.xml.manifest.json").unlink()
    assert accel.verify(source, tmp_path / "dec").passed
    wanted = accel.generate(source, [[5, 6, 7], [9]], max_new_tokens=6).ids
    assert accel.generate(tmp_path / "dec", [[5, 6, 7], [9]], max_new_tokens=6).ids == wanted
