"""Proves that the formulas of ``accel plan`` agree with published figures and with a simulation on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accel.errors import BadConfig
from accel.examples.gpt import GPT, GPTConfig
from accel.plan.measure import spec_of
from accel.plan.memory import (
    activations,
    inference_memory,
    model_states,
    stage_params,
    temporary,
)
from accel.plan.peak import training_memory
from accel.plan.search import search
from accel.plan.spec import Layout, Machine, ModelSpec, quantity
from accel.plan.traffic import (
    bubble,
    context_parallel_bytes,
    data_parallel_bytes,
    flops,
    pipeline_bytes,
    ring,
    step_time,
    tensor_parallel_bytes,
)
from accel.train.parallel.pipeline import places
from accel.train.parallel.quantized_comm import encode
from accel.train.simulate import simulate

SHAPE = GPTConfig(vocab=1000, layers=6, hidden=256, heads=8, seq=128)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    """Fails if a ZeRO stage shards the wrong state, or if a byte count of mixed-precision Adam is wrong (figure 1 of
    ZeRO)."""
    memory = training_memory(
        ModelSpec(params=int(7.5e9)), Layout(world=64, zero=zero, precision="fp16", optimizer="adam")
    )
    assert memory.model_states / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("params", "gigabytes"), [(1.5e9, 24), (7e9, 112)])
def test_sixteen_bytes_a_parameter(params: float, gigabytes: float) -> None:
    """Checks that mixed-precision Adam on one rank takes 16 bytes per parameter: 2 for the weight, 2 for the gradient
    and 12 for the optimizer."""
    memory = training_memory(ModelSpec(params=int(params)), Layout(world=1, precision="fp16", optimizer="adam"))
    assert memory.model_states / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("weights", "gibibytes"), [("fp32", 26.2), ("fp16", 13.1), ("int8", 6.55), ("int4", 3.28)])
def test_weights_of_a_7b_model(weights: str, gibibytes: float) -> None:
    """Fails if the bytes per weight are wrong. The published figures are in GiB, for 7,000,559,616 parameters."""
    memory = inference_memory(ModelSpec(params=7_000_559_616), weights=weights, world=1)
    assert memory.parameters / 2**30 == pytest.approx(gibibytes, rel=0.02)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(2, SHAPE.seq, dtype=torch.long)
    return ids, ids


def _spec() -> ModelSpec:
    return replace(spec_of(GPT(SHAPE)), seq=128)


@pytest.mark.proof
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("world", "zero", "accumulation"),
    [(8, 0, 2), (8, 1, 1), (64, 1, 3), (8, 2, 1), (64, 2, 3), (64, 3, 1), (64, 3, 3)],
)
def test_states_and_traffic_equal_the_engine(precision: str, world: int, zero: int, accumulation: int) -> None:
    """Fails if the bytes that FSDP2 keeps and sends differ from the plan's formula by more than padding. Also fails if
    ``train.zero`` gathers or reduces more often than documented. The bytes are counted per tensor and per
    collective."""
    layout = Layout(world=world, zero=zero, precision=precision, micro_batch=2, accumulation=accumulation)
    found = simulate(lambda: GPT(SHAPE), _inputs, layout)
    spec = _spec()
    weight = 4 if precision == "fp32" else 2
    parameters, gradients, optimizer = model_states(spec, layout)
    pad = {8: 0.001, 64: 0.003}[world]  # FSDP2 pads the sharded dim to a multiple of the world size
    assert optimizer <= found.optimizer * 1.0001 <= optimizer * (1 + pad) * 1.0001
    # With one micro-batch, ZeRO 1 reduces each gradient right after computing it, and therefore keeps fewer bytes than
    # the formula gives.
    if zero != 1 or accumulation > 1:
        assert gradients <= found.gradients * 1.0001 <= gradients * (1 + pad) * 1.0001
    if zero < 3:
        assert found.parameters == parameters
    else:  # a rank holds shards of the blocks' parameters, and all of the other parameters
        root = weight * sum(p.numel() for n, p in GPT(SHAPE).named_parameters() if not n.startswith("blocks."))
        assert found.parameters <= root + parameters * (1 + pad)
    if zero:
        sent = data_parallel_bytes(spec, layout)
        assert sent <= found.sent * 1.0001 <= sent * (1 + pad) * 1.0001


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_equal_what_autograd_saves(precision: str) -> None:
    """Fails if the formula for activations is off by more than half a percent from the bytes that autograd keeps."""
    layout = Layout(world=1, precision=precision, micro_batch=2)
    found = simulate(lambda: GPT(SHAPE), _inputs, layout)
    assert found.activations == pytest.approx(activations(_spec(), layout), rel=0.005)


@pytest.mark.slow
def test_states_and_traffic_at_1024_ranks() -> None:
    """Fails if the shards or the traffic of 1,024 ranks differ from the plan's formula. All dims of the model are
    multiples of 1,024."""
    shape = GPTConfig(vocab=1024, layers=1, hidden=1024, heads=8, seq=1024)
    ids = torch.zeros(1, 1024, dtype=torch.long)
    spec = spec_of(GPT(shape))
    layout = Layout(world=1024, zero=3, precision="bf16")
    found = simulate(lambda: GPT(shape), lambda: (ids, ids), layout)
    parameters, gradients, optimizer = model_states(spec, layout)
    assert (found.gradients, found.optimizer) == (gradients, optimizer)
    # Each rank holds all of the parameters outside the blocks. The plan counts the parameters outside the blocks as
    # temporary.
    assert found.parameters == parameters + 2 * spec.outside * 1023 / 1024
    assert temporary(spec, layout) > 2 * spec.outside
    assert found.sent == pytest.approx(data_parallel_bytes(spec, layout))


@pytest.mark.nightly
def test_seven_billion_on_64_ranks_simulated() -> None:
    """Checks that the simulated model states of a 7.5 B model at ZeRO 3 take 1.9 GB per rank on 64 ranks, within 2
    %."""
    shape = GPTConfig(vocab=50304, layers=36, hidden=4096, heads=32, seq=64)
    ids = torch.zeros(1, 64, dtype=torch.long)
    found = simulate(lambda: GPT(shape), lambda: (ids, ids), Layout(world=64, zero=3, precision="bf16"))
    params = 36 * (12 * 4096**2 + 13 * 4096) + (2 * 50304 + 64 + 2) * 4096
    states = found.optimizer + found.gradients + 2 * params / 64
    assert states == pytest.approx(16 * params / 64, rel=0.001)
    assert states / 1e9 == pytest.approx(1.9, rel=0.02)


def test_traffic_of_one_micro_batch() -> None:
    """Checks that the planned traffic is 2 Psi up to ZeRO 2, and 3 Psi for ZeRO 3 (table 1 of ZeRO++). Psi is the
    traffic of gathering all weights once. Also fails if the planned traffic of ZeRO++ differs from the bytes that
    accel's int8 encoding takes, including the scales of the blocks."""
    spec = ModelSpec(params=10**9)
    psi = ring(2e9, 64)

    def sent(**kind: object) -> float:
        return data_parallel_bytes(spec, Layout(world=64, precision="bf16", **kind)) / psi  # type: ignore[arg-type]

    assert [sent(zero=z) for z in range(4)] == pytest.approx([2, 2, 2, 3])
    local = ring(2e9, 8) / psi
    wire = sum(part.nbytes for part in encode(torch.zeros(10**6), [10**6])) / 10**6 / 2  # for values of 2 bytes
    assert wire == pytest.approx(0.508, rel=0.01)
    assert sent(zero=3, qgz=True) == pytest.approx(2 + wire, rel=1e-3)
    assert sent(zero=3, qwz=True) == pytest.approx(1 + 2 * wire, rel=1e-3)
    assert sent(zero=3, qwz=True, hpz=8, qgz=True) - local == pytest.approx(2 * wire, rel=1e-3)


