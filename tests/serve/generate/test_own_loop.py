"""Proves that a decoder that accel exported streams the tokens of ``accel generate`` without a config."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.converters.decoder.stage import FuseDecoderConfig
from accel.errors import BadSource
from accel.runtimes.base import open_session
from accel.serve.client.grpc import InferenceClient
from accel.serve.generate.own_loop import declare_own_loop
from accel.serve.generate.token_loop import TokenLoop, TokenLoopSession, token_loop
from accel.serve.models.config import parse
from accel.serve.models.places import NamedModels
from accel.serve.process import message_limit
from accel.serve.protocol.inference import ServeError
from accel.signature import Signature, TensorSpec
from accel.signature.decoder import IDS, LOGITS, MASK, POSITIONS, Cache
from accel.stage import run_stage
from tests.support.serving import Start
from tests.support.small_decoder import small_decoder

CONTEXT = 24
PROMPTS = [[1, 17, 42], [8, 90, 11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an exported decoder with a short context and two end tokens. The answer to the first prompt
    ends early, and the answer to the second fills the context."""
    module = small_decoder(max_position_embeddings=CONTEXT, num_hidden_layers=1)
    ids = torch.tensor(PROMPTS)
    first, second = module.generate(ids, attention_mask=torch.ones_like(ids), max_length=CONTEXT, do_sample=False)[
        :, 3:
    ].tolist()
    end = next(token for token in first[2:] if token not in (*first[:2], *second))
    module.generation_config.eos_token_id = [2, end]
    out = tmp_path_factory.mktemp("exported") / "dec"
    accel.export(module, decoder=True, out=out, simplify=False)
    return out


