"""Bytes a rank sends in a step, by mesh axis, and how long the step takes."""

from __future__ import annotations

from dataclasses import dataclass

from accel.plan.memory import offloaded, stage_params
from accel.plan.spec import PRECISIONS, Layout, Machine, ModelSpec

# Bytes a value of ZeRO++'s int8 blocks (accel.train.quantized_comm): a code, and one float32 scale for 256 of them. A
# parameter's last block may be shorter.
QUANTIZED = 1 + 4 / 256


def ring(size: float, ranks: int) -> float:
    """Bytes a rank sends to gather, or to reduce and scatter, ``size`` bytes in a ring: (n - 1) / n of them.

    A ring all-reduce is both, one after the other: 2 (n - 1) / n. Patarasuk and Yuan 2009, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations".
    """
    return size * (ranks - 1) / ranks


def data_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Bytes a rank sends over dp in a step: the sum of ``data_parallel_parts``."""
    return sum(size for size, _ in data_parallel_parts(spec, layout))


def data_parallel_parts(spec: ModelSpec, layout: Layout) -> list[tuple[float, int]]:
    """What a rank sends over dp in a step: bytes, and how many ranks lie between the first and the last of those that
    they go to, both counted (a node holds so many or not).

    Psi bytes of gradients are all-reduced at ZeRO 0 (2 Psi); ZeRO 1 scatters them and gathers the parameters once
    (2 Psi); ZeRO 2 scatters after every micro-batch, so that full gradients are never kept (m + 1) Psi; ZeRO 3 gathers
    for forward and backward and scatters, each micro-batch (3 m Psi; what lies outside the blocks it gathers once).
    ZeRO section 7: 2 Psi, 2 Psi, 2 Psi, 3 Psi at m = 1. Replicas then all-reduce their shards of gradients.

    ZeRO++ (Wang et al. 2023, table 1) as ``accel train`` sends it: qwZ gathers and qgZ reduces in int8 blocks, each
    with a float32 scale (the paper reduces in int4), hpZ makes the backward gather local to its group.
    """
    weight, gradient, *_, wire = PRECISIONS[layout.precision]
    psi = stage_params(spec, layout)
    m, n = layout.accumulation, layout.shards
    near, far = n * layout.tp, n * layout.replicate * layout.tp
    if layout.zero == 0:
        return [(2 * ring(gradient * psi, n * layout.replicate), far)]
    reductions = m if layout.zero > 1 else 1
    between = (reductions * 2 * ring(gradient * psi / n, layout.replicate), far)
    if layout.zero < 3:
        return [(reductions * ring(gradient * psi, n) + ring(weight * psi, n), near), between]
    gathered = QUANTIZED if layout.qwz else wire
    again = psi - spec.outside / layout.tp
    forward = m * ring(gathered * psi, n)
    backward = m * (ring(wire * again, layout.hpz) if layout.hpz else ring(gathered * again, n))
    reduction = m * ring((QUANTIZED if layout.qgz else gradient) * psi, n)
    return [(forward, near), (backward, layout.hpz * layout.tp or near), (reduction, near), between]


def tensor_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Bytes a rank sends over tp in a step: four all-reduces of s b h a layer and micro-batch, two forward and two
    backward (Shoeybi et al. 2019, "Megatron-LM", section 3); with sequence parallel each is a gather and a scatter of
    the same size (Korthikanti et al. 2022, section 4.2.2). Recomputation runs the forward ones again, but for the one
    (the scatter) at a layer's end. What is embedded is reduced and what gives the logits gathered once more, or their
    gradients, where the vocabulary is cut: another two all-reduces, one for the first and last of several stages."""
    if layout.tp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    halves = 8 if layout.recompute == "none" else 11 if layout.sequence_parallel else 10
    ends = (4 if layout.pp == 1 else 2) if spec.vocab else 0
    layers = -(-spec.layers // layout.pp)
    size = spec.seq * layout.micro_batch * spec.hidden * element
    return layout.accumulation * (layers * halves + ends) * ring(size, layout.tp)


def context_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Bytes a rank sends over cp in a step: all-to-alls of its s b h / c of query and output and of its share of key
    and value, (c - 1) / c of each, a layer and micro-batch, as much backward (Jacobs et al. 2023, "DeepSpeed Ulysses",
    section 3.2), and forward once more with recomputation. Over gloo, which has no such all-to-all, a gather of c
    times as much takes their place.
    """
    if layout.cp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    own = spec.seq * layout.micro_batch * spec.hidden * element / layout.cp
    passes = 2 if layout.recompute == "none" else 3
    tensors = 2 + 2 * spec.kv_heads / spec.heads
    return layout.accumulation * spec.layers * passes * tensors * ring(own, layout.cp)


def pipeline_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Bytes the rank that sends most sends over pp in a step: of each micro-batch s b h for every stage of its own
    whose output goes to another rank, and as much for every one whose input's gradient does (Narayanan et al. 2021,
    section 2.2 and 4.1), cut along the sequence under sequence parallel; under autocast the residual stream is float32.

    A rank in the middle does both for each of its stages: one, of an interleaved or zero-bubble schedule as many as
    there are chunks. Of two ranks each has an end of the chain: a loop leaves one of their 2 v out, in a V the halves
    that turn stay on their rank, and of one stage each, one only sends forward and the other only back.
    """
    if layout.pp == 1:
        return 0.0
    element = 4 if layout.precision.startswith("autocast") else PRECISIONS[layout.precision][4]
    chunks = layout.chunks if layout.pipeline == "interleaved" else 2 if layout.pipeline == "zero-bubble" else 1
    sends = 2 * chunks
    if layout.pp == 2:
        sends = 2 if layout.pipeline == "zero-bubble" else sends - 1
    narrow = layout.tp if layout.sequence_parallel else 1
    return sends * layout.accumulation * spec.seq * layout.micro_batch * spec.hidden * element / narrow


def traffic(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Bytes a rank sends in a step by axis: ``dp``, ``tp``, ``pp``, ``cp``."""
    return {
        "dp": data_parallel_bytes(spec, layout),
        "tp": tensor_parallel_bytes(spec, layout),
        "pp": pipeline_bytes(spec, layout),
        "cp": context_parallel_bytes(spec, layout),
    }


def host_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Bytes a rank copies between its host and its device in a step under CPU offload: its shard of the parameters for
    every gather (one at ZeRO 1 and 2, two a micro-batch at 3), its shard of the gradients after every reduction."""
    if not layout.offload:
        return 0.0
    weight, gradient, *_ = PRECISIONS[layout.precision]
    shard = stage_params(spec, layout) / layout.shards
    m = layout.accumulation
    gathers = 1 if layout.zero < 3 else m if layout.hpz else 2 * m
    return shard * (weight * gathers + gradient * (1 if layout.zero == 1 else m))


def bubble(layout: Layout) -> float:
    """The part of a step in which a stage waits: (p - 1) / (m + p - 1) for GPipe and 1F1B, with v chunks
    (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2), none for the zero-bubble schedule as its authors
    estimate it when m >= 2 p (Qi et al. 2023), a third of 1F1B's below that (their ZB-H1)."""
    p, m = layout.pp, layout.accumulation
    if p == 1:
        return 0.0
    if layout.pipeline == "interleaved":
        return (p - 1) / (layout.chunks * m + p - 1)
    plain = (p - 1) / (m + p - 1)
    if layout.pipeline == "zero-bubble":
        return 0.0 if m >= 2 * p else plain / 3
    return plain


def flops(spec: ModelSpec, layout: Layout) -> float:
    """FLOPs of a step over all ranks: 6 P + 12 L h s a token (Chowdhery et al. 2022, "PaLM", appendix B), forward once
    more with full recomputation (8 P + 16 L h s; Narayanan et al. 2021, equation 3). A model of unknown shape: three
    times the forward pass that was measured, else 6 P a sample and position."""
    passes = 4 if layout.recompute == "full" else 3
    if spec.flops and not spec.is_transformer:
        return passes * spec.flops * layout.global_batch
    tokens = layout.global_batch * max(1, spec.seq)
    return passes * (2 * spec.params + 4 * spec.layers * spec.hidden * spec.seq) * tokens


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: what a rank computes, what it sends over each axis and copies, how long the bubble is, and the
    whole."""

    compute: float
    dp: float
    tp: float
    pp: float
    cp: float
    host: float
    bubble: float
    step: float


def step_time(spec: ModelSpec, layout: Layout, machine: Machine) -> StepTime:
    """An estimate: compute at ``machine.flops`` a rank, stretched by the bubble; tensor- and context-parallel traffic
    added to it (nothing hides it); data-parallel traffic hidden behind compute where it fits, one micro-batch of
    pipeline traffic seen. Under CPU offload, what is copied to and from the host and what the optimizer reads and
    writes there (everything that it holds, once each way) are added at the speed of the copies.

    Tensor- and context-parallel ranks are neighbours, then come the ranks of a shard group, then the replicas; what
    reaches beyond a node goes at the speed between nodes.
    """
    sent = traffic(spec, layout)
    near, far = machine.node_bandwidth, machine.bandwidth
    speed = {
        "tp": near if layout.tp <= machine.node_size else far,
        "cp": near if layout.cp <= machine.node_size else far,
        "pp": near if layout.world <= machine.node_size else far,
    }
    seconds = {axis: sent[axis] / speed[axis] for axis in speed}
    parts = data_parallel_parts(spec, layout)
    seconds["dp"] = sum(size / (near if ranks <= machine.node_size else far) for size, ranks in parts)
    idle = bubble(layout)
    compute = flops(spec, layout) / layout.world / machine.flops
    busy = (compute + seconds["tp"] + seconds["cp"]) / (1 - idle)
    held = offloaded(spec, layout)[2] if layout.offload else 0.0
    host = (host_bytes(spec, layout) + 2 * held) / machine.host_bandwidth
    step = max(busy, seconds["dp"]) + seconds["pp"] / layout.accumulation + host
    return StepTime(
        compute=compute,
        dp=seconds["dp"],
        tp=seconds["tp"],
        pp=seconds["pp"],
        cp=seconds["cp"],
        host=host,
        bubble=busy * idle,
        step=step,
    )