def test_tensor_parallel_traffic_and_bubble() -> None:
    """Fails if the plan miscounts Megatron's four all-reduces per layer. Also checks that the pipeline bubble of p
    stages and m micro-batches is (p - 1) / (m + p - 1)."""
    spec = ModelSpec(params=10**9, layers=4, hidden=64, heads=4, seq=16)
    layout = Layout(world=4, tp=4, micro_batch=2, accumulation=3)
    assert tensor_parallel_bytes(spec, layout) == 3 * 4 * 4 * 2 * (16 * 2 * 64 * 2) * 3 / 4
    piped = Layout(world=4, pp=4, accumulation=12)
    assert bubble(piped) == pytest.approx(3 / 15)
    assert bubble(Layout(world=4, pp=4, accumulation=12, pipeline="interleaved", chunks=2)) == pytest.approx(3 / 27)
    assert bubble(Layout(world=4, pp=4, accumulation=12, pipeline="zero-bubble")) == 0


def test_a_step_takes_what_is_computed_stretched_by_the_bubble() -> None:
    """Checks that the estimated time of a step is the sum of three parts. The parts are a rank's FLOPs divided by its
    sustained rate, the pipeline's idle time, and the traffic that no computation hides."""
    spec = ModelSpec(params=0, layers=8, hidden=512, heads=8, vocab=1000, seq=128)
    fast = Machine(flops=1e12, node_bandwidth=1e30, bandwidth=1e30)
    plain = Layout(world=8, micro_batch=2, accumulation=12)
    time = step_time(spec, plain, fast)
    assert time.compute == time.step == pytest.approx(flops(spec, plain) / (8 * 1e12))
    piped = replace(plain, pp=4)
    staged = step_time(spec, piped, fast)
    assert staged.compute == pytest.approx(flops(spec, piped) / (8 * 1e12))
    # The factor is (m + p - 1) / m, for m = 12 micro-batches and p = 4 stages.
    assert staged.step == pytest.approx(staged.compute * 15 / 12)
    assert staged.bubble == pytest.approx(staged.step - staged.compute)
    cut = step_time(spec, replace(piped, tp=2), replace(fast, node_bandwidth=1e9))
    assert cut.step == pytest.approx((cut.compute + cut.tp) * 15 / 12 + cut.pp / 12)
    assert cut.tp > 0 < cut.pp


