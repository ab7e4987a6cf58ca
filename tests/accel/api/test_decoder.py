"""Proves that decoders are exported with their KV cache, in the form that onnxruntime-genai reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import accel
from accel.artifact import Artifact
from accel.errors import AccelError, BadSource, CannotWrite, UnsupportedHere, UsageError
from tests.support.small_decoder import save_decoder, small_decoder


def test_a_folder_of_transformers_becomes_a_decoder(cli, tmp_path: Path) -> None:
    """Fails if the file lacks the cache, the folder lacks a config, or plain ONNX Runtime can't continue a text with
    the cache of the step before. Also fails if the files of both stages are proved, although the second suffices."""
    save_decoder(tmp_path / "llama")
    ran = cli("export", str(tmp_path / "llama"), "-o", str(tmp_path / "dec"))
    assert ran.code == 0, ran.stderr
    config = json.loads((tmp_path / "dec" / "genai_config.json").read_text())
    assert config["model"]["decoder"]["num_key_value_heads"] == 2
    assert config["model"]["eos_token_id"] == [2]
    assert (tmp_path / "dec" / "generation_config.json").is_file()
    exported, simplified = Artifact.open(tmp_path / "dec" / "model.onnx").history
    assert exported["gates"] == []
    assert sum(gate["gate"] == "decoder" for gate in simplified["gates"]) == 8
    session = onnxruntime.InferenceSession(tmp_path / "dec" / config["model"]["decoder"]["filename"])
    ids = np.array([[3, 14, 15, 92, 65]])
    names = [name.name for name in session.get_inputs() if name.name.startswith("past")]
    feeds = {name: np.zeros((1, 2, 0, 8), np.float32) for name in names}
    feeds |= {"input_ids": ids[:, :4], "attention_mask": np.ones((1, 4), np.int64), "position_ids": np.arange(4)[None]}
    outputs = dict(zip((one.name for one in session.get_outputs()), session.run(None, feeds), strict=True))
    feeds = {name: outputs[name.replace("past_key_values", "present")] for name in names}
    feeds |= {"input_ids": ids[:, 4:], "attention_mask": np.ones((1, 5), np.int64), "position_ids": np.array([[4]])}
    wanted = small_decoder()(input_ids=torch.from_numpy(ids)).logits[0, -1].detach()
    assert np.allclose(session.run(["logits"], feeds)[0][0, -1], wanted, atol=1e-4)


def test_verify_proves_a_decoder_against_its_source(tmp_path: Path, cli) -> None:
    """Fails if accel verify can't compare a decoder with the folder that it was made from, or leaves out the scenarios
    of a decoder. The other model's positions are off by one."""
    source = save_decoder(tmp_path / "gpt2", "gpt2", num_hidden_layers=1)
    accel.export(source, out=tmp_path / "dec", simplify=False)
    ran = cli("verify", str(source), str(tmp_path / "dec"), "--json")
    assert ran.code == 0, ran.stderr
    assert "rows of unequal lengths, padded on the left" in json.loads(ran.stdout)["cases"]
    other = small_decoder("gpt2", num_hidden_layers=1)
    with torch.no_grad():
        other.transformer.wpe.weight.copy_(other.transformer.wpe.weight.roll(1, 0))
    found = accel.verify(other, tmp_path / "dec")
    assert not found.passed
    assert "prefill" in found.verdict


# One model for each kind of position, attention and cache. Each passes every scenario of the gate, or accel.export
# raises an error.
FAMILIES = {
    "a sliding window": ("mistral", {"sliding_window": 16}),
    "layers with and without a window, soft caps": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "learned positions": ("gpt2", {}),
    "ALiBi": ("bloom", {}),
    "one head of keys and values": ("gpt_bigcode", {}),
    "normalized queries and keys": ("qwen3", {}),
    "experts": ("mixtral", {"num_local_experts": 4}),
}


@pytest.mark.proof
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_decoders(family: str, tmp_path: Path) -> None:
    """Fails if the export of the family is refused, or its manifest has no results of the decoder gate."""
    kind, fields = FAMILIES[family]
    made = accel.export(save_decoder(tmp_path / kind, kind, **fields), out=tmp_path / "out", simplify=False)
    results = [result for record in made.history for result in record["gates"] if result["gate"] == "decoder"]
    assert len(results) == 8
    assert all(result["passed"] for result in results)


def test_another_state_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    """Fails if a state-space model is exported with a cache that it doesn't have, or the advice doesn't help."""
    folder = save_decoder(tmp_path / "mamba", "mamba", state_size=4, num_hidden_layers=1)
    with pytest.raises(UnsupportedHere, match=r"another state than keys and values.*decoder=False"):
        accel.export(folder, out=tmp_path / "out")
    inputs = ["input_ids:int64[batch,3]{0..98}"]
    made = accel.export(folder, out=tmp_path / "one.onnx", decoder=False, inputs=inputs, simplify=False)
    assert made.signature.outputs[0].name == "logits"


