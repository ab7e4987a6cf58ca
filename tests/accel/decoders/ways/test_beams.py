"""Proves that a beam search finds the answers of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.stage import run_stage
from tests.support.small_decoder import save_decoder, small_decoder

PROMPTS = [[5, 60, 7], [8, 90, 100, 11, 120, 13, 14]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Returns an exported decoder, the same with a cache that grows in place, and the same for OpenVINO."""
    base = tmp_path_factory.mktemp("decoders")
    made = accel.export(save_decoder(base / "llama"), out=base / "dec", simplify=False)
    shutil.copytree(base / "dec", base / "fused")
    run_stage("fuse_decoder", made, FuseDecoderConfig(), out=base / "fused" / "model.onnx")
    accel.export(base / "dec", to="openvino", out=base / "ov")
    return {name: base / name for name in ("dec", "fused", "ov")}


def _of_transformers(module: Any, prompt: list[int], count: int, beams: int, sequences: int) -> list[list[int]]:
    ids = torch.tensor([prompt])
    made = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=beams,
        num_return_sequences=sequences, repetition_penalty=1.2,
    )  # fmt: skip
    ends = module.generation_config.eos_token_id
    found = []
    for row in made[:, len(prompt) :].tolist():
        end = next(
            (at + 1 for at, token in enumerate(row) if token in (ends if isinstance(ends, list) else [ends])), None
        )
        found.append(row[:end])
    return found


@pytest.mark.parametrize("form", ["dec", "fused", "ov"])
def test_beams_find_the_answers_of_transformers(folders: Mapping[str, Path], form: str) -> None:
    """Fails if a beam continues the cache of another, scores are normalized by another length, or a penalty is applied
    to logits instead of probabilities."""
    module = small_decoder()
    wanted = [one for prompt in PROMPTS for one in _of_transformers(module, prompt, 16, 4, 3)]
    answers = accel.generate(folders[form], PROMPTS, beams=4, sequences=3, max_new_tokens=16, repetition_penalty=1.2)
    assert answers.ids == wanted
    assert len({tuple(ids) for ids in answers.ids[:3]}) == 3


@pytest.mark.parametrize("beams", [2, 5])
def test_beams_that_end(beams: int) -> None:
    """Fails if finished answers compete with running ones in another way, or a search ends at another time. Every
    fourth token ends a text, so all answers end early."""
    module = small_decoder()
    module.generation_config.eos_token_id = list(range(2, 259, 16))
    wanted = [one for prompt in PROMPTS for one in _of_transformers(module, prompt, 12, beams, beams)]
    answers = accel.generate(module, PROMPTS, beams=beams, sequences=beams, max_new_tokens=12, repetition_penalty=1.2)
    assert answers.ids == wanted
    assert "end" in answers.finishes


def test_the_command(folders: Mapping[str, Path], cli: Callable[..., Any]) -> None:
    """Fails if the command's answers differ from the Python function's."""
    wanted = accel.generate(folders["dec"], [[104, 105]], beams=3, sequences=2, max_new_tokens=6).ids
    words = ("--beams", "3", "--sequences", "2", "--max-new-tokens", "6", "--json", "-q")
    body = json.loads(cli("generate", str(folders["dec"]), "--prompt-ids", "104,105", *words).stdout)
    assert [answer["ids"] for answer in body["answers"]] == wanted
