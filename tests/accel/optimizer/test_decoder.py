"""Proves that ``accel optimize`` judges a decoder by its next-token distributions and times single tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import accel
from accel.decoders.decoder import Decoder
from accel.errors import BadData, BadSource, UnknownName, UsageError
from accel.kernels.native import bridges
from accel.optimizer.judge.decoder import KL, PERPLEXITY, TOP1, DecoderJudge, Sums, sums
from accel.optimizer.judge.texts import calibration_texts, judged_texts
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.runtimes.base import open_session
from accel.tables.target import TARGETS
from tests.support.small_decoder import save_byte_tokenizer, save_decoder


def test_the_measures_are_those_of_torch() -> None:
    """Fails if the divergence is taken in the wrong direction, or a token is compared with the wrong logits."""
    draw = np.random.default_rng(0)
    reference, found = (draw.standard_normal((9, 20)).astype(np.float32) for _ in range(2))
    ids = draw.integers(0, 20, 9)
    total = sums(ids, reference, found)
    p, q = (torch.from_numpy(one[:-1]).double().log_softmax(-1) for one in (reference, found))
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert total.drop(KL) == pytest.approx(float(wanted), rel=1e-9)
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(found[:-1]).double(), torch.from_numpy(ids[1:]))
    assert total.perplexity == pytest.approx(float(loss.exp()), rel=1e-9)
    assert total.drop(TOP1) == pytest.approx(float((p.argmax(-1) != q.argmax(-1)).double().mean()))
    assert sums(ids, found, found).drop(PERPLEXITY) == 0.0


def test_perplexity_alone_is_blind() -> None:
    """Shows why the divergence is the default: two candidates with the perplexity of the source, of which one has
    other distributions."""
    blind = Sums(tokens=10, divergence=5.0, candidate=20.0, source=20.0, changed=6)
    assert (blind.drop(PERPLEXITY), blind.drop(KL), blind.drop(TOP1)) == (0.0, 0.5, 0.6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a decoder that is large enough for weights of 8 and 4 bits, and its tokenizer. One layer has weights of
    all kinds, and is exported sooner than two."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, "num_hidden_layers": 1}
    return save_byte_tokenizer(save_decoder(tmp_path_factory.mktemp("decoder") / "llama", **shape))


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the exported decoder."""
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(source, out=out, simplify=False)
    return out


@pytest.mark.slow
def test_the_command(cli: Callable[..., object], folder: Path, tmp_path: Path) -> None:
    """Fails if the result lacks a file that makes it a decoder, a candidate over the limit is chosen, or the figures of
    the chosen one aren't shown."""
    (tmp_path / "held_out.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    words = ("--text", str(tmp_path / "held_out.txt"), "--max-kl", "0.02", "--contexts", "16,64")
    precisions = ("--precision", "int8", "--precision", "int4", "--target", "ort-cpu", "--rounds", "5")
    ran = cli("optimize", str(folder), "-o", str(tmp_path / "q"), *words, *precisions, "--fixed-session", "--json")
    assert ran.code == 0, ran.stderr  # type: ignore[attr-defined]
    body = json.loads(ran.stdout)  # type: ignore[attr-defined]
    judged = {row["name"]: row["judgement"]["drop"] for row in body["candidates"] if row["judgement"]}
    in_int4 = {name: drop for name, drop in judged.items() if "int4" in name}
    assert judged["ort-cpu int8 dynamic"] < min(in_int4.values())
    # Small blocks are tried only if large blocks lose too much.
    assert ("ort-cpu int4" in in_int4) == (in_int4["ort-cpu int4 in blocks of 128"] > 0.02)
    assert body["notes"] == [note for note in body["notes"] if "was left out" not in note]
    assert any("one token with 16 and 64 tokens in the cache" in note for note in body["notes"])
    assert {"genai_config.json", "tokenizer.json", "generation_config.json"} <= {
        file.name for file in (tmp_path / "q").iterdir()
    }
    assert accel.generate(tmp_path / "q", "The quick", max_new_tokens=4).texts != [None]


def test_a_decoder_judges_itself_without_a_loss(folder: Path, tmp_path: Path) -> None:
    """Fails if a model differs from itself, on a text or on texts of its own. The source computes its own texts token
    by token as it samples them, and a candidate computes them at once, so their logits differ by rounding."""
    (tmp_path / "text.txt").write_text("to be or not to be")
    artifact = accel.Source(folder).open()
    for text in (tmp_path / "text.txt", None):
        judgement = DecoderJudge(artifact, text).judge(artifact, {})
        assert judgement.drop == pytest.approx(0.0, abs=1e-9)
        assert judgement.metric == pytest.approx(judgement.reference_metric, rel=0 if text else 1e-6)
        assert "100.0% of the most likely tokens unchanged" in judgement.details


def test_calibration_reads_other_texts(folder: Path, tmp_path: Path) -> None:
    """Fails if a candidate is calibrated on the tokens that it is judged on, or if a short text is not replaced."""
    text = tmp_path / "long.txt"
    text.write_text("".join(f"{number} " for number in range(1000)))
    artifact = accel.Source(folder).open()
    with open_session(artifact) as session:
        decoder = Decoder(artifact, session)
        ids = decoder.tokenizer.encode(text.read_text())
        judged = np.concatenate([own for own, _ in judged_texts(decoder, text)])
        chosen = calibration_texts(decoder, text)
        assert judged.tolist() == ids[:2048]
        assert chosen.ravel().tolist() == ids[2048:][: chosen.size]
        text.write_text("short")
        own, others = calibration_texts(decoder, text), [ids for ids, _ in judged_texts(decoder, None)]
    assert not any(np.array_equal(one[: len(other)], other) for one in own for other in others)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"metric": "accuracy"}, UnknownName, "use one of kl, perplexity, top1"),
        ({"metric": "top1", "max_kl": 0.1}, UsageError, "is a limit of kl"),
        ({"max_kl": -1.0}, UsageError, "give nats a token"),
        ({"contexts": (0,)}, UsageError, "at least one token"),
        ({"contexts": (64, 160)}, UsageError, "takes 160 tokens.*contexts=128"),
        ({"text": "empty.txt"}, BadData, "fewer than two tokens"),
        ({"text": "bytes.txt"}, BadData, "no text in UTF-8"),
    ],
)
def test_bad_input(
    arguments: dict[str, object], error: type[Exception], said: str, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(error, match=said):
        accel.optimize(folder, out=tmp_path / "q", target="ort-cpu", precision="int8", **arguments)  # type: ignore[arg-type]


def test_options_of_decoders_are_for_decoders(tmp_path: Path) -> None:
    """Fails if an option without an effect is accepted, or a text is read without a tokenizer."""
    module = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="text= is for a decoder"):
        accel.optimize(module, example=(torch.ones(2, 4),), text=tmp_path / "x.txt", out=tmp_path / "q")
    (tmp_path / "x.txt").write_text("hello")
    bare = save_decoder(tmp_path / "bare")
    save_byte_tokenizer(tmp_path / "other")
    with pytest.raises(BadSource, match="has no tokenizer"):
        accel.optimize(bare, text=tmp_path / "x.txt", out=tmp_path / "q", target="ort-cpu")


