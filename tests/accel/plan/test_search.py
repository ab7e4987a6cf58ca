"""Proves that training runs the layouts that ``accel plan`` lists, including replicas, second shards, recomputation and
offload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from accel.api.plan import config_of
from accel.cli import group, run
from accel.errors import BadConfig
from accel.examples.gpt import GPT, GPTConfig
from accel.plan.measure import SavedBytes, spec_of
from accel.plan.memory import activations, layer_activations, model_states, stage_params
from accel.plan.peak import training_memory
from accel.plan.search import Plan, search
from accel.plan.spec import Layout, Machine, ModelSpec
from accel.plan.traffic import data_parallel_bytes, host_bytes, step_time
from accel.train.config.rules import check
from accel.train.config.schema import TrainConfig
from accel.train.recompute import recompute
from accel.train.simulate import simulate

SHAPE = GPTConfig(vocab=1000, layers=6, hidden=256, heads=8, seq=128)
SEVEN = ModelSpec(params=0, layers=32, hidden=4096, heads=32, vocab=32000, seq=2048)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(2, SHAPE.seq, dtype=torch.long)
    return ids, ids


def test_everything_that_is_listed_can_be_trained() -> None:
    """Checks that the search lists every layout that training supports, and no layout that training refuses."""
    found = search(SEVEN, Machine(hbm=80e9), world=64, global_batch=512)
    kinds = {name: {getattr(plan.layout, name) for plan in found} for name in ("recompute", "replicate", "hpz")}
    assert kinds["recompute"] == {"none", "selective", "full"}
    assert {1, 2, 4, 8} <= kinds["replicate"]
    assert kinds["hpz"] == {0, 8}
    assert {plan.layout.offload for plan in found} == {False, True}
    assert not [plan for plan in found if plan.layout.qwz or plan.layout.qgz]  # lossy, so only on request
    for plan in found:
        check(config_of(plan), 64)


def test_the_host_holds_what_is_offloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the plan doesn't count offloaded states on the device, and that the written config offloads. Also
    checks that the search offloads if no other layout fits, and only then."""
    plain = Layout(world=4, zero=3)
    memory, usual = training_memory(SEVEN, replace(plain, offload=True)), training_memory(SEVEN, plain)
    assert memory.model_states == 0
    assert memory.host == usual.model_states == sum(model_states(SEVEN, plain))
    assert memory.temporary == usual.temporary
    first = training_memory(SEVEN, replace(plain, zero=1, offload=True))
    assert first.parameters == first.gradients == 2 * SEVEN.params  # the device holds weights and gradients
    second = training_memory(SEVEN, replace(plain, zero=2, offload=True))
    assert (second.parameters, second.gradients, second.host) == (2 * SEVEN.params, 0, first.host)
    shard = 2 * SEVEN.params / 4
    many = replace(plain, offload=True, accumulation=3)
    assert [host_bytes(SEVEN, replace(many, zero=z)) for z in (1, 2, 3)] == [2 * shard, 4 * shard, 9 * shard]
    assert step_time(SEVEN, many, Machine()).step > step_time(SEVEN, replace(many, offload=False), Machine()).step

    config, out = tmp_path / "config.toml", tmp_path / "chosen.toml"
    shape = "layers = 32\nhidden = 4096\nheads = 32\nvocab = 32000\nseq = 2048\n"
    config.write_text(f"global_batch = 8\nmicro_batch = 1\n[precision]\nmode = 'bf16'\n[shape]\n{shape}")
    line = ["plan", str(config), "--world", "4", "--json", "-o", str(out)]
    assert run(group, [*line, "--hbm", "16G"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {plan["layout"]["offload"] for plan in body["feasible"]} == {True}
    assert body["host_bytes_per_rank"] > 16e9
    written = TrainConfig.load(out)
    assert written.parallel.offload
    assert run(group, ["plan", str(out), "--world", "4", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["total_bytes_per_rank"] == body["total_bytes_per_rank"] < 16e9
    assert run(group, [*line, "--hbm", "300G"]) == 0
    assert not json.loads(capsys.readouterr().out)["layout"]["offload"]
    assert run(group, [*line, "--hbm", "300G", "--offload"]) == 0
    assert {plan["layout"]["offload"] for plan in json.loads(capsys.readouterr().out)["feasible"]} == {True}


def test_a_vocabulary_that_does_not_divide_is_cut() -> None:
    """Checks that the plan lists tensor-parallel layouts for a vocabulary with a size that isn't divisible by the
    number of ranks. For an embedding of 32,003 rows on two ranks, the plan must count 16,002 rows on the first rank."""
    odd = replace(SEVEN, vocab=32003, params=0)
    assert 2 in {plan.layout.tp for plan in search(odd, Machine(hbm=80e9), world=8, global_batch=64)}
    assert stage_params(odd, Layout(world=2, tp=2)) == (odd.params - 32003 * 4096) / 2 + 16002 * 4096


def test_a_group_inside_a_node_goes_at_its_speed() -> None:
    """Replicas and second shards let ranks gather weights inside a node. Fails if the plan estimates the time of a
    gather inside a node with the bandwidth between nodes."""
    machine = Machine(node_size=8, node_bandwidth=300e9, bandwidth=3e9)
    wide = Layout(world=64, zero=3)
    seconds = {
        name: step_time(SEVEN, layout, machine).dp
        for name, layout in (("all", wide), ("hpz", replace(wide, hpz=8)), ("replicas", replace(wide, replicate=8)))
    }
    psi = 2 * SEVEN.params
    assert seconds["all"] == pytest.approx(3 * psi * 63 / 64 / 3e9)
    assert seconds["hpz"] == pytest.approx(2 * psi * 63 / 64 / 3e9 + psi * 7 / 8 / 300e9)
    assert seconds["replicas"] == pytest.approx(3 * psi * 7 / 8 / 300e9 + 2 * psi / 8 * 7 / 8 / 3e9)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"zero": 3, "tp": 2, "qwz": True}, "use tp 1 and cp 1 with hpZ, qwZ and qgZ"),
        ({"offload": True}, "use ZeRO 3 with offload"),
    ],
)
def test_what_training_refuses_is_not_planned(kind: dict[str, object], says: str) -> None:
    """Fails if the plan accepts a layout that training refuses."""
    with pytest.raises(BadConfig, match=says):
        Plan.of(SEVEN, Layout(world=8, **kind), Machine())  # type: ignore[arg-type]


