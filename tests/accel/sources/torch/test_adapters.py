"""Proves that LoRA adapters are merged as PEFT computes them, and that other adapters are refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel
from accel.errors import AccelError, BadSource, GateFailed, InvalidModel, UnsupportedHere
from accel.sources.source import Source
from accel.sources.torch.source import module_of
from tests.support.small_decoder import Tensors, adapter_of, save_adapter, save_decoder, small_decoder

IDS = torch.tensor([[3, 14, 15, 92, 65, 35]])


def beside(model: nn.Module, tensors: Tensors, usual: float, other: Mapping[str, float] | None = None) -> torch.Tensor:
    """Runs the base model with the adapter beside each layer, without merging anything. The scaling is ``usual``, or
    that of the name in ``other``."""

    def scaling(name: str) -> float:
        return (other or {}).get(name, usual)

    def hook(name: str) -> Callable[..., torch.Tensor]:
        place = f"base_model.model.{name}"
        if f"{place}.lora_embedding_A" in tensors:
            a, b = tensors[f"{place}.lora_embedding_A"], tensors[f"{place}.lora_embedding_B"]
            return lambda _, given, out: out + scaling(name) * a[:, given[0]].movedim(0, -1) @ b.T
        a, b = tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"]
        return lambda _, given, out: out + scaling(name) * ((given[0] @ a.T) @ b.T)

    adapted = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors if ".lora_" in key}
    hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in adapted]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    for one in hooks:
        one.remove()
    return found


def merged(base: Path, adapter: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module_of(Source(base, adapters=adapter, decoder=True).open()).model(input_ids=IDS).logits
    return found


# Layers of each kind: linear, tied to the head and not, and the Conv1D of GPT-2, whose weights are turned.
@pytest.mark.parametrize(
    ("kind", "names", "fields", "usual"),
    [
        ("llama", ("q_proj", "o_proj", "down_proj", "embed_tokens"), {}, 2.0),
        ("llama", ("v_proj",), {"use_rslora": True}, 6 / 3**0.5),
        ("llama", ("q_proj", "v_proj"), {"alpha_pattern": {"1.self_attn.v_proj": 12}}, 2.0),
        ("gpt2", ("c_attn", "c_proj"), {"fan_in_fan_out": False}, 2.0),
        ("gpt2", ("wte",), {}, 2.0),
    ],
)  # fmt: skip
def test_the_merged_model_is_the_base_with_the_adapter_beside_it(
    kind: str, names: tuple[str, ...], fields: dict[str, Any], usual: float, tmp_path: Path
) -> None:
    """Fails if the scaling is another, if a product is turned, or if an adapter of the embedding also changes the head
    that shares its weights (GPT-2)."""
    base = save_decoder(tmp_path / kind, kind)
    tensors = adapter_of(small_decoder(kind), names)
    adapter = save_adapter(tmp_path / "adapter", tensors, **fields)
    other = {"model.layers.1.self_attn.v_proj": 4.0} if "alpha_pattern" in fields else {}
    wanted = beside(small_decoder(kind), tensors, usual, other)
    assert (wanted - small_decoder(kind)(input_ids=IDS).logits).norm() > 0.1 * wanted.norm()
    found = merged(base, adapter)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


def test_weights_saved_whole_replace_those_of_the_base(tmp_path: Path) -> None:
    """Fails if modules_to_save or a trained bias is left out, or if B's own bias isn't scaled."""
    base = save_decoder(tmp_path / "gpt2", "gpt2")
    model = small_decoder("gpt2")
    tensors = adapter_of(model, ("attn.c_attn",))
    place = "transformer.h.0.attn.c_attn"
    extra = {
        f"base_model.model.{place}.lora_B.bias": torch.full((96,), 0.25),
        "base_model.model.transformer.h.1.attn.c_attn.base_layer.bias": torch.full((96,), 0.5),
        "base_model.model.transformer.ln_f.weight": torch.full((32,), 0.75),
    }
    adapter = save_adapter(tmp_path / "adapter", {**tensors, **extra}, lora_bias=True, modules_to_save=["ln_f"])
    with torch.no_grad():
        model.get_submodule(place).bias.add_(2 * 0.25)
        model.get_submodule("transformer.h.1.attn.c_attn").bias.fill_(0.5)
        model.transformer.ln_f.weight.fill_(0.75)
    wanted = beside(model, tensors, 2.0)
    found = merged(base, adapter)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.slow
def test_a_decoder_with_an_adapter_through_the_commands(cli, tmp_path: Path) -> None:
    """Fails if the export leaves the adapter out, the manifest doesn't name it, verify can't open the same model again,
    or the base alone passes as the same model."""
    base = save_decoder(tmp_path / "llama", num_hidden_layers=1)
    tensors = adapter_of(small_decoder(num_hidden_layers=1), ("q_proj", "down_proj"))
    adapter = str(save_adapter(tmp_path / "adapter", tensors))
    ran = cli("export", str(base), "--adapters", adapter, "-o", str(tmp_path / "dec"), "--no-simplify")
    assert ran.code == 0, ran.stderr
    assert "is merged into 2 layers" in ran.stderr
    made = accel.Artifact.open(tmp_path / "dec" / "model.onnx")
    assert made.source["adapters"]["path"] == adapter
    assert Path(adapter, "adapter_model.safetensors") in [Path(file["path"]) for file in made.source["files"]]
    assert cli("verify", str(base), str(tmp_path / "dec"), "--adapters", adapter).code == 0
    assert cli("verify", str(base), str(tmp_path / "dec")).code != 0
    ids = accel.generate(tmp_path / "dec", [[3, 4, 5]], max_new_tokens=6).ids
    assert ids == accel.generate(base, [[3, 4, 5]], max_new_tokens=6, adapters=adapter).ids
    assert ids != accel.generate(base, [[3, 4, 5]], max_new_tokens=6).ids


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Linear(4, 2)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.conv(x).mean((2, 3)))
        return found


def test_a_model_that_is_no_decoder(tmp_path: Path) -> None:
    """Fails if only models of transformers take adapters, or a convolution is merged wrongly."""
    code = f"from {__name__} import Net as make\n"
    (tmp_path / "net.py").write_text(code)
    a, b = torch.randn(2, 3, 3, 3), torch.randn(4, 2, 1, 1)
    tensors = {"base_model.model.conv.lora_A.weight": a, "base_model.model.conv.lora_B.weight": b}
    adapter = save_adapter(tmp_path / "adapter", tensors, r=2)
    spec, inputs = f"{tmp_path / 'net.py'}:make", ["x:float32[batch,3,8,8]"]
    made = accel.export(spec, adapters=adapter, inputs=inputs, out=tmp_path / "net.onnx")
    net = Net()
    net.conv.register_forward_hook(
        lambda _, given, out: out + 3 * nn.functional.conv2d(nn.functional.conv2d(given[0], a, None, 2, 1), b)
    )
    x = torch.randn(2, 3, 8, 8)
    with accel.load(made) as session:
        (found,) = session.run({"x": x.numpy()}).values()
    assert np.allclose(found, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "is of the type IA3"),
        ({"use_dora": True}, "has use_dora"),
        ({"alora_invocation_tokens": [5]}, "has alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base model"),
        ({"r": 5}, "says rank 5; copy both files of the same training"),
        ({"lora_alpha": "x"}, "lora_alpha of .* is no number"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "too complex a pattern"),
        ({"alpha_pattern": {"(": 3}}, "invalid pattern"),
        ({"alpha_pattern": 7}, "is no table"),
    ],
)
def test_another_kind_of_adapter_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Fails if an adapter is merged that needs more than a product of two matrices, or a damaged config isn't named."""
    base = save_decoder(tmp_path / "llama")
    adapter = save_adapter(tmp_path / "adapter", adapter_of(small_decoder(), ("q_proj",)), **fields)
    with pytest.raises(AccelError, match=said):
        Source(base, adapters=adapter).open()


