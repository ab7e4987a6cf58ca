"""Proves that ring attention works with any number of heads, sends what the plan says, and refuses what it can't do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from accel.errors import BadConfig
from accel.plan.spec import Layout, ModelSpec
from accel.plan.traffic import context_parallel_bytes
from accel.train.config.rules import problems
from accel.train.parallel import ring
from accel.train.parallel.ring import Ring, _blocks, pieces
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
@pytest.mark.parametrize("mask", ["none", "keys", "positions", "bias"])
@pytest.mark.parametrize("scores", [2**25, 8 * 3 * 2, 1])  # the scores of all queries, of two and of one
def test_attention_and_its_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, causal: bool, mask: str, scores: int
) -> None:
    """Compares output and gradients with torch's attention, with grouped queries and a scale. Fails if a part of the
    backward pass is wrong, or if a block of scores that is computed in parts gives something else. A ring of one rank
    passes its tensors to itself."""
    monkeypatch.setattr(ring, "RING_SCORES", scores)
    monkeypatch.setattr(ring, "_Passed", lambda tensor, _: type("Here", (), {"wait": lambda _: tensor})())
    around = Ring(init_device_mesh("cpu", (1,)))
    torch.manual_seed(0)
    found = []
    tensors = [torch.randn(2, heads, 6, 8) for heads in (4, 2, 2)]
    masks = {
        "none": None,
        "keys": torch.tensor([[True, False, True, True, True, False], [False] * 6])[:, None, None],
        "positions": torch.ones(6, 6, dtype=torch.bool).tril(-1),  # the first query sees no key
        "bias": torch.randn(2, 4, 6, 6),
    }
    if causal and mask != "none":
        with pytest.raises(BadConfig, match="pass one of the two"):
            around.attention(*tensors, masks[mask], is_causal=True, enable_gqa=True)
        return
    for run in (around.attention, F.scaled_dot_product_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = run(*leaves, masks[mask], is_causal=causal, scale=0.7, enable_gqa=True)
        out.sin().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    for wrong, said in (
        ({"dropout_p": 0.1}, "no dropout"),
        ({"attn_mask": torch.ones(6, 3)}, r"shape \[6, 3\], .* \[..., 6 or 1, 6\]; make the mask from"),
        ({"attn_mask": torch.ones(6, 6, requires_grad=True)}, "can't train an attention mask"),
    ):
        with pytest.raises(BadConfig, match=said):
            around.attention(*tensors, **wrong, enable_gqa=True)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="as many keys as queries"):
        around.attention(tensors[0], tensors[1][:, :, :3], tensors[2][:, :, :3])


def test_the_ring_sends_what_the_plan_says() -> None:
    """Counts the tensors that travel in a step of four ranks: keys and values three times in each pass, and their
    float32 gradients four times."""
    spec = ModelSpec(params=0, **SHAPE)
    layout = Layout(world=4, cp=4, cp_method="ring", precision="bf16", micro_batch=3)
    part = 2 * 3 * (16 // 4) * 32  # keys and values of 3 samples
    assert context_parallel_bytes(spec, layout) == 2 * (2 * 3 * part * 2 + 4 * part * 4)


@given(st.integers(1, 6), st.integers(1, 8), st.booleans(), st.integers(1, 8))
def test_all_ranks_have_the_same_work(ranks: int, part: int, causal: bool, most: int) -> None:
    """Fails if a pair of a query and a key is left out or computed twice, if a query would see a later key, or if a
    block has more queries than allowed. Also fails if a rank computes more scores than another although the length can
    be cut into pairs of pieces."""
    length = ranks * part
    counts, work = torch.zeros(length, length, dtype=torch.long), []
    for rank in range(ranks):
        before = int(counts.sum())
        for source in range(ranks):
            mine, theirs = (
                torch.cat([torch.arange(length)[piece] for piece in pieces(one, ranks, length)])
                for one in (rank, source)
            )
            for block in _blocks(rank, source, ranks, part, causal=causal, most=most):
                assert len(mine[block.queries]) <= most
                assert torch.equal(mine[block.queries], torch.arange(length)[block.rows])
                assert torch.equal(theirs[block.keys], torch.arange(length)[block.columns])
                seen = torch.ones(length, length, dtype=torch.bool)
                counts[block.rows, block.columns] += (seen.tril() if block.diagonal else seen)[
                    block.rows, block.columns
                ]
        work.append(int(counts.sum()) - before)
    assert torch.equal(
        counts.bool(),
        torch.ones(length, length).tril().bool() if causal else torch.ones(()).bool().expand(length, length),
    )
    assert int(counts.max()) == 1
    if part % 2 == 0:
        assert len(set(work)) == 1


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
