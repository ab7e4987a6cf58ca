"""Proves that encoder-decoders are exported as two files that equal PyTorch step by step, and answer texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

import accel
from accel.api.decoder.pair import pair_gate
from accel.api.decoder.parts import encoder_of
from accel.artifact import Artifact
from accel.errors import AccelError, BadSource, UnsupportedHere, UsageError
from accel.sources.source import Source
from tests.support.small_decoder import BYTE_VOCABULARY, save_byte_tokenizer

COMMON = {
    "vocab_size": BYTE_VOCABULARY, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
LAYERS = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "t5": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "bart": {**LAYERS, "max_position_embeddings": 96},
    "marian": {**LAYERS, "max_position_embeddings": 96},
    "whisper": {**LAYERS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
}


def save(folder: Path, kind: str) -> Path:
    """Saves a small encoder-decoder of two layers with random weights, and a tokenizer of bytes."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **KINDS[kind])
    model = (AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM).from_config(config).eval()
    model.generation_config.bad_words_ids = [[0]] if kind == "marian" else None
    model.generation_config.forced_bos_token_id = 7 if kind == "bart" else None
    model.save_pretrained(folder)
    return save_byte_tokenizer(folder, None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("source") / "t5", "t5")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return accel.export(source, out=tmp_path_factory.mktemp("exported") / "t5", simplify=False)


def test_plain_onnxruntime_runs_both_files(source: Path, exported: Artifact) -> None:
    """Fails if the names aren't optimum's, or two steps of plain ONNX Runtime differ from PyTorch in one pass."""
    from transformers import AutoModelForSeq2SeqLM

    folder = exported.path.parent
    assert exported.path.name == "decoder_with_past_model.onnx"
    encoder = onnxruntime.InferenceSession(folder / "encoder_model.onnx")
    decoder = onnxruntime.InferenceSession(folder / "decoder_with_past_model.onnx")
    ids, mask = np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    values = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
    outputs = dict(zip((one.name for one in encoder.get_outputs()), values, strict=True))
    outputs.pop("last_hidden_state")
    cross = {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
    assert next(iter(cross)) == "past_key_values.0.encoder.key"
    names = [one.name for one in decoder.get_inputs() if ".decoder." in one.name]
    cache = {name: np.zeros((2, 4, 0, 8), np.float32) for name in names}
    text = np.array([[0, 40, 41], [0, 50, 51]])
    for part in (text[:, :2], text[:, 2:]):
        feeds = {"input_ids": part, "encoder_attention_mask": mask, **cross, **cache}
        found = dict(zip((one.name for one in decoder.get_outputs()), decoder.run(None, feeds), strict=True))
        cache = {name: found[name.replace("past_key_values", "present")] for name in names}
    model = AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    with torch.no_grad():
        for row, length in ((0, 4), (1, 2)):
            given = torch.from_numpy(ids[row : row + 1, :length])
            wanted = (
                model(input_ids=given, decoder_input_ids=torch.from_numpy(text[row : row + 1])).logits[0, -1].numpy()
            )
            assert np.linalg.norm(found["logits"][row, -1] - wanted) < 1e-4 * np.linalg.norm(wanted)


def test_the_dims_of_the_cache_have_names(exported: Artifact) -> None:
    """Fails if the tokens of the new cache have a made-up dim instead of the sum of the old and the new tokens."""
    shapes = {spec.shape[2] for spec in exported.signature.outputs if spec.name.startswith("present.")}
    assert shapes == {"past+sequence"}


def test_every_scenario_was_run(source: Path, exported: Artifact, cli) -> None:
    """Fails if the manifest lacks a scenario of both files together, or verify passes another model."""
    results = [row for record in exported.history for row in record["gates"] if row["gate"] == "encoder and decoder"]
    assert len(results) == 7
    assert all(row["passed"] for row in results)
    ran = cli("verify", str(source), str(exported.path.parent), "--json")
    assert ran.code == 0, ran.stderr
    assert {row["case"] for row in results} == set(json.loads(ran.stdout)["cases"])
    with pytest.raises(UsageError, match="compare it with the folder of transformers"):
        accel.verify(exported, exported)


Edit = Callable[[onnx.ModelProto], None]


def _swap(*names: str) -> Edit:
    """Returns an edit that swaps two inputs where they are read."""
    other = dict(zip(names, names[::-1], strict=True))

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [other.get(name, name) for name in node.input]

    return edit


def _all_seen(model: onnx.ModelProto) -> None:
    """Lets the decoder read the padding of the encoder's tokens."""
    for node in model.graph.node:
        node.input[:] = ["seen" if name == "encoder_attention_mask" else name for name in node.input]
    one = onnx.numpy_helper.from_array(np.array([1]))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["mask_shape"], ["seen"], value=one))
    model.graph.node.insert(0, helper.make_node("Shape", ["encoder_attention_mask"], ["mask_shape"]))


