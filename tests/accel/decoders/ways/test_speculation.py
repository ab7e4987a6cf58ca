"""Proves that a draft changes no answer, forgets what it got wrong, and says what it was good for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel.artifact import Artifact, manifest_path
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.decoders.replay import Replay
from accel.decoders.sampling import Sampler, Sampling
from accel.decoders.ways.draft import Ngrams
from accel.errors import UnsupportedHere, UsageError
from accel.runtimes.base import open_session
from accel.stage import run_stage
from tests.support.small_decoder import save_byte_tokenizer, save_decoder

PROMPTS = [[5, 60, 7], [8, 90, 100, 11, 120, 13, 14]]


def _draft_near(decoder: Path, folder: Path) -> None:
    """Copies an exported decoder to ``folder`` and adds noise to its weights. A second export would take seconds."""
    shutil.copytree(decoder, folder)
    model = onnx.load(folder / "model.onnx")
    draw = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.ndim == 2:
            noise = 0.03 * draw.standard_normal(value.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value + noise, tensor.name))
    onnx.save(model, folder / "model.onnx")
    made = Artifact.open(decoder / "model.onnx")
    assert made.manifest is not None
    files = replace(made, path=folder / "model.onnx").hashes()
    replace(made.manifest, files=files).write(manifest_path(folder / "model.onnx"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Returns an exported decoder, the same with a cache that grows in place, and a draft near it."""
    base = tmp_path_factory.mktemp("decoders")
    source = save_byte_tokenizer(save_decoder(base / "llama"))
    made = accel.export(source, out=base / "dec", simplify=False)
    shutil.copytree(base / "dec", base / "fused")
    run_stage("fuse_decoder", made, FuseDecoderConfig(), out=base / "fused" / "model.onnx")
    _draft_near(base / "dec", base / "draft")
    return {name: base / name for name in ("dec", "fused", "draft")}


@pytest.mark.parametrize("form", ["dec", "fused"])
@pytest.mark.parametrize("draft", ["itself", "draft", "ngram"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 40, "seed": 3}])
def test_a_draft_changes_no_token(folders: Mapping[str, Path], form: str, draft: str, options: dict[str, Any]) -> None:
    """Fails if rejected tokens stay in the cache, a token is accepted that the decoder wouldn't choose, or the random
    numbers are others than without a draft. The second answer reaches the end of the context of 160 tokens."""
    prompts = [PROMPTS[0], [*PROMPTS[1], *range(20, 150)]]
    asked = {"max_new_tokens": 40, **options}
    wanted = accel.generate(folders[form], prompts, **asked)
    chosen = {"itself": folders[form], "draft": folders["draft"], "ngram": "ngram"}[draft]
    answers = accel.generate(folders[form], prompts, draft=chosen, **asked)
    assert answers.ids == wanted.ids
    assert answers.texts == wanted.texts
    assert answers.finishes == wanted.finishes
    drafted = answers.drafted
    assert drafted is not None
    assert 0 <= drafted.accepted <= drafted.proposed
    if draft == "itself":  # the random numbers are shared, so both choose the same tokens
        assert drafted.accepted == drafted.proposed > 20
    if draft == "draft":
        assert 0.1 < drafted.share < 1
    assert drafted.gain is not None
    assert drafted.gain > 0


