"""Proves that the plan predicts how many bytes ranks hold, send, and keep for the backward pass."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.api.plan import layout_of_config, spec_of_config
from accel.plan.measure import spec_of
from accel.plan.memory import activations, kept_activations, layer_activations, model_states
from accel.plan.spec import Layout, ModelSpec
from accel.plan.traffic import data_parallel_bytes, pipeline_bytes, ring, traffic
from accel.sources.python_object import load_object
from tests.accel.train.parallel import launches, rank_bytes, suite

# The time limit is long, because the first test that needs results waits for all launches. No test is marked as slow:
# slow files run first, and this file would wait for the launches of ``test_distributed.py``.
pytestmark = pytest.mark.timeout(5400)


@pytest.mark.parametrize("name", launches.marked_one(rank_bytes.HELD, rank_bytes.FAST_HELD))
def test_bytes_a_rank_equal_the_formula(results: dict[int, dict[str, Any]], name: str) -> None:
    """Fails if the bytes that four ranks hold between steps or during a micro-batch differ from the formula. For bf16
    without sharding, the formula is 2 + 2 + 12 bytes per parameter. The vocabulary of 61 is padded to 64, so the bytes
    may exceed the formula by this padding. Also checks that the bytes sent by the collectives of a step are the planned
    bytes. The collectives of the loss and the gradient norm don't count. The bytes include the second shards of hpZ and
    the int8 values of qwZ and qgZ."""
    spec = spec_of(suite.start([], Path("none")).module)
    layout = layout_of_config(suite.config(rank_bytes.HELD[name]), 4)
    assert (layout.accumulation, layout.hpz > 0, layout.qwz, layout.qgz) == (
        2, "hpZ" in name, "qwZ" in name, "qgZ" in name,
    )  # fmt: skip
    weights, gradients, optimizer = model_states(spec, layout)
    width, master = (2, 12) if "bf16" in name else (4, 8)
    shard = width * spec.params / 4
    passing = weights
    if layout.zero == 3:  # each rank holds hpZ's second shards and all of the parameters outside the blocks
        passing = weights - (shard if layout.hpz else 0)
        passing += (width if layout.hpz else width - width / 4) * spec.outside
    kept = [rank["bytes"][name] for rank in results[4]["ranks"]]
    for what, formula, bytes_ in (
        # With ZeRO 1, 2 or 3, a rank holds only shards of the parameters between steps.
        ("parameters", weights if layout.zero == 0 else shard, width),
        ("optimizer", optimizer, master),
        ("parameters in a step", shard if layout.zero == 3 else weights, width),
        ("parameters between the passes", passing, width),
        ("gradients", gradients, width),
    ):
        total, padded = sum(rank[what] for rank in kept) / 4, max(rank[what] for rank in kept)
        assert total == pytest.approx(formula, rel=0.005), what
        assert padded <= formula + 2 * 32 * bytes_ + 64, what
    planned = data_parallel_bytes(spec, layout)
    # The last quantization block of each parameter may be shorter than the other blocks. The limit therefore includes
    # one more scale per parameter, which each collective sends to the three other ranks.
    scales = 4 * len(list(suite.start([], Path("none")).module.parameters())) * 3
    least = 2 * scales * ((1 if layout.hpz else 2) * layout.qwz + layout.qgz)
    for rank in kept:
        assert planned <= rank["sent"] <= planned * 1.01 + least


@pytest.mark.parametrize(
    ("world", "name"), launches.marked(launches.named(rank_bytes.STAGES), launches.named(rank_bytes.FAST_STAGES))
)
def test_stages_send_what_the_plan_says(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    """Checks that the planned traffic of a pipeline equals the bytes that the busiest rank sends to other stages in
    both passes. The cases include two and four ranks, sequence parallel, and 16-bit precision."""
    made = suite.config(rank_bytes.STAGES[world][name])
    spec = ModelSpec(params=0, layers=7, hidden=32, heads=4, vocab=61, seq=16)
    sent = [rank["pipeline"][name] for rank in results[world]["ranks"]]
    assert max(sent) == pipeline_bytes(spec, layout_of_config(made, world)) > 0


@pytest.mark.parametrize(
    ("world", "name"), launches.marked(launches.named(rank_bytes.SHARED), launches.named(rank_bytes.FAST_SHARED))
)
def test_context_parallel_keeps_and_sends_what_the_plan_says(
    results: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    """Fails if the planned activations of a context-parallel rank, with or without tensor and pipeline parallel, differ
    by more than half a percent from the bytes that autograd keeps for the micro-batches of a step. The first of two
    stages has two of the three layers. Also fails if the bytes sent over an axis differ from the plan. The plan leaves
    out the losses, and the gradients of norms and biases that tensor parallel doesn't cut."""
    layout = layout_of_config(suite.config([*rank_bytes.SHARED[world][name], "micro_batch=2"]), world)
    kv_heads = 2 if "few" in name else 4
    spec = ModelSpec(params=0, layers=3, hidden=32, heads=4, kv_heads=kv_heads, vocab=61, seq=16)
    ranks = [rank["context parallel"][name] for rank in results[world]["ranks"]]
    seen = {what: max(rank[what] for rank in ranks) for what in ranks[0]}
    # Every rank embeds whole sequences. The plan counts only the token ids of a rank's part, and no position numbers.
    ids = 8 * spec.seq * layout.micro_batch
    first, last = kept_activations(spec, layout) or (0.0, 0.0)
    if layout.pp == 1:
        kept = layout.accumulation * (last + 8 * spec.seq + ids * (1 - 1 / layout.cp))
        assert seen["kept"] == pytest.approx(kept, rel=0.005)
    else:
        kept = first + layout.accumulation * (8 * spec.seq + ids)
        assert ranks[0]["kept"] == pytest.approx(kept, rel=0.005)
    planned = traffic(spec, layout)
    if not layout.ring:
        planned["cp"] *= layout.cp  # gloo gathers instead of an all-to-all
    module = load_object(suite.config(rank_bytes.SHARED[world][name]).model, "factory")[1]()
    planned["dp"] = data_parallel_bytes(spec_of(module), layout)
    if layout.tp * layout.pp == 1:  # the same process group serves both axes
        assert seen["cp"] == pytest.approx(planned["cp"] + planned["dp"], rel=0.001)
        return
    assert seen["cp"] == planned["cp"]
    assert seen["dp"] == pytest.approx(planned["dp"], rel=0.03)
    if layout.tp > 1:
        assert planned["tp"] <= seen["tp"] <= planned["tp"] * (1.035 if layout.sequence_parallel else 1.01)
    if layout.pp > 1:
        assert planned["pp"] <= seen["pp"] <= planned["pp"] + 64