LAYER = "base_model.model.model.layers.7.mlp.up_proj"
NORM = "base_model.model.model.norm"
HEAD = "base_model.model.lm_head"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {f"{LAYER}.lora_A.weight": (3, 32), f"{LAYER}.lora_B.weight": (48, 3)},
            "layers.7.mlp.up_proj, which the model doesn't have; give the base model",
        ),
        ({f"{NORM}.lora_A.weight": (3, 32), f"{NORM}.lora_B.weight": (32, 3)}, "LlamaRMSNorm that accel can't merge"),
        ({f"{HEAD}.lora_A.weight": (3, 64), f"{HEAD}.lora_B.weight": (99, 3)}, r"product of the shape \[99, 64\] for"),
        ({f"{HEAD}.lora_A.weight": (3, 32)}, "has A of lm_head, not A and B"),
        ({f"{HEAD}.lora_magnitude_vector": (99,)}, "more than LoRA's A and B"),
        ({f"{HEAD}.weight": (98, 32)}, r"the shape \[98, 32\], not \[259, 32\]"),
        ({"base_model.model.score.weight": (2, 32)}, "score, which the model doesn't have"),
        ({"lm_head.weight": (99, 32)}, "doesn't begin with base_model.model."),
    ],
)
def test_an_adapter_of_another_base_is_refused(changed: dict[str, tuple[int, ...]], said: str, tmp_path: Path) -> None:
    """Fails if a tensor that doesn't fit is left out in silence, or the message names no fix."""
    base = save_decoder(tmp_path / "llama")
    tensors = adapter_of(small_decoder(), ("q_proj",)) | {name: torch.randn(size) for name, size in changed.items()}
    with pytest.raises((BadSource, InvalidModel, UnsupportedHere), match=said):
        Source(base, adapters=save_adapter(tmp_path / "adapter", tensors)).open()