@pytest.mark.slow
def test_sampling_keeps_its_distribution(tmp_path: Path) -> None:
    """Fails if the pairs of the first two tokens after a prompt have other shares than the decoder's own probabilities,
    in a chi-squared test with a significance of 0.1%. The same test tells the draft's distribution apart, so it
    would find tokens that are accepted although only the draft likes them."""
    size, count = 8, 1000
    fields: dict[str, Any] = {"vocab_size": size, "eos_token_id": None, "pad_token_id": None, "bos_token_id": 1}
    folder = save_decoder(tmp_path / "one", num_hidden_layers=1, **fields)
    made = accel.export(folder, out=tmp_path / "dec", simplify=False, decoder=True)
    _draft_near(tmp_path / "dec", tmp_path / "draft")
    draft = accel.Source(tmp_path / "draft").open()
    answers = accel.generate(made, [[3, 4]], draft=draft, sequences=count, max_new_tokens=3, temperature=1.5, seed=11)
    seen = np.zeros((size, size))
    for ids in answers.ids:
        seen[ids[0], ids[1]] += 1
    assert answers.drafted is not None
    assert 0.2 < answers.drafted.share < 1
    assert _chi_squared(seen, count * _pairs(made, size)) < _critical(size**2 - 1)
    assert _chi_squared(seen, count * _pairs(draft, size)) > _critical(size**2 - 1)


def _pairs(decoder: Artifact, size: int) -> np.ndarray:
    """Returns the probability of each pair of tokens after the prompt 3, 4 at temperature 1.5."""
    with open_session(decoder) as session:
        logits = Replay(session, size).step(np.array([[3, 4, first] for first in range(size)]))
    shares = torch.from_numpy(logits).double().div(1.5).softmax(-1).numpy()
    found: np.ndarray = shares[0, 1][:, None] * shares[:, 2]
    return found


def _chi_squared(seen: np.ndarray, expected: np.ndarray) -> float:
    return float(((seen - expected) ** 2 / expected).sum())


def _critical(freedom: int) -> float:
    """Returns the value that chi squared exceeds with a probability of 0.1% (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.0902 * np.sqrt(2 / (9 * freedom))) ** 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_ngrams_are_looked_up(text: list[int], most: int) -> None:
    """Fails if the proposal isn't what followed the longest and latest earlier match of the last tokens."""
    found = Ngrams().propose(0, text, 1, most, Sampler(Sampling(), 1))
    for size in (4, 3, 2, 1):
        starts = [at for at in range(len(text) - size) if text[at : at + size] == text[-size:]]
        if starts:
            assert found == text[starts[-1] + size :][:most]
            return
    assert found == []


def test_a_wrong_draft(folders: Mapping[str, Path], tmp_path: Path) -> None:
    """Fails if a draft with other tokens, or one that can't forget, isn't refused in one sentence."""
    small = save_decoder(tmp_path / "small", vocab_size=100)
    with pytest.raises(UsageError, match=r"\(100 and 259 ids\); give a smaller decoder with the same tokenizer"):
        accel.generate(folders["dec"], [[5]], draft=small)
    copy = shutil.copytree(folders["draft"], tmp_path / "draft")
    text = (copy / "tokenizer.json").read_text()
    assert '"a":' in text
    (copy / "tokenizer.json").write_text(
        text.replace('"a":', '"swapped":').replace('"b":', '"a":').replace('"swapped":', '"b":')
    )
    with pytest.raises(UsageError, match=r"the tokens of the draft .* aren't those of"):
        accel.generate(folders["dec"], [[5]], draft=copy)
    accel.export(folders["dec"], to="openvino", out=tmp_path / "ov")
    with pytest.raises(UnsupportedHere, match="can't forget tokens that a draft got wrong"):
        accel.generate(tmp_path / "ov", [[5]], draft="ngram")


def test_the_command(folders: Mapping[str, Path], cli: Callable[..., Any]) -> None:
    """Fails if the share or the gain isn't shown, or the answer differs from the one without a draft."""
    words = ("generate", str(folders["fused"]), "--prompt-ids", "104,105", "--max-new-tokens", "30")
    wanted = json.loads(cli(*words, "--json", "-q").stdout)
    ran = cli(*words, "--draft", str(folders["draft"]), "--json")
    body = json.loads(ran.stdout)
    assert (body["ids"], body["text"]) == (wanted["ids"], wanted["text"])
    assert body["draft"]["proposed"] >= body["draft"]["accepted"]
    assert f"of {body['draft']['proposed']} drafted tokens accepted" in ran.stderr
    assert "times as fast as token by token" in ran.stderr