def test_a_folder_of_transformers_brings_its_tokenizer(source: Path, tmp_path: Path) -> None:
    """Fails if the tokenizer is looked for in the cache, beside the exported file, or 4-bit weights aren't tried."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question")
    made = accel.optimize(
        source,
        text=tmp_path / "text.txt",
        out=tmp_path / "q",
        target="ort-cpu",
        max_kl=0.9,
        rounds=5,
        vary_session=False,
    )
    names = {candidate.name for candidate in made.candidates}
    assert {"ort-cpu int4 in blocks of 128", "ort-cpu int8 weights", "ort-cpu int8 dynamic"} <= names
    assert not any("--data" in note or "data=" in note for note in made.notes)
    assert accel.generate(tmp_path / "q", "to be", max_new_tokens=2).texts != [None]


@pytest.mark.slow
def test_a_decoder_that_cannot_be_fused_keeps_its_graph(tmp_path: Path) -> None:
    """Fails if another form of attention ends the run or rejects the candidate, or if no note says that the stage was
    left out."""
    source = accel.export(save_decoder(tmp_path / "bloom", "bloom", num_hidden_layers=1), out=tmp_path / "dec")
    found = accel.optimize(source, out=tmp_path / "q", target="ort-cpu", precision="fp32", rounds=5, vary_session=False)
    assert [row.reason for row in found.candidates if row.status == "rejected"] == []
    assert any("the stage fuse_decoder was left out: the attention of" in note for note in found.notes)


def test_packed_weights_need_the_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the candidates for accel's CPU kernels are missing where the kernels are built, or are tried where they
    aren't, or for a model that isn't a decoder."""
    src = accel.Source(folder).open()
    request = RecipeRequest(targets=(TARGETS["ort-cpu"],), precisions=("int8", "int4"), data=None, samples=0, threads=1)
    for library in (tmp_path / "libaccel_onnxruntime.so", None):
        monkeypatch.setattr(bridges, "find_onnxruntime_library", lambda library=library: library)
        made, _ = recipes(src, request)
        packed = [one.name for one in made if any(step.stage == "pack_weights" for step in one.stages)]
        assert packed == (["ort-cpu int8 weights packed", "ort-cpu int4 packed"] if library else [])
        alone = replace(src, signature=accel.Signature(src.signature.inputs[:1], src.signature.outputs[:1]))
        assert not any("packed" in one.name for one in recipes(alone, request)[0])