class OwnDecoder(nn.Module):
    """A decoder that isn't of transformers: one layer, learned positions, two heads."""

    def __init__(self, positions: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.positions = nn.Embedding(30, 16), nn.Embedding(positions, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 30)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):  # type: ignore[no-untyped-def]
        x = self.table(input_ids) + self.positions(position_ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past_key_values is not None:
            ((key, value),) = past_key_values
            k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        total, new = k.shape[2], q.shape[2]
        seen = torch.arange(total) <= torch.arange(total - new, total)[:, None]
        seen = seen & attention_mask.bool()[:, None, None, :]
        scores = (q @ k.transpose(2, 3)).masked_fill(~seen, -1e9).softmax(-1)
        return self.head(x + (scores @ v).transpose(1, 2).flatten(2)), ((k, v),)


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """Fails if a module outside transformers is refused, or the context is taken from anything but a run: the table of
    positions has 40 rows. Also fails if the error for a folder doesn't name the argument that helps."""
    inputs = [f"{name}:int64[batch,sequence]{{1..1}}" for name in ("input_ids", "attention_mask", "position_ids")]
    with pytest.raises(UsageError, match="pass decoder=True for a model that generates text"):
        accel.export(OwnDecoder(), inputs=inputs, out=tmp_path / "out")
    made = accel.export(OwnDecoder(), decoder=True, out=tmp_path / "out")
    assert made.source["decoder"]["context"] == 40
    assert made.signature.dims["past"].max + made.signature.dims["sequence"].max == 40


class Forgetful(OwnDecoder):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):  # type: ignore[no-untyped-def]
        logits, ((k, v),) = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return logits, ((k, v.roll(1, 2)),)


class WithoutMask(OwnDecoder):
    def forward(self, input_ids, past_key_values=None):  # type: ignore[no-untyped-def]
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        total = start + input_ids.shape[1]
        mask = torch.ones(input_ids.shape[0], total, dtype=torch.int64)
        positions = torch.arange(start, total).expand_as(input_ids)
        return super().forward(input_ids, mask, positions, past_key_values)


def test_a_module_without_a_mask(tmp_path: Path) -> None:
    """Fails if a module without a mask and positions is refused, or unequal prompts are padded without a mask."""
    accel.export(WithoutMask(), decoder=True, out=tmp_path / "out")
    with_mask = accel.generate(OwnDecoder(), [[3, 4]], max_new_tokens=5).ids
    assert accel.generate(tmp_path / "out", [[3, 4]], max_new_tokens=5).ids == with_mask
    with pytest.raises(UsageError, match="give one prompt at a time"):
        accel.generate(tmp_path / "out", [[3, 4], [5]])


class WithoutPositions(OwnDecoder):
    def forward(self, input_ids, attention_mask, past_key_values=None):  # type: ignore[no-untyped-def]
        total = attention_mask.shape[1]
        positions = torch.arange(total - input_ids.shape[1], total).expand_as(input_ids)
        return super().forward(input_ids, attention_mask, positions, past_key_values)


class LastToken(OwnDecoder):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):  # type: ignore[no-untyped-def]
        logits, presents = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return logits[:, -1:], presents


class WithoutCache(nn.Module):
    def forward(self, input_ids):  # type: ignore[no-untyped-def]
        return input_ids


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Forgetful, "in PyTorch, .* other logits with its own cache than without, at prefill in three parts"),
        (WithoutPositions, "let it take position_ids, because padding shifts the positions"),
        (LastToken, "return the logits of every token"),
        (WithoutCache, "has no parameters input_ids and past_key_values"),
    ],
)
def test_a_wrong_module_is_refused(module: type[nn.Module], said: str, tmp_path: Path) -> None:
    """Fails if a module is exported whose own cache is wrong, although the file computes what the module does."""
    with pytest.raises(AccelError, match=said):
        accel.export(module(), decoder=True, out=tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    """Fails if the export overwrites the user's model when the output folder is the source."""
    folder = save_decoder(tmp_path / "llama")
    before = (folder / "config.json").read_bytes()
    with pytest.raises(CannotWrite, match="was not made by accel"):
        accel.export(folder, out=folder)
    assert (folder / "config.json").read_bytes() == before


def test_only_pytorch_has_decoders(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    with pytest.raises((AccelError, BadSource), match="decoder"):
        accel.export(tmp_path / "net.onnx", opset=19, out=tmp_path / "out.onnx", decoder=True)
