"""Proves that the folder ``final/`` of a run has every file that an export of the trained model needs."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import accel
from accel.cli import group, run
from accel.errors import InvalidModel
from accel.signature import TensorSpec
from accel.sources.source import Source
from accel.sources.torch.source import module_of
from accel.train.checkpoints import final
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, trainer_of
from tests.support.small_decoder import save_byte_tokenizer

_OWN = """
import torch
import widths
from depths import layers


def model():
    return torch.nn.Sequential(*(torch.nn.Linear(widths.WIDTH, widths.WIDTH) for _ in range(layers)))


def data():
    generator = torch.Generator().manual_seed(0)
    return [(x, x * 2) for x in torch.randn((64, widths.WIDTH), generator=generator)]
"""


def _trained(home: Path, out: Path) -> None:
    home.mkdir()
    (home / "own.py").write_text(_OWN)
    (home / "widths.py").write_text("WIDTH = 5\n")
    (home / "depths.py").write_text("layers = 2\n")
    source = f"{home / 'own.py'}"
    tables = {"loss": "accel.train.loss:squared_error", "steps": 2}
    train(config_of(model=f"{source}:model", data=f"{source}:data", **tables), out)


_DECODER = """
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids, past_key_values=None):
        x = self.table(input_ids)
        query, key, value = (part(x)[:, None] for part in self.parts)
        if past_key_values is not None:
            key, value = (torch.cat([a, b], 2) for a, b in zip(past_key_values[0], (key, value)))
        seen = torch.ones(key.shape[2], key.shape[2]).tril()[-query.shape[2]:] > 0
        scores = (query @ key.transpose(2, 3)).masked_fill(~seen, -1e9)
        logits = self.head(x + (scores.softmax(-1) @ value)[:, 0])
        return logits if self.training else (logits, [(key, value)])


def model():
    return Decoder()


def data():
    return [(torch.arange(i, i + 4) % 11, torch.arange(i + 1, i + 5) % 11) for i in range(16)]
"""


def test_the_command_after_training_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command that ``accel train`` prints for a decoder exports a model without its KV cache."""
    source, config, out = tmp_path / "net.py", tmp_path / "run.toml", tmp_path / "run"
    source.write_text(_DECODER)
    config.write_text(config_of(model=f"{source}:model", data=f"{source}:data", steps=1).to_toml())
    assert run(group, ["train", str(config), "--out", str(out)]) == 0
    words = shlex.split(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("now: accel "))
    assert words == ["export", str(out), "--decoder", "-o", "decoder"]
    opened = Source(out, decoder=True).open()  # what the command opens
    assert "past_key_values.0.key" in [spec.name for spec in opened.signature.inputs]


_LLAMA = """
import torch
from tests.support.small_decoder import small_decoder


def model():
    return small_decoder(num_hidden_layers=1)


def data():
    rows = torch.arange(16 * 8).reshape(16, 8)
    return [{"input_ids": row, "labels": row} for row in rows]
"""


@pytest.mark.parametrize("part", ["", "final"])
def test_the_folder_of_a_trained_llama(part: str, tmp_path: Path, cli) -> None:
    """Fails if the decoder of a run folder isn't recognized, or lacks a file that the decoder of a folder of
    transformers has: the configs of transformers, the tokenizer or genai_config.json. The config of the training isn't
    one of them, although it has the same name."""
    from transformers import AutoConfig, GenerationConfig

    source, run_folder, out = tmp_path / "net.py", tmp_path / "run", tmp_path / "dec"
    source.write_text(_LLAMA)
    train(config_of(model=f"{source}:model", data=f"{source}:data", loss="", steps=1), run_folder)
    save_byte_tokenizer(run_folder / "final")
    ran = cli("export", str(run_folder / part), "-o", str(out), "--no-simplify", "--quiet")
    assert ran.code == 0, ran.stderr
    config = AutoConfig.from_pretrained(out)
    assert (config.architectures, config.num_hidden_layers) == (["LlamaForCausalLM"], 1)
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    assert json.loads((out / "genai_config.json").read_text())["model"]["eos_token_id"] == [2]
    answers = [accel.generate(folder, "The", max_new_tokens=4).texts for folder in (out, run_folder / part)]
    assert answers[0] == answers[1]
    accel.export(out, to="openvino", out=tmp_path / "dec-ov")  # the configs go with the decoder
    assert AutoConfig.from_pretrained(tmp_path / "dec-ov").architectures == ["LlamaForCausalLM"]