def test_an_adapter_with_a_nan_is_refused(tmp_path: Path) -> None:
    """Fails if the comparison of a merged layer passes a NaN."""
    base = save_decoder(tmp_path / "llama")
    tensors = adapter_of(small_decoder(), ("q_proj",))
    next(iter(tensors.values()))[0, 0] = float("nan")
    with pytest.raises(GateFailed, match=r"self_attn.q_proj differs by nan .* are finite"):
        Source(base, adapters=save_adapter(tmp_path / "adapter", tensors)).open()


class Hostile:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_damaged_and_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pickle runs code, a missing or truncated file isn't named, or the adapter alone isn't recognised."""
    monkeypatch.chdir(tmp_path)
    base = save_decoder(tmp_path / "llama")
    adapter = save_adapter(tmp_path / "adapter", adapter_of(small_decoder(), ("q_proj",)))
    with pytest.raises(BadSource, match=r"is an adapter, not a model; give its base model, some/base, and adapters="):
        Source(adapter).open()
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidModel, match="truncated"):
        Source(base, adapters=adapter).open()
    weights.unlink()
    with pytest.raises(BadSource, match=r"has no adapter_model.safetensors"):
        Source(base, adapters=adapter).open()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"base_model.model.x": Hostile()}))
    with pytest.raises(BadSource, match="refuses to unpickle"):
        Source(base, adapters=adapter).open()
    assert not Path("touched").exists()
    with pytest.raises(BadSource, match=r"has no adapter_config.json"):
        Source(base, adapters=tmp_path / "nothing").open()
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(BadSource, match="holds a model and an adapter; move"):
        Source(base).open()
    with pytest.raises(AccelError, match="is no PyTorch model"):
        Source(base / "net.onnx", adapters=adapter).open()
