"""Proves that the plan of context parallel together with tensor and pipeline parallel agrees with numbers that were
computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accel.errors import BadConfig
from accel.plan.memory import activations, layer_activations, model_states, stage_params
from accel.plan.search import Plan, search
from accel.plan.spec import Layout, Machine, ModelSpec
from accel.plan.traffic import ring, step_time, traffic

SPEC = ModelSpec(params=0, layers=4, hidden=64, heads=8, vocab=100, seq=1024)
# Two ranks on each axis. A step has three micro-batches of two samples.
LAYOUT = Layout(world=8, tp=2, pp=2, cp=2, zero=1, micro_batch=2, accumulation=3)
# The bytes of s b h values in bf16.
ONE = 1024 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        # Per micro-batch: cp has 2 layers x 2 passes x 4 tensors of 1/4, of which a rank sends a half. tp has 2 layers
        # x 4 all-reduces of a half, which sends 2 x 1/4 each, and 5/4 at the embedding. pp has a quarter.
        ({}, {"cp": 3 * 2, "tp": 3 * (4 + 1.25), "pp": 3 * 0.25}),
        # The embedding's all-reduce of whole sequences stays, and no gradients are gathered.
        ({"sequence_parallel": False}, {"cp": 3 * 2, "tp": 3 * (4 + 1), "pp": 3 * 0.5}),
        ({"recompute": "full"}, {"cp": 3 * 3, "tp": 3 * (4 * 11 / 8 + 1.25), "pp": 3 * 0.25}),
        ({"recompute": "full", "sequence_parallel": False}, {"cp": 3 * 3, "tp": 3 * (4 * 10 / 8 + 1), "pp": 3 * 0.5}),
        # All four layers are on each rank. The logits take two gathers more.
        ({"pp": 1, "world": 4}, {"cp": 3 * 4, "tp": 3 * (8 + 1.25 + 0.5), "pp": 0}),
        # All eight heads are on each rank.
        ({"tp": 1, "world": 4}, {"cp": 3 * 4, "tp": 0, "pp": 3 * 0.5}),
        # Two layers pass on 2 tensors of 1/4, once forth and once back, and their float32 gradients twice.
        ({"cp_method": "ring"}, {"cp": 3 * 2 * (0.5 + 0.5 + 2), "tp": 3 * (4 + 1.25), "pp": 3 * 0.25}),
        # With four ranks, 3/4 of each tensor are sent, and each tensor is half as large.
        ({"cp": 4, "world": 16}, {"cp": 3 * 2 * 2 * 4 / 8 * 3 / 4, "tp": 3 * (2 + 9 / 8), "pp": 3 * 0.125}),
    ],
)
def test_what_a_rank_sends(kind: dict[str, Any], sent: dict[str, float]) -> None:
    """Fails if the plan counts heads or layers of other ranks, or if tensor-parallel ranks or stages exchange more
    positions than those of their part of the sequence. The expected numbers are in units of s b h bf16 values."""
    found = traffic(SPEC, replace(LAYOUT, **kind))
    assert {axis: found[axis] / ONE for axis in sent} == pytest.approx(sent)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "cp", "method", "exchanged"),
    [
        (8, 2, 2, "ulysses", 8),
        (4, 2, 2, "ulysses", 4),  # two key-value heads on a rank of tp, which cp divides
        (2, 2, 2, "ulysses", 4),  # one key-value head on a rank of tp, copied for two ranks of cp
        (2, 1, 4, "ulysses", 4),
        (1, 1, 8, "ulysses", 8),
        (2, 2, 2, "ring", 8),
    ],
)
def test_few_key_value_heads_are_copied_as_far_as_needed(
    kv_heads: int, tp: int, cp: int, method: str, exchanged: int
) -> None:
    """Fails if the plan exchanges or keeps another number of key-value heads than training, which copies them until the
    ranks of Ulysses can share them, and for each query head in ring attention."""
    shape = {"tp": tp, "cp": cp, "world": tp * cp * 2, "cp_method": method}
    grouped, layout = replace(SPEC, params=0, kv_heads=kv_heads), replace(LAYOUT, **shape)  # type: ignore[arg-type]
    whole = traffic(SPEC, layout)["cp"]
    share = (2 + 2 * exchanged / 8) / 4 if method == "ulysses" else exchanged / 8
    assert traffic(grouped, layout)["cp"] == pytest.approx(whole * share)
    less = 2 * (1 - exchanged / 8) * ONE / (tp * cp)
    assert layer_activations(grouped, layout) == pytest.approx(layer_activations(SPEC, layout) - less)


def test_what_a_rank_keeps_of_a_layer() -> None:
    """Fails if the plan's activations are those of other positions, heads or stages. The list of tensors is that of
    ``layer_activations``."""
    unit, tokens = ONE / 2, 512 * 2
    norms, softmax = 16 * tokens / 2, 4 * 8 * tokens / 2
    kept = unit * (2 / 2 + 2 + (3 + 1 + 8) / 2) + norms + softmax
    assert layer_activations(SPEC, LAYOUT) == kept + unit / 2  # the attention's output twice
    assert layer_activations(SPEC, replace(LAYOUT, sequence_parallel=False)) == kept + unit / 2 + unit + norms
    # Ring attention keeps its output in float32 too.
    assert layer_activations(SPEC, replace(LAYOUT, cp_method="ring")) == kept + unit
    exact = layer_activations(SPEC, replace(LAYOUT, cp_method="ring", precision="fp32"))
    assert exact == 2 * (kept - norms - softmax) + norms + softmax
    assert layer_activations(SPEC, replace(LAYOUT, recompute="full")) == unit / 2
    assert layer_activations(SPEC, replace(LAYOUT, recompute="full"), whole=True) == layer_activations(SPEC, LAYOUT)
    # The first of two stages holds two layers for two micro-batches.
    assert activations(SPEC, LAYOUT) == 2 * 2 * layer_activations(SPEC, LAYOUT)


def test_zero_shards_over_the_ranks_of_a_sequence_too() -> None:
    """Fails if ZeRO shards over the ranks with other samples only, or counts ranks of tp or pp."""
    layout = replace(LAYOUT, world=16)
    assert (layout.dp, layout.shards, layout.global_batch) == (2, 4, 12)
    psi = stage_params(SPEC, layout)
    assert model_states(SPEC, layout) == (2 * psi, 2 * psi, 12 * psi / 4)
    assert traffic(SPEC, layout)["dp"] == 2 * ring(2 * psi, 4)
    wide = replace(layout, cp=1, micro_batch=1)
    assert model_states(SPEC, layout) == model_states(SPEC, wide)


def test_ranks_of_a_sequence_are_tensor_parallel_groups_apart() -> None:
    """Fails if the plan times the traffic of cp as inside a node although tp and cp together reach beyond it."""
    layout = replace(LAYOUT, world=16, cp=4)
    machine = Machine(node_size=8, node_bandwidth=8e9, bandwidth=1e9)
    near, far = (step_time(SPEC, layout, replace(machine, node_size=size)).cp for size in (8, 4))
    assert far == pytest.approx(8 * near)


def test_the_search_combines_the_axes() -> None:
    """Fails if the search leaves out a combination of tensor, pipeline and context parallel that fits, or lists one in
    which tp and cp together reach beyond a node or can't share the heads."""
    spec = ModelSpec(params=0, layers=4, hidden=256, heads=8, kv_heads=4, vocab=1000, seq=96)
    found = search(spec, Machine(hbm=80e9, node_size=8), world=32, global_batch=64)
    cuts = {(plan.layout.tp, plan.layout.pp, plan.layout.cp) for plan in found}
    pairs = {(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8) if tp * cp <= 8}  # tp divides the key-value heads
    assert cuts == {(tp, pp, cp) for tp, cp in pairs for pp in (1, 2, 4) if tp * pp * cp <= 32}
    near = search(spec, Machine(hbm=80e9, node_size=4), world=32, global_batch=64)
    assert {(p.layout.tp, p.layout.pp, p.layout.cp) for p in near} == {cut for cut in cuts if cut[0] * cut[2] <= 4}
    for name in ("tp", "pp", "cp"):
        kept = search(spec, Machine(hbm=80e9, node_size=8), world=32, global_batch=64, fixed={name: 2})
        assert {(p.layout.tp, p.layout.pp, p.layout.cp) for p in kept} == {
            cut for cut in cuts if cut[("tp", "pp", "cp").index(name)] == 2
        }


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"tp": 4, "cp": 4}, "2 query heads that tp 4 leaves on a rank"),
        ({"tp": 1, "cp": 16, "pp": 2}, "8 query heads evenly; use a divisor, or cp_method ring"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(kind: dict[str, int], says: str) -> None:
    """Fails if the plan accepts a layout in which the heads of a tensor-parallel rank can't be shared."""
    world = kind["tp"] * kind["cp"] * kind.get("pp", 1)
    layout = Layout(world=world, accumulation=kind.get("pp", 1), **kind)
    with pytest.raises(BadConfig, match=says):
        Plan.of(SPEC, layout, Machine())
