"""Proves that ring attention works with any number of heads, sends what the plan says, and refuses what it can't do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from accel.errors import BadConfig
from accel.plan.spec import Layout, ModelSpec
from accel.plan.traffic import context_parallel_bytes
from accel.train.config.rules import problems
from accel.train.parallel import ring
from accel.train.parallel.ring import Ring
from accel.train.run.launch import train
from tests.support.runs import SMALL, config_of, logged, trainer_of

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16}


def test_one_head_on_two_ranks(tmp_path: Path) -> None:
    """Fails if two ranks can't share the positions of a model with one head, which Ulysses refuses, or if the losses
    differ from those of one rank."""
    words = {"model": f"{SMALL}:one_head", "global_batch": 8, "steps": 3, "optimizer": {"name": "sgd", "lr": 0.1}}
    trainer = trainer_of(tmp_path / "alone", **words, micro_batch=8)
    batches = trainer.batches()
    alone = [trainer.one_step(batches)["loss"] for _ in range(3)]
    parallel = {"cp": 2, "cp_method": "ring"}
    train(config_of(**words, micro_batch=8, parallel=parallel), tmp_path / "both", nproc=2)
    assert logged(tmp_path / "both") == pytest.approx(alone, abs=2e-5)


@pytest.fixture
def alone() -> None:
    """Joins a process group of this process alone."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setitem(os.environ, name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradients_are_torchs(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Compares output and gradients with torch's attention, with grouped queries and a scale. Fails if a part of the
    backward pass is wrong. A ring of one rank passes its tensors to itself."""
    monkeypatch.setattr(ring, "_Passed", lambda tensor, _: type("Here", (), {"wait": lambda _: tensor})())
    around = Ring(init_device_mesh("cpu", (1,)))
    torch.manual_seed(0)
    found = []
    given = [torch.randn(2, heads, 6, 8) for heads in (4, 2, 2)]
    for run in (around.attention, F.scaled_dot_product_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = run(*leaves, is_causal=causal, scale=0.7, enable_gqa=True)
        out.sin().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadConfig, match="no attention mask and no dropout"):
        around.attention(*given, attn_mask=torch.ones(6, 6))
    with pytest.raises(BadConfig, match="as many keys as queries"):
        around.attention(given[0], given[1][:, :, :3], given[2][:, :, :3])


def test_the_ring_sends_what_the_plan_says() -> None:
    """Counts the tensors that travel in a step of four ranks: keys and values three times in each pass, and their
    float32 gradients four times."""
    spec = ModelSpec(params=0, **SHAPE)
    layout = Layout(world=4, cp=4, cp_method="ring", precision="bf16", micro_batch=3)
    part = 2 * 3 * (16 // 4) * 32  # keys and values of 3 samples
    assert context_parallel_bytes(spec, layout) == 2 * (2 * 3 * part * 2 + 4 * part * 4)


def test_the_heads_are_not_divided() -> None:
    """Fails if a ring is refused for its heads, or accepted for a length that ranks can't share."""
    words = {"shape": {**SHAPE, "heads": 2}, "micro_batch": 8}
    for method, seq, said in (
        ("ring", 16, ""),
        ("ring", 18, "divide 18 tokens"),
        ("ulysses", 16, "4 has to divide 2 q"),
    ):
        table = {"cp": 4, "cp_method": method}
        config = config_of(**{**words, "shape": {**words["shape"], "seq": seq}}, parallel=table)  # type: ignore[dict-item]
        found = "; ".join(problems(config, 4))
        assert said in found
        assert bool(said) == bool(found)