def test_a_run_folder_is_exported_elsewhere(tmp_path: Path) -> None:
    """Checks that ``accel export`` exports a run folder that was moved, even if the user's code of the model was
    deleted. Also checks that the exported model is the trained model."""
    home, out, moved = tmp_path / "home", tmp_path / "run", tmp_path / "elsewhere" / "run"
    _trained(home, out)
    shutil.rmtree(home)
    moved.parent.mkdir()
    out.rename(moved)
    assert run(group, ["export", str(moved), "-o", str(tmp_path / "own.onnx"), "--no-cache", "-q"]) == 0
    import onnxruntime
    from safetensors.torch import load_file

    weights = load_file(str(moved / "final" / "model-00001-of-00001.safetensors"))
    x = torch.randn(3, 5)
    expected = x
    for layer in range(2):
        expected = torch.nn.functional.linear(expected, weights[f"{layer}.weight"], weights[f"{layer}.bias"])
    session = onnxruntime.InferenceSession(str(tmp_path / "own.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-6)


def test_a_factory_that_changed_is_said_and_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the user edits the factory's file after the training, export must warn about the change, and must not use the
    edited file. Also fails if export uses an edited copy of the factory in the run folder."""
    home, out = tmp_path / "home", tmp_path / "run"
    source = home / "own.py"
    home.mkdir()
    source.write_text(SMALL.read_text())
    train(config_of(model=f"{source}:model", steps=1), out)
    expected = Source(out).open().signature
    source.write_text(SMALL.read_text().replace("layers=3", "layers=2"))
    assert Source(out).open().signature == expected
    assert run(group, ["export", str(out), "-o", str(tmp_path / "own.onnx"), "--no-cache"]) == 0
    assert f"{source} changed after the training" in " ".join(capsys.readouterr().err.split())
    (out / "final" / "own.py").write_text(source.read_text())
    with pytest.raises(InvalidModel, match="not the file that training wrote"):
        Source(out).open()


def test_samples_of_different_lengths_are_trained_to_the_end(tmp_path: Path) -> None:
    """Checks that a run on samples of different lengths, with micro-batches of one sample, writes ``final/``.
    ``final/`` must name the model's inputs."""
    source = tmp_path / "source.py"
    source.write_text(
        SMALL.read_text() + "\n\ndef uneven():\n"
        "    return [(ids[: 4 + index % 5], targets[: 4 + index % 5]) for index, (ids, targets) in enumerate(data())]\n"
    )
    trainer_of(tmp_path, steps=1, data=f"{source}:uneven", micro_batch=1).run()
    assert [spec.name for spec in Source(tmp_path).open().signature.inputs] == ["ids"]


def test_large_weights_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tensor is lost when the weights are split over several files, or if the index names the wrong file for
    a tensor."""
    monkeypatch.setattr(final, "SHARD_BYTES", 10_000)
    trainer = trainer_of(tmp_path, steps=1)
    trainer.run()
    files = sorted(path.name for path in (tmp_path / "final").glob("model-*"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 3
    trained = trainer.module.state_dict()
    read = module_of(Source(tmp_path).open()).state_dict()
    assert set(read) == set(trained)
    assert all(torch.equal(read[name], value) for name, value in trained.items())


def test_a_changed_final_folder_is_refused(tmp_path: Path) -> None:
    """Checks that accel opens an unchanged folder, and refuses a file in ``final/`` that training didn't write."""
    train(config_of(steps=1), tmp_path)
    artifact = Source(tmp_path).open()
    assert artifact.signature.inputs == (TensorSpec("ids", "int64", ("batch", 16), (0, 60)),)
    weights = tmp_path / "final" / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(InvalidModel, match="not the file that training wrote"):
        Source(tmp_path).open()


_TIED = """

class Tied(GPT):
    def __init__(self):
        super().__init__(GPTConfig(vocab=VOCABULARY, layers=2, hidden=32, heads=4, seq=LENGTH))
        self.head.weight = self.embed.tokens.weight
"""


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 3)])
def test_the_master_weights_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, zero: int
) -> None:
    """Fails if ``final/`` or a checkpoint gives weights rounded to bfloat16, although the run kept float32 master
    weights. Also fails if only one name of a tied weight gets the master weights, or if ``--weights-dtype`` gives other
    weights than the training computed with."""
    source, out = tmp_path / "source.py", tmp_path / "run"
    source.write_text(SMALL.read_text() + _TIED)
    tables = {"precision": {"mode": "bf16"}, "optimizer": {"lr": 1e-2}, "parallel": {"zero": zero}, "steps": 3}
    config = config_of(model=f"{source}:Tied", **tables)
    train(config, out, nproc=ranks)
    trained = trainer_of(out, model=f"{source}:Tied", **tables)
    trained.resume()
    masters = dict(zip(trained.optimizer.names, trained.optimizer.master or (), strict=True))
    masters["head.weight"] = masters["embed.tokens.weight"]
    rounded = dict(trained.module.state_dict())
    assert masters.keys() == rounded.keys()
    assert all(not torch.equal(masters[name], rounded[name].float()) for name in masters if "weight" in name)
    inputs = ["ids:int64[batch,16]{0..60}"]
    for spec, more in ((str(out), {}), (f"{source}:Tied", {"weights": out / "checkpoints" / "step-00000003"})):
        for dtype, expected in (("", masters), ("bfloat16", {n: v.float() for n, v in rounded.items()})):
            artifact = Source(spec, inputs=inputs, weights_dtype=dtype, **more).open()  # type: ignore[arg-type]
            found = module_of(artifact).state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (spec, dtype)
    line = ["export", f"{source}:Tied", "--input", inputs[0], "-o", str(tmp_path / "x.onnx"), "--weights-dtype"]
    assert run(group, [*line, "bfloat16"]) == 2
    assert "has no weights that --weights-dtype could round; pass --weights, or leave out" in capsys.readouterr().err
    assert run(group, [*line, "bf", "--weights", str(out)]) == 2
    assert "--weights-dtype bf is no dtype of weights; use float32, bfloat16, float16" in capsys.readouterr().err
