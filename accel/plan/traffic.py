"""Estimates the bytes that a rank sends over each mesh axis in a step, and the time of the step.

The module ``memory`` explains the letters in the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import offloaded, stage_params
from .spec import PRECISIONS, Layout, Machine, ModelSpec

# Bytes of a value in ZeRO++'s int8 blocks (accel.train.parallel.quantized_comm), with a float32 scale for each 256
# codes. The last block of a parameter may be shorter.
QUANTIZED = 1 + 4 / 256


def ring(size: float, ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring to gather ``size`` bytes, or to reduce and scatter them. Of n
    ranks, each sends (n - 1) / n of ``size``.

    A ring all-reduce scatters and gathers, and sends 2 (n - 1) / n of ``size`` (Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations").
    """
    return size * (ranks - 1) / ranks


def data_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over dp in a step, the sum of ``data_parallel_parts``."""
    return sum(size for size, _ in data_parallel_parts(spec, layout))


def data_parallel_parts(spec: ModelSpec, layout: Layout) -> list[tuple[float, int]]:
    """Returns the transfers of a rank over dp in a step, each as (bytes, span).

    The span counts the ranks from the first to the last receiver. If the span is at most the size of a node, the
    transfer stays inside the node.

    ZeRO 0 all-reduces Psi bytes of gradients (2 Psi). ZeRO 1 scatters the gradients and gathers the parameters once (2
    Psi). ZeRO 2 scatters after every micro-batch and never keeps full gradients ((m + 1) Psi). In each micro-batch,
    ZeRO 3 gathers for the forward and for the backward pass, and scatters once (3 m Psi). ZeRO 3 gathers parameters
    outside the blocks only once. At m = 1, the stages 0 to 3 send 2 Psi, 2 Psi, 2 Psi and 3 Psi, as in the ZeRO paper
    (section 7). Replicas then all-reduce their shards of gradients.

    In ZeRO++ (Wang et al. 2023, table 1), qwZ gathers and qgZ reduces in int8 blocks, each with a float32 scale (the
    paper reduces in int4). hpZ keeps the backward gather in its group.
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
    """Returns the bytes that a rank sends over tp in a step.

    Each layer and micro-batch takes four all-reduces of s b h, two forward and two backward (Shoeybi et al. 2019,
    "Megatron-LM", section 3). With sequence parallel each all-reduce is a gather and a scatter of the same size
    (Korthikanti et al. 2022, section 4.2.2). Recomputation repeats the forward all-reduces, except the last all-reduce
    (or scatter) of a layer. A sharded vocabulary takes two more all-reduces, at the embedding and at the logits. With
    several pipeline stages, the all-reduce of the embedding is on the first stage, and the all-reduce of the logits on
    the last stage.
    """
    if layout.tp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    halves = 8 if layout.recompute == "none" else 11 if layout.sequence_parallel else 10
    ends = (4 if layout.pp == 1 else 2) if spec.vocab else 0
    layers = -(-spec.layers // layout.pp)
    size = spec.seq * layout.micro_batch * spec.hidden * element
    return layout.accumulation * (layers * halves + ends) * ring(size, layout.tp)


def context_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over cp in a step.

    Each layer and micro-batch takes all-to-alls of the rank's query and output, s b h / c each, and of its share of key
    and value. A rank sends (c - 1) / c of each tensor. The backward pass sends as many bytes as the forward pass
    (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.2). Recomputation repeats the bytes of the forward pass. With
    Gloo the real traffic is c times as large, because Gloo uses a gather instead of an all-to-all.
    """
    if layout.cp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    own = spec.seq * layout.micro_batch * spec.hidden * element / layout.cp
    passes = 2 if layout.recompute == "none" else 3
    tensors = 2 + 2 * spec.kv_heads / spec.heads
    return layout.accumulation * spec.layers * passes * tensors * ring(own, layout.cp)


def pipeline_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that the busiest rank sends over pp in a step.

    Each micro-batch sends s b h for every stage output and for every input gradient that goes to another rank
    (Narayanan et al. 2021, section 2.2 and 4.1). Sequence parallel divides the bytes by t. Under autocast the residual
    stream is float32.

    A middle rank sends an output and an input gradient for each of its stages. A rank has one stage, or one per chunk
    in an interleaved or zero-bubble schedule. With only two ranks, each rank has one end of the pipeline. In an
    interleaved schedule with v chunks, the busier of two ranks sends 2 v - 1 times per micro-batch. In a zero-bubble
    schedule (V), the busier of two ranks sends twice per micro-batch, because the two stages at the turn of the V are
    on one rank. With two ranks of one stage each, one rank only sends outputs and the other only sends gradients.
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
    """Returns the bytes that a rank sends in a step over each of the axes ``dp``, ``tp``, ``pp`` and ``cp``."""
    return {
        "dp": data_parallel_bytes(spec, layout),
        "tp": tensor_parallel_bytes(spec, layout),
        "pp": pipeline_bytes(spec, layout),
        "cp": context_parallel_bytes(spec, layout),
    }


def host_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank copies between its host and its device in a step under CPU offload.

    A rank copies its shard of the parameters for every gather and its shard of the gradients after every reduction.
    Parameters are gathered once at ZeRO 1 and 2, and twice per micro-batch at ZeRO 3. With hpZ, the second gather of a
    micro-batch copies nothing.
    """
    if not layout.offload:
        return 0.0
    weight, gradient, *_ = PRECISIONS[layout.precision]
    shard = stage_params(spec, layout) / layout.shards
    m = layout.accumulation
    gathers = 1 if layout.zero < 3 else m if layout.hpz else 2 * m
    return shard * (weight * gathers + gradient * (1 if layout.zero == 1 else m))


def bubble(layout: Layout) -> float:
    """Returns the fraction of a step in which a pipeline stage waits.

    GPipe and 1F1B wait for (p - 1) / (m + p - 1) of a step. An interleaved schedule with v chunks waits for (p - 1) /
    (v m + p - 1) of a step (Narayanan et al. 2021, section 2.2). A zero-bubble schedule doesn't wait if m >= 2 p. For
    smaller m, a zero-bubble schedule waits a third of the time of 1F1B (ZB-H1). The waits of a zero-bubble schedule are
    estimates of Qi et al. 2023.
    """
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
    """Returns the FLOPs of a step over all ranks.

    A token takes 6 P + 12 L h s (Chowdhery et al. 2022, "PaLM", appendix B). Full recomputation repeats the forward
    pass: 8 P + 16 L h s (Narayanan et al. 2021, equation 3). A model of unknown shape takes three times its measured
    forward pass. Without a measurement, a token takes 6 P.
    """
    passes = 4 if layout.recompute == "full" else 3
    if spec.flops and not spec.is_transformer:
        return passes * spec.flops * layout.global_batch
    tokens = layout.global_batch * max(1, spec.seq)
    return passes * (2 * spec.params + 4 * spec.layers * spec.hidden * spec.seq) * tokens


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step (``step``), and its parts: computing, sending over each axis, copying to the host, and
    waiting in the bubble."""

    compute: float
    dp: float
    tp: float
    pp: float
    cp: float
    host: float
    bubble: float
    step: float


def step_time(spec: ModelSpec, layout: Layout, machine: Machine) -> StepTime:
    """Estimates the time of a step.

    A rank computes at ``machine.flops``. Tensor- and context-parallel traffic can't overlap with computing, so its time
    is added, and the bubble stretches the sum. Data-parallel traffic overlaps with computing, so only the longer of the
    two is counted. The pipeline traffic of one micro-batch is added. CPU offload adds the time of the copies to and
    from the host. CPU offload also adds one read and one write of everything that the optimizer holds on the host, at
    the speed of the copies.

    Rank numbers vary fastest over tensor- and context-parallel ranks, then over a shard group, then over replicas. A
    transfer that reaches beyond a node runs at ``machine.bandwidth``.
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