@pytest.mark.parametrize("name", launches.marked_one(rank_bytes.EXPERTS, ["ZeRO 3"]))
def test_experts_take_what_the_plan_says(results: dict[int, dict[str, Any]], name: str) -> None:
    """Fails if the planned optimizer states or bytes of experts on tensor-parallel ranks differ from those of four
    ranks. The plan divides all parameters but experts by tp, although a rank has whole positions, norms, routers and
    biases of rows. It leaves out their gradients over tp, and the numbers of tokens."""
    made = suite.config(rank_bytes.EXPERTS[name])
    spec, layout = spec_of_config(made), layout_of_config(made, 4)
    planned = traffic(spec, layout)
    ranks = [rank["experts"][name] for rank in results[4]["ranks"]]
    whole = re.compile(r"positions|norm|gate\.|out\.bias")
    named = [*load_object(made.model, "factory")[1]().named_parameters()]
    uncut = sum(p.numel() for name, p in named if whole.search(name))
    states = sum(rank["optimizer"] for rank in ranks) / 4
    assert states == pytest.approx(model_states(spec, layout)[2] + 4 * uncut / 2 / 2, rel=0.005)
    # FSDP2 also reduces and gathers the other half of the uncut parameters, and pads shards.
    inside = sum(p.numel() for name, p in named if whole.search(name) and name.startswith("blocks"))
    more = 2 * ring(4 * uncut / 2, 2) + (ring(4 * inside / 2, 2) if layout.zero == 3 else 0.0)
    # A rank sends more than another if its tokens choose the experts of other ranks more often.
    assert sum(rank["ep"] for rank in ranks) / 4 == pytest.approx(planned["ep"], rel=0.01)
    for rank in ranks:
        assert rank["dp"] + rank["same"] == pytest.approx(planned["dp"] + more, rel=0.01)
        assert planned["tp"] <= rank["tp"] <= planned["tp"] + 2 * ring(4 * uncut, 2)


@pytest.mark.parametrize("again", ["none", "full"])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_keeps_what_the_plan_says(
    results: dict[int, dict[str, Any]], world: int, sequence: bool, again: str
) -> None:
    """Fails if the planned activations of a tensor-parallel rank differ by more than half a percent from the bytes that
    autograd keeps on two or four ranks. Column-parallel layers keep their whole gathered inputs."""
    spec = ModelSpec(params=0, layers=3, hidden=32, heads=4, vocab=61, seq=16)
    layout = Layout(world=world, tp=world, precision="fp32", micro_batch=2, sequence_parallel=sequence, recompute=again)
    planned = activations(spec, layout)
    assert planned is not None
    # With recomputation, the plan also counts one recomputed layer, which only the backward pass holds.
    if again == "full":
        planned -= layer_activations(spec, replace(layout, recompute="none"))
    places = 8 * spec.seq  # the plan doesn't count the bytes for GPT's position embeddings
    assert results[world]["tensor parallel"][f"{again} {sequence}"] == pytest.approx(planned + places, rel=0.005)