@pytest.mark.parametrize(
    ("pp", "sends"),
    [
        (2, {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zero-bubble": 2}),
        (3, {"gpipe": 2, "1f1b": 2, "interleaved": 4, "zero-bubble": 4}),
        (8, {"gpipe": 2, "1f1b": 2, "interleaved": 4, "zero-bubble": 4}),
    ],
)
def test_pipeline_traffic_is_that_of_the_stages(pp: int, sends: dict[str, int]) -> None:
    """Checks that the planned traffic of a pipeline is the traffic of the busiest rank. The stages of the busiest rank
    have the most neighbors on other ranks. The stages are placed as in training."""
    spec = ModelSpec(params=10**9, layers=16, hidden=64, heads=4, seq=16)
    for pipeline, most in sends.items():
        layout = Layout(world=pp, pp=pp, pipeline=pipeline, micro_batch=2, accumulation=2 * pp)
        assert pipeline_bytes(spec, layout) == most * 2 * pp * 16 * 2 * 64 * 2
        mine = places(pp, pipeline)
        owner = {stage: rank for rank, stages in enumerate(mine) for stage in stages}
        out = [sum(owner.get(s + d, rank) != rank for s in stages for d in (1, -1)) for rank, stages in enumerate(mine)]
        assert max(out) == most


def test_context_parallel_is_data_parallel_to_zero() -> None:
    """Checks that c context-parallel ranks hold the same model states as c data-parallel ranks. Also checks that each
    rank holds 1 / c of a sequence's activations. For sequence length s, batch size b and hidden size h, a rank must
    send (c - 1) / c times 4 s b h / c values per layer and pass, as in Ulysses (Jacobs 2023, section 3.2)."""
    spec = ModelSpec(params=0, layers=4, hidden=64, heads=8, vocab=100, seq=1024)
    layout = Layout(world=8, cp=4, zero=3, micro_batch=2, accumulation=3)
    wide = Layout(world=8, zero=3, micro_batch=2, accumulation=3)
    assert (layout.dp, layout.shards, layout.global_batch) == (2, 8, 12)
    assert model_states(spec, layout) == model_states(spec, wide)
    assert data_parallel_bytes(spec, layout) == data_parallel_bytes(spec, wide)
    turned = 4 * 1024 * 2 * 64 * 2 / 4  # autograd keeps the attention's output twice
    whole, part = activations(spec, wide), activations(spec, layout)
    assert whole is not None
    assert part == pytest.approx(whole / 4 + turned)
    assert context_parallel_bytes(spec, layout) == 3 * 4 * 2 * 4 * (1024 * 2 * 64 * 2 / 4) * 3 / 4
    again = replace(layout, recompute="full")
    assert context_parallel_bytes(spec, again) == 1.5 * context_parallel_bytes(spec, layout)
    grouped = replace(spec, kv_heads=4)
    assert context_parallel_bytes(grouped, layout) == context_parallel_bytes(spec, layout) * 3 / 4


def test_replicas_shard_less_and_reduce_among_themselves() -> None:
    """Fails if the plan of hybrid sharding shards the states over all ranks, or leaves out the all-reduce between
    replicas."""
    spec = ModelSpec(params=10**9)
    hybrid = Layout(world=64, zero=3, replicate=8)
    assert model_states(spec, hybrid) == model_states(spec, Layout(world=8, zero=3))
    assert data_parallel_bytes(spec, hybrid) == 3 * ring(2e9, 8) + 2 * ring(2e9 / 8, 8)


def test_flops_equal_the_published_form() -> None:
    """Fails if the planned FLOPs with full recomputation differ by over 1% from the formula of Narayanan (2021). The
    formula is ``96 B s l h^2 (1 + s/6h + V/16lh)``."""
    layers, hidden, vocab, seq, batch = 24, 2304, 51200, 2048, 512
    spec = ModelSpec(params=12 * layers * hidden**2 + vocab * hidden, layers=layers, hidden=hidden, heads=24, seq=seq)
    layout = Layout(world=32, micro_batch=16, recompute="full")
    paper = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert layout.global_batch == batch
    # The plan counts the recomputation of the logits, and the published formula doesn't. The test therefore subtracts
    # 2 V h FLOPs per token.
    assert flops(spec, layout) - 2 * vocab * hidden * batch * seq == pytest.approx(paper, rel=0.01)


def test_pipeline_stage_is_the_fullest() -> None:
    """Fails if the planned number of parameters in the largest pipeline stage differs by over 10% from the number in
    training."""
    model, spec = GPT(SHAPE), _spec()
    layer = sum(p.numel() for p in model.blocks[0].parameters())
    first = 2 * layer + model.embed.tokens.weight.numel()
    # The spec has one table for both the embedding and the head. The model has one table for the embedding and one for
    # the head, so the formula spreads the head's table over the layers.
    assert stage_params(spec, Layout(world=3, pp=3, accumulation=3)) == pytest.approx(first, rel=0.1)


def test_search_lists_what_fits_fastest_first() -> None:
    """Checks that the list holds every layout that fits, and no other layout, and that the list is sorted by time."""
    spec = ModelSpec(params=0, layers=32, hidden=4096, heads=32, vocab=32000, seq=2048)
    machine = Machine(hbm=80e9)
    found = search(spec, machine, world=64, global_batch=512)
    times = [plan.time.step for plan in found]
    assert times == sorted(times)
    assert all(plan.memory.total <= machine.usable and plan.layout.global_batch == 512 for plan in found)
    everything = search(spec, Machine(hbm=1e15), world=64, global_batch=512)
    assert sum(plan.memory.total <= machine.usable for plan in everything) == len(found) < len(everything)
    with pytest.raises(BadConfig, match=r"the smallest layout takes .* use more ranks"):
        search(spec, Machine(hbm=2e8), world=8, global_batch=64)  # the smallest layout takes 0.37 GB


@pytest.mark.parametrize(
    ("text", "value"), [("80G", 80e9), ("80GiB", 80 * 2**30), ("7.5e9", 7.5e9), ("7.5B", 7.5e9), ("400T", 4e14)]
)
def test_quantities(text: str, value: float) -> None:
    """Fails if a unit is misread, for example a decimal unit as a binary unit."""
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "G", "80X", "-1", "nan", "1e999"])
def test_bad_quantities_are_refused(text: str) -> None:
    """Fails if a nonsensical quantity is accepted."""
    with pytest.raises(BadConfig, match=r"write e\.g\. 80G"):
        quantity(text)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"world": 6, "tp": 4}, "use a multiple of 4"),
        ({"world": 4, "zero": 5}, "use stage 0, 1, 2 or 3"),
        ({"world": 4, "precision": "fp12"}, "use one of fp32"),
        ({"world": 4, "zero": 2, "qwz": True}, "use ZeRO 3 with them"),
        ({"world": 6, "cp": 4}, "tp 1 x pp 1 x cp 4; use a multiple of 4"),
        ({"world": 12, "cp": 2, "tp": 2, "pp": 2}, "tp 2 x pp 2 x cp 2; use a multiple of 8"),
        ({"world": 8, "replicate": 3}, "divided evenly into 3 replicas"),
    ],
)
def test_impossible_layouts_are_refused(kind: dict[str, object], says: str) -> None:
    """Checks that the plan refuses an impossible layout, and that the error names the fix."""
    with pytest.raises(BadConfig, match=says):
        Layout(**kind)  # type: ignore[arg-type]