@pytest.mark.parametrize(
    ("edit", "case"),
    [
        (_swap("past_key_values.1.encoder.key", "past_key_values.1.encoder.value"), "prefill of the whole text"),
        (_swap("past_key_values.0.encoder.key", "past_key_values.1.encoder.key"), "prefill of the whole text"),
        (_swap("past_key_values.1.decoder.key", "past_key_values.1.decoder.value"), "prefill in three parts"),
        (_all_seen, "a batch of 8"),
    ],
)
def test_planted_faults_are_found(edit: Edit, case: str, source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if the gate passes a decoder with this fault, or doesn't name the scenario."""
    model = onnx.load(exported.path)
    edit(model)
    onnx.save(model, tmp_path / "faulty.onnx")
    parts = [Source(source).open(part=part) for part in ("encoder", "decoder")]
    gate = pair_gate(parts[0], parts[1], encoder_of(exported), None)
    results = gate.check(parts[1], replace(exported, path=tmp_path / "faulty.onnx"))
    assert case in [result.case for result in results if not result.passed]


def test_answers_equal_those_of_transformers(source: Path, exported: Artifact, cli) -> None:
    """Fails if the answers of both files differ from transformers', or prompts of unequal lengths disturb another."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    prompts = [[74, 71, 78, 78, 81], [40, 41], [90]]
    wanted = [model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 1:].tolist() for ids in prompts]
    found = accel.generate(exported, prompts, max_new_tokens=8)
    assert found.ids == wanted
    assert found.prompts == prompts
    ran = cli("generate", str(exported.path.parent), "--prompt", "hello", "--max-new-tokens", "4", "--json")
    assert ran.code == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["ids"] == accel.generate(source, "hello", max_new_tokens=4).ids[0]
    assert isinstance(answer["text"], str)


@pytest.mark.parametrize("kind", ["bart", "marian"])
def test_tokens_that_a_model_forces_or_forbids(kind: str, tmp_path: Path) -> None:
    """Fails if the first token that BART's generation config forces, or a token that Marian's forbids, is ignored. Runs
    in PyTorch."""
    from transformers import AutoModelForSeq2SeqLM

    folder = save(tmp_path / kind, kind)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    model.generation_config.forced_eos_token_id = None
    ids = [74, 71, 78]
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    assert accel.generate(folder, [ids], max_new_tokens=6).ids == [wanted]
    with pytest.raises(UsageError, match="the encoder reads 96; shorten the prompt, or pass truncate=True"):
        accel.generate(folder, [[5] * 97])
    assert len(accel.generate(folder, [[5] * 97], max_new_tokens=2, truncate=True).prompts[0]) == 96


def test_what_is_refused(source: Path, exported: Artifact, tmp_path: Path) -> None:
    """Fails if sound is read as text, a missing encoder isn't named, or the files of a user are overwritten."""
    with pytest.raises(UnsupportedHere, match=r"takes input_features:float32\[batch,8,40\], not text"):
        accel.generate(save(tmp_path / "whisper", "whisper"), "hello")
    for name in ("decoder_with_past_model.onnx", "decoder_with_past_model.onnx.manifest.json"):
        shutil.copy(exported.path.with_name(name), tmp_path / name)
    with pytest.raises(BadSource, match=r"encoder_model.onnx does not exist, and the decoder beside it needs it"):
        accel.generate(tmp_path, [[5]])
    with pytest.raises(AccelError, match="was not made by accel"):
        accel.export(source, out=source)
    with pytest.raises(BadSource, match="exported as two files; leave out decoder=True"):
        accel.export(source, decoder=True, out=tmp_path / "out")


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_encoder_decoders(kind: str, tmp_path: Path) -> None:
    """Fails if the export of the kind is refused, or if the simplified file isn't compared with PyTorch in each of the
    7 scenarios."""
    made = accel.export(save(tmp_path / kind, kind), out=tmp_path / "out")
    results = [row for record in made.history for row in record["gates"] if row["gate"] == "encoder and decoder"]
    assert len(results) == 7
    assert all(row["passed"] for row in results)