def _streamed(client: InferenceClient, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the tokens of each row."""
    steps = [answer["token"][:, 0].tolist() for answer in client.stream("dec", {"input_ids": np.array(prompts)})]
    return [list(row) for row in zip(*steps, strict=True)]


def test_a_decoder_streams_without_a_config(folder: Path, start: Start) -> None:
    """Fails if a decoder folder is not served, or if a token of the stream is not the token of ``accel generate``.
    Also fails if the stream goes on after an end token or beyond the context, or if a long prompt ends the server."""
    process = start("", named=(f"dec={folder}",))
    wanted = [accel.generate(folder, [prompt], max_new_tokens=99).ids[0] for prompt in PROMPTS]
    assert 2 < len(wanted[0]) < len(wanted[1]) == CONTEXT - len(PROMPTS[1])
    with InferenceClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        assert [_streamed(client, [prompt])[0] for prompt in PROMPTS] == wanted
        both = _streamed(client, PROMPTS)
        assert both[1] == wanted[1], "the end of a row changes the other row"
        assert both[0][: len(wanted[0])] == wanted[0]
        assert set(both[0][len(wanted[0]) :]) == {2}
        with pytest.raises(ServeError, match=f"has {CONTEXT} tokens, but the context holds {CONTEXT} with"):
            _streamed(client, [[5] * CONTEXT])
        assert len(_streamed(client, [[5] * (CONTEXT - 1)])[0]) == 1
        with pytest.raises(ServeError, match=r"input 'input_ids' holds 259, it takes 0\.\.258"):
            _streamed(client, [[259]])
        with pytest.raises(ServeError, match=r"over gRPC with ModelStreamInfer, e\.g\. with InferenceClient\.stream"):
            client.infer_many("dec", {"input_ids": np.array([PROMPTS[0]])})
        begun = client.stream("dec", {"input_ids": np.array([PROMPTS[1]])})
        next(begun)
        begun.close()  # type: ignore[attr-defined]
        assert _streamed(client, [PROMPTS[0]])[0] == wanted[0], "a stream that the client left disturbs the next"


def test_a_fused_decoder_streams_with_its_cache_in_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the stream of a fused decoder copies its cache through ``run``, or has other tokens."""
    artifact = run_stage("fuse_decoder", accel.Source(folder).open(), FuseDecoderConfig(), out=tmp_path / "model.onnx")
    layout = Cache.of(artifact.signature)
    assert layout is not None
    states = {present: past for past, present in layout.presents.items()}
    loop = TokenLoop(
        tokens=IDS, logits=LOGITS, states=states, mask=MASK, positions=POSITIONS, ends=(), steps=8, context=CONTEXT
    )
    wanted = accel.generate(folder, [PROMPTS[1]], max_new_tokens=8).ids[0]
    with open_session(artifact) as session:
        monkeypatch.setattr(session, "run", None)
        streamed = TokenLoopSession(session, loop, session.signature).stream({IDS: np.array([PROMPTS[1]])})
        assert [int(answer["token"][0, 0]) for answer in streamed] == wanted


@pytest.mark.parametrize("http_port", [0, None])
def test_the_printed_lines_ask_for_a_stream(folder: Path, start: Start, http_port: int | None) -> None:
    """Fails if the server prints nothing for a decoder, or prints lines that don't stream its tokens."""
    lines = start("", named=(f"dec={folder}",), http_port=http_port).first_request().splitlines()
    assert lines[0] == "Ask the model dec, in Python:"
    done = subprocess.run([sys.executable, "-c", "\n".join(lines[2:])], capture_output=True, text=True, check=True)
    tokens = [int(token) for token in re.findall(r"array\(\[\[(\d+)\]\]\)", done.stdout)]
    assert tokens == accel.generate(folder, [[0] * 8], max_new_tokens=99).ids[0]


def test_a_config_makes_a_decoder_a_plain_model(folder: Path, start: Start, tmp_path: Path) -> None:
    """Fails if a config can't ask for single steps, or if a step with a cache gets a wrong answer."""
    version = tmp_path / "dec" / "1"
    version.parent.mkdir()
    version.symlink_to(folder)
    (tmp_path / "dec" / "config.pbtxt").write_text("model_transaction_policy { decoupled: false }")
    process = start(tmp_path)
    [prompt] = PROMPTS[:1]
    empty = {f"past_key_values.0.{part}": np.zeros((1, 2, 0, 8), np.float32) for part in ("key", "value")}
    with InferenceClient(f"127.0.0.1:{process.ports['grpc']}") as client:

        def step(tokens: list[int], past: int, cache: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            feeds = {
                "input_ids": np.array([tokens]),
                "attention_mask": np.ones((1, past + len(tokens)), np.int64),
                "position_ids": np.arange(past, past + len(tokens))[None],
            }
            return dict(client.infer_many("dec", {**feeds, **cache}).outputs)

        whole = step(prompt, 0, empty)["logits"][:, -1]
        begun = step(prompt[:-1], 0, empty)
        cache = {name: begun[name.replace("past_key_values", "present")] for name in empty}
        np.testing.assert_allclose(
            step(prompt[-1:], len(prompt) - 1, cache)["logits"][:, -1], whole, rtol=1e-4, atol=1e-5
        )


def test_the_cache_is_no_part_of_a_message(folder: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the server takes messages as large as the cache, which clients never send."""
    monkeypatch.setattr(message_limit, "LEAST", 0)
    monkeypatch.setattr(message_limit, "_BESIDES", 0)
    dims = Artifact.open(folder / "model.onnx").signature.dims
    limit = message_limit.message_limit(opened(NamedModels({"dec": folder / "model.onnx"})), 0)
    assert limit == dims["batch"].max * dims["sequence"].max * 8


DECODER = Signature(
    (
        TensorSpec("input_ids", "int64", ("batch", "sequence")),
        TensorSpec("attention_mask", "int64", ("batch", "past+sequence")),
        TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past", 8)),
        TensorSpec("past_key_values.0.value", "float32", ("batch", 2, "past", 8)),
    ),
    (
        TensorSpec("logits", "float32", ("batch", "sequence", 9)),
        TensorSpec("present.0.key", "float32", ("batch", 2, "past+sequence", 8)),
        TensorSpec("present.0.value", "float32", ("batch", 2, "past+sequence", 8)),
    ),
)
FACTS = {"context_length": 64, "eos_token_id": [3, 4]}


def _declared(tmp_path: Path, text: str, facts: Any = FACTS, signature: Signature = DECODER) -> Any:
    """Returns the token loop of a decoder of another tool, whose folder has ``facts`` in genai_config.json."""
    if facts is not None:
        (tmp_path / "genai_config.json").write_text(json.dumps({"model": facts}))
    config = parse(text, "config.pbtxt")
    declare_own_loop(config, Artifact(path=tmp_path / "model.onnx", kind="onnx", signature=signature))
    return token_loop(config, "dec", signature)


@pytest.mark.parametrize("text", ["", "max_batch_size: 4", "instance_group { kind: KIND_CPU }", "dynamic_batching { }"])
def test_decoders_of_other_tools_stream(tmp_path: Path, text: str) -> None:
    """Fails if a decoder with a genai_config.json, but without a manifest, doesn't stream, or loses its end tokens, its
    context or an input that it has. Also fails if the loop names an input that the model lacks."""
    loop = _declared(tmp_path, text)
    assert (loop.ends, loop.context, loop.mask, loop.positions) == ((3, 4), 64, "attention_mask", None)
    assert dict(loop.states) == {f"present.0.{part}": f"past_key_values.0.{part}" for part in ("key", "value")}


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "input_ids" data_type: TYPE_INT64 dims: [-1] }',
        "model_transaction_policy { }",
        "sequence_batching { }",
        "response_cache { enable: true }",
    ],
)
def test_a_config_that_chooses_is_kept(tmp_path: Path, text: str) -> None:
    """Fails if the server streams a decoder although its config says how the model is served."""
    assert _declared(tmp_path, text) is None


def test_what_is_no_known_decoder_is_a_plain_model(tmp_path: Path) -> None:
    """Fails if a model without a cache, or a decoder with unknown end tokens, becomes a stream."""
    assert _declared(tmp_path, "", None) is None
    assert _declared(tmp_path, "", {}) is None
    assert _declared(tmp_path, "", FACTS, Signature(DECODER.inputs[:2], DECODER.outputs)) is None
    with pytest.raises(BadSource, match="instead of token ids"):
        _declared(tmp_path, "", {"eos_token_id": "two"})
