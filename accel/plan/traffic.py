"""Estimates the bytes that a rank sends over each mesh axis in a step, and the time of the step.

The module ``memory`` explains the letters in the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .memory import attention_kv_heads, model_states, offloaded, rank_params, stage_params
from .spec import PRECISIONS, Layout, Machine, ModelSpec

# The number of bytes per value when ZeRO++ sends values in int8 blocks (accel.train.parallel.quantized_comm). Each
# block of 256 values has a float32 scale. The last block of a parameter may be shorter.
QUANTIZED = 1 + 4 / 256


def ring(size: float, ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring all-gather or a ring reduce-scatter of ``size`` bytes. Each of n
    ranks sends (n - 1) / n of ``size``.

    A ring all-reduce is a reduce-scatter and an all-gather, so a rank sends 2 (n - 1) / n of ``size`` (Patarasuk and
    Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
    """
    return size * (ranks - 1) / ranks


def data_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over the axis dp in a step, which is the sum of ``data_parallel_parts``."""
    return sum(size for size, _ in data_parallel_parts(spec, layout))


def data_parallel_parts(spec: ModelSpec, layout: Layout) -> list[tuple[float, int]]:
    """Returns the transfers of a rank over the axis dp in a step, each as (bytes, span).

    The span of a transfer is the number of ranks from the first to the last receiver. If the span is at most the size
    of a node, the transfer stays inside the node.

    ZeRO 0 all-reduces the gradients, which sends 2 Psi bytes. ZeRO 1 reduce-scatters the gradients and gathers the
    parameters once, which sends 2 Psi bytes. ZeRO 2 reduce-scatters the gradients after every micro-batch and gathers
    the parameters once, which sends (m + 1) Psi bytes. In each micro-batch, ZeRO 3 gathers the parameters twice and
    reduce-scatters the gradients once, which sends 3 m Psi bytes per step. ZeRO 3 gathers parameters outside the blocks
    only once per micro-batch. With one micro-batch, the ZeRO stages 0 to 3 send 2 Psi, 2 Psi, 2 Psi and 3 Psi bytes, as
    in the ZeRO paper (section 7). In hybrid sharding, the replicas also all-reduce their shards of the gradients.

    In ZeRO++ (Wang et al. 2023, table 1), qwZ gathers parameters and qgZ reduces gradients in int8 blocks. Each int8
    block has a float32 scale. The ZeRO++ paper reduces gradients in int4 instead of int8. With hpZ, the gather for the
    backward pass stays in a group of ``hpz`` ranks.
    """
    outside, parts = spec.outside / layout.tp, []
    for psi, ranks in rank_params(spec, layout):
        parts += _parts(layout, psi, ranks, outside)
        outside = 0.0  # the parameters of experts, which come last, are all inside blocks
    return parts


def _parts(layout: Layout, psi: float, n: int, outside: float) -> list[tuple[float, int]]:
    """Returns the transfers for ``psi`` parameters, which ZeRO shards over ``n`` ranks. ``outside`` of them are outside
    the blocks."""
    weight, gradient, *_, wire = PRECISIONS[layout.precision]
    m = layout.accumulation
    near, far = n * layout.tp, n * layout.replicate * layout.tp
    if layout.zero == 0:
        return [(2 * ring(gradient * psi, n * layout.replicate), far)]
    reductions = m if layout.zero > 1 else 1
    between = (reductions * 2 * ring(gradient * psi / n, layout.replicate), far)
    if layout.zero < 3:
        return [(reductions * ring(gradient * psi, n) + ring(weight * psi, n), near), between]
    gathered = QUANTIZED if layout.qwz else wire
    again = psi - outside
    forward = m * ring(gathered * psi, n)
    backward = m * (ring(wire * again, layout.hpz) if layout.hpz else ring(gathered * again, n))
    reduction = m * ring((QUANTIZED if layout.qgz else gradient) * psi, n)
    return [(forward, near), (backward, layout.hpz * layout.tp or near), (reduction, near), between]


def tensor_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over the axis tp in a step.

    Each layer and micro-batch takes four all-reduces of s b h elements, two in the forward pass and two in the backward
    pass (Shoeybi et al. 2019, "Megatron-LM", section 3). With sequence parallel, each all-reduce is replaced by a
    gather and a reduce-scatter of the same size (Korthikanti et al. 2022, section 4.2.2). Recomputation repeats the
    forward all-reduces, except the last all-reduce (or scatter) of a layer. A sharded vocabulary takes two more
    all-reduces, at the embedding and at the logits. With several pipeline stages, the all-reduce of the embedding is on
    the first stage, and the all-reduce of the logits is on the last stage.

    Under context parallel, s is the length of a rank's share of the sequence. Only the embedding's all-reduce carries
    whole sequences, because they are cut after it. With sequence parallel, the backward pass then gathers the gradients
    of the share.
    """
    if layout.tp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    halves: float = 8 if layout.recompute == "none" else 11 if layout.sequence_parallel else 10
    if spec.mixtures:  # experts have no all-reduce, and recomputation repeats that of the attention before them
        attention = 4 if layout.recompute == "none" else 6
        halves -= (halves - attention) * spec.mixtures / spec.layers
    first = 2 if layout.cp == 1 else 2 * layout.cp + layout.sequence_parallel
    ends = (first + (2 if layout.pp == 1 else 0)) if spec.vocab else 0
    layers = -(-spec.layers // layout.pp)
    size = spec.seq / layout.cp * layout.micro_batch * spec.hidden * element
    return layout.accumulation * (layers * halves + ends) * ring(size, layout.tp)


def context_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over the axis cp in a step.

    In each layer of a rank and each micro-batch, a rank runs an all-to-all of its queries, keys, values and outputs.
    Queries and outputs have s b h / (c t) elements each, where c is the context-parallel size and t the tensor-parallel
    size. Keys and values have fewer elements under grouped-query attention (``attention_kv_heads``). A rank sends (c -
    1) / c of each tensor. The backward pass sends as many bytes as the forward pass (Jacobs et al. 2023, "DeepSpeed
    Ulysses", section 3.2). Recomputation repeats the bytes of the forward pass. In ring attention, a rank passes on its
    keys and values c - 1 times in each pass, and their gradients c times (Liu et al. 2023, "Ring Attention", section
    3). With Gloo, the real traffic of the all-to-alls is c times as large, because Gloo uses a gather instead of an
    all-to-all. Tensor parallel divides the heads, and a pipeline the layers (Fang and Zhao 2024, "USP: A Unified
    Sequence Parallelism Approach for Long Context Generative AI").
    """
    if layout.cp == 1:
        return 0.0
    element = PRECISIONS[layout.precision][4]
    own = spec.seq * layout.micro_batch * spec.hidden * element / (layout.cp * layout.tp)
    times = layout.accumulation * -(-spec.layers // layout.pp)
    keys = own * attention_kv_heads(spec, layout) / spec.heads
    if layout.ring:
        rounds, forward = layout.cp - 1, 1 if layout.recompute == "none" else 2
        gradients = layout.cp * 2 * keys / element * 4  # in float32, in one round more
        return times * ((forward + 1) * rounds * 2 * keys + gradients)
    passes = 2 if layout.recompute == "none" else 3
    return times * passes * ring(2 * own + 2 * keys, layout.cp)


def expert_parallel_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank sends over the axis ep in a step, if the tokens choose all experts equally often.

    In each block with experts and each micro-batch, an all-to-all brings the k copies of each token to their experts,
    and a second one brings the results back. The backward pass sends as many bytes (Lepikhin et al. 2020, "GShard",
    section 3.2). A rank sends (e - 1) / e of its k s b h elements. Recomputation repeats the forward pass. With
    sequence parallel, a rank has 1 / t of the tokens.
    """
    if layout.ep == 1:
        return 0.0
    parts = layout.tp if layout.sequence_parallel else 1
    own = spec.top_k * spec.seq * layout.micro_batch * spec.hidden * layout.residual / parts
    passes = 2 if layout.recompute == "none" else 3
    return layout.accumulation * spec.mixtures * passes * 2 * ring(own, layout.ep)


def pipeline_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that the busiest rank sends over the axis pp in a step.

    For each micro-batch, a rank sends s b h elements for every stage output and every input gradient that goes to
    another rank (Narayanan et al. 2021, section 2.2 and 4.1). Sequence parallel divides the bytes by the
    tensor-parallel size t, and context parallel by its size c. Under autocast the residual stream is float32.

    A middle rank sends an output and an input gradient for each of its stages. A rank has one stage per chunk in an
    interleaved or zero-bubble schedule, and one stage in other schedules. With only two ranks, a rank sends less,
    because the first and the last stage have only one neighbor. In an interleaved schedule with v chunks, the busier of
    two ranks sends 2 v - 1 times per micro-batch. In a zero-bubble schedule, the busier of two ranks sends twice per
    micro-batch, because two consecutive stages are on the same rank. With two ranks of one stage each, one rank only
    sends outputs and the other rank only sends gradients.
    """
    if layout.pp == 1:
        return 0.0
    chunks = layout.chunks if layout.pipeline == "interleaved" else 2 if layout.pipeline == "zero-bubble" else 1
    sends = 2 * chunks
    if layout.pp == 2:
        sends = 2 if layout.pipeline == "zero-bubble" else sends - 1
    narrow = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return sends * layout.accumulation * spec.seq * layout.micro_batch * spec.hidden * layout.residual / narrow


def traffic(spec: ModelSpec, layout: Layout) -> dict[str, float]:
    """Returns the bytes that a rank sends in a step over each of the axes ``dp``, ``tp``, ``pp``, ``cp`` and ``ep``."""
    return {
        "dp": data_parallel_bytes(spec, layout),
        "tp": tensor_parallel_bytes(spec, layout),
        "pp": pipeline_bytes(spec, layout),
        "cp": context_parallel_bytes(spec, layout),
        "ep": expert_parallel_bytes(spec, layout),
    }


def host_bytes(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that a rank copies between its host and its device in a step under CPU offload.

    A rank copies its shard of the parameters for every gather and its shard of the gradients after every reduction.
    Parameters are gathered once per step at ZeRO 1 and 2, and twice per micro-batch at ZeRO 3. With hpZ, the second
    gather of a micro-batch copies nothing from the host.
    """
    if not layout.offload:
        return 0.0
    weight, gradient, *_ = PRECISIONS[layout.precision]
    shard = stage_params(spec, layout) / layout.shards
    m = layout.accumulation
    gathers = 1 if layout.zero < 3 else m if layout.hpz else 2 * m
    return shard * (weight * gathers + gradient * (1 if layout.zero == 1 else m))


def disk_bytes(spec: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Returns the bytes that a rank reads from its disk in a step, and the bytes that it writes to it.

    The optimizer's step reads and writes the optimizer states and master weights that the layout keeps there. The first
    step reads the master weights only, because it makes the moments. Parameters on the disk are read and written by the
    optimizer's step too, and read for each gather of a micro-batch. As in ZeRO 3, the parameters of blocks are gathered
    twice, and those outside the blocks once (Rajbhandari et al. 2021, "ZeRO-Infinity", section 4.1). The gradients are
    then written in each micro-batch, and read in each later micro-batch and in the optimizer's step.
    """
    if not layout.disk:
        return 0.0, 0.0
    parameters, gradients, states = model_states(spec, layout)
    if not layout.disk_parameters:
        return states, states
    outside = parameters * spec.outside / spec.params
    passes = layout.accumulation * gradients
    read = states + parameters + layout.accumulation * (2 * parameters - outside) + passes
    return read, states + parameters + passes


def bubble(layout: Layout) -> float:
    """Returns the fraction of a step in which a pipeline stage waits.

    With p stages and m micro-batches, GPipe and 1F1B wait for (p - 1) / (m + p - 1) of a step. An interleaved schedule
    with v chunks waits for (p - 1) / (v m + p - 1) of a step (Narayanan et al. 2021, section 2.2). A zero-bubble
    schedule doesn't wait if m >= 2 p. For smaller m, a zero-bubble schedule waits a third as long as 1F1B (ZB-H1). The
    numbers for the zero-bubble schedule are estimates from Qi et al. 2023.
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

    A token takes 6 P + 12 L h s FLOPs (Chowdhery et al. 2022, "PaLM", appendix B). Full recomputation repeats the
    forward pass, so a token takes 8 P + 16 L h s FLOPs (Narayanan et al. 2021, equation 3). A model of unknown shape
    takes three times the FLOPs of its measured forward pass. Without a measurement, a token takes 6 P FLOPs. A teacher
    of T parameters adds the 2 T FLOPs of its forward pass to each token. P leaves out the experts that a token
    doesn't use.
    """
    tokens = layout.global_batch * max(1, spec.seq)
    passes = 4 if layout.recompute == "full" else 3
    if spec.flops and not spec.is_transformer:
        return passes * spec.flops * layout.global_batch + 2 * spec.teacher * tokens
    own = passes * (2 * (spec.params - spec.idle) + 4 * spec.layers * spec.hidden * spec.seq)
    return (own + 2 * spec.teacher) * tokens


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step in seconds (``step``), and its parts: computing, sending over each axis, copying to and from
    the host, reading and writing the disk, and waiting in the pipeline bubble.
    """

    compute: float
    dp: float
    tp: float
    pp: float
    cp: float
    ep: float
    host: float
    disk: float
    bubble: float
    step: float


def step_time(spec: ModelSpec, layout: Layout, machine: Machine, sent: Mapping[str, float] | None = None) -> StepTime:
    """Estimates the time of a step. ``sent`` is the result of ``traffic``, if it is known.

    A rank computes at ``machine.flops``. Tensor- and context-parallel traffic can't overlap with computing, so its time
    is added to the time of computing. The pipeline bubble adds the time in which a rank waits for other stages.
    Data-parallel traffic overlaps with computing, so the estimate includes only the longer of the data-parallel time
    and the computing time. The estimate also includes the pipeline traffic of one micro-batch. CPU offload adds the
    time of the copies to and from the host. CPU offload also adds the time to read and write all tensors on the host
    once, at ``machine.host_bandwidth``. States on the disk add the time to read and write all of them.

    When ranks are numbered, the tensor-parallel index varies fastest. The indices of context parallel, of the shard, of
    the replica and of the pipeline stage follow in this order. A transfer that reaches beyond a node runs at
    ``machine.bandwidth``.
    """
    sent = traffic(spec, layout) if sent is None else sent
    near, far = machine.node_bandwidth, machine.bandwidth
    speed = {
        "tp": near if layout.tp <= machine.node_size else far,
        "cp": near if layout.tp * layout.cp <= machine.node_size else far,
        "ep": near if layout.ep <= machine.node_size else far,
        "pp": near if layout.world <= machine.node_size else far,
    }
    seconds = {axis: sent[axis] / speed[axis] for axis in speed}
    parts = data_parallel_parts(spec, layout)
    seconds["dp"] = sum(size / (near if ranks <= machine.node_size else far) for size, ranks in parts)
    idle = bubble(layout)
    compute = flops(spec, layout) / layout.world / machine.flops
    busy = (compute + seconds["tp"] + seconds["cp"] + seconds["ep"]) / (1 - idle)
    held = offloaded(spec, layout)[2] if layout.offload else 0.0
    host = (host_bytes(spec, layout) + 2 * held) / machine.host_bandwidth
    disk = sum(disk_bytes(spec, layout)) / machine.disk_bandwidth
    step = max(busy, seconds["dp"]) + seconds["pp"] / layout.accumulation + host + disk
    return StepTime(
        compute=compute,
        dp=seconds["dp"],
        tp=seconds["tp"],
        pp=seconds["pp"],
        cp=seconds["cp"],
        ep=seconds["ep"],
        host=host,
        disk=disk,
        bubble=busy * idle,
        step=step,
    )