def test_what_full_recomputation_keeps_equals_what_autograd_saves() -> None:
    """Fails if the planned activations under full recomputation are off by more than half a percent. The expected value
    is the sum of the tensors that autograd keeps and the activations of the recomputed layer."""
    spec, layout = replace(spec_of(GPT(SHAPE)), seq=128), Layout(world=1, precision="fp32", micro_batch=2)
    found = simulate(lambda: GPT(SHAPE), _inputs, replace(layout, recompute="full"))
    planned = activations(spec, replace(layout, recompute="full"))
    assert planned is not None
    assert found.activations == pytest.approx(planned - layer_activations(spec, layout), rel=0.005)


def test_what_selective_recomputation_keeps_equals_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the planned activations under selective recomputation are off by more than half a percent. The expected
    value is the sum of two parts: the bytes that autograd keeps, and the results of matrix products and attention that
    the backward pass doesn't recompute."""
    made: list[Any] = []

    def recorded(policy: Any) -> Any:
        contexts = create_selective_checkpoint_contexts(policy)
        made.append(contexts[0])
        return contexts

    monkeypatch.setattr("accel.train.recompute.create_selective_checkpoint_contexts", recorded)
    model = GPT(SHAPE)
    recompute(model, "selective")
    ids, targets = _inputs()
    with SavedBytes(model.parameters()) as saved:
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    kept = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for context in made
        for results in context.storage.values()
        for tensor in tree_leaves([getattr(leaf, "val", leaf) for leaf in tree_leaves(results)])
        if isinstance(tensor, torch.Tensor)
    }
    assert len(made) == 6
    spec = replace(spec_of(GPT(SHAPE)), seq=128)
    planned = activations(spec, Layout(world=1, precision="fp32", micro_batch=2, recompute="selective"))
    assert saved.bytes + sum(kept.values()) == pytest.approx(planned, rel=0.005)
    del loss


@pytest.mark.proof
@pytest.mark.parametrize(("zero", "accumulation"), [(1, 3), (2, 2), (3, 1), (3, 2)])
def test_replicas_equal_the_engine(zero: int, accumulation: int) -> None:
    """Fails if the bytes that FSDP2 keeps and sends in 2 replicas of 8 shards differ from the formula by more than
    padding. FSDP2 reduces gradients to shards within a replica, then all-reduces the shards among the replicas."""
    spec = spec_of(GPT(SHAPE))
    layout = Layout(world=16, zero=zero, replicate=2, micro_batch=2, accumulation=accumulation)
    found = simulate(lambda: GPT(SHAPE), _inputs, layout)
    assert found.optimizer == pytest.approx(model_states(spec, layout)[2], rel=0.001)
    sent = data_parallel_bytes(spec, layout)
    assert sent <= found.sent * 1.0001 <= sent * 1.002
    assert found.collectives["allreduce_"] > 0


def test_of_equally_fast_layouts_the_simplest_comes_first() -> None:
    """Among layouts with the same estimated time, the plan must list the simplest layout first. Fails if the first
    layout needlessly recomputes, shards, sends more bytes or uses smaller micro-batches."""
    small = ModelSpec(params=0, layers=24, hidden=2048, heads=16, vocab=32000, seq=2048)
    first = search(small, Machine(hbm=80e9), world=8, global_batch=64)[0].layout
    assert first == Layout(world=8, micro_batch=8)  # plain data parallelism is the simplest layout
    for hbm in (40e9, 80e9, 300e9):
        found = search(SEVEN, Machine(hbm=hbm, bandwidth=300e9), world=64, global_batch=512)
        best, *others = [one for one in found if one.time.step == found[0].time.step]
        assert others
        kept = [one for one in others if one.layout.recompute == "none"] if best.layout.recompute == "none" else others
        assert best.layout.recompute == "none" or all(one.layout.recompute != "none" for one in others)
        least = min(sum(one.sent.values()) for one in (best, *kept))
        assert sum(best.sent.values()) == pytest.approx(least)
        alike = [one.layout for one in kept if sum(one.sent.values()) == pytest.approx(least)]
        assert (best.layout.pp, best.layout.tp, best.layout.cp) == (1, 1, 1)
        assert all(one.micro_batch <= best.layout.micro_batch for one in alike)
        same = [one for one in alike if one.micro_batch == best.layout.micro_batch]
        assert all(
            (one.offload, one.hpz, one.replicate, one.zero)
            > (best.layout.offload, best.layout.hpz, best.layout.replicate, best.layout.zero)
            for one in same
        )
