"""Estimates the bytes on a rank: model states, activations, temporary buffers, and the KV cache of inference.

In the formulas, L is the number of layers, h is the hidden size, a is the number of heads, and V is the size of the
vocabulary. A sequence has s tokens, a micro-batch has b samples, and a step has m micro-batches. The tensor-,
pipeline-, data- and context-parallel sizes are t, p, d and c. P is the number of parameters of the model. Psi is the
number of parameters on a rank before ZeRO shards them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from accel.errors import BadConfig
from accel.spelling import option

from .rules import DISK_PART
from .spec import MOMENTS, PRECISIONS, WEIGHT_BYTES, Layout, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The device memory, in bytes, of the rank that needs the most memory. ``host`` is the number of bytes that this
    rank keeps in host memory under CPU offload. ``disk`` is the number of bytes that this rank keeps on its disk.

    Each part of the memory is given at its own peak. ``activations`` is None if the model's shape isn't known.
    ``stepping`` is the number of bytes that the optimizer's step needs in addition to the model states. ``teacher`` is
    the number of bytes of a teacher's weights. ``instants`` has the bytes of all parts together at the instants of a
    step that may be the fullest (``accel.plan.peak``). Without instants, all parts are in memory at the same time.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float | None
    temporary: float
    kv_cache: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    stepping: float = 0.0
    teacher: float = 0.0
    instants: Mapping[str, float] = field(default_factory=dict)

    @property
    def model_states(self) -> float:
        """Returns the bytes of parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Returns the peak memory in bytes, at the fullest instant of a step."""
        if self.instants:
            return max(self.instants.values())
        return self.model_states + self.teacher + (self.activations or 0.0) + self.temporary + self.kv_cache


def stage_params(spec: ModelSpec, layout: Layout) -> float:
    """Returns the number of parameters on a rank of the largest pipeline stage, before ZeRO shards them.

    With a single stage, a rank has P / t parameters. With several stages, the first stage has the embedding and the
    last stage has the head. The largest stage then has ceil(L / p) layers, and either the embedding or the other
    parameters outside the layers. A rank holds 1 / t of their parameters. If t doesn't divide the vocabulary size V,
    the first ranks hold one more row of the embedding than the last ranks.
    """
    more = (-spec.vocab % layout.tp) / layout.tp * spec.hidden
    if layout.pp == 1:
        return spec.params / layout.tp + more
    if not spec.layers:
        raise BadConfig(
            f"pipeline parallel needs the number of layers; pass the number as {option('layers')} together with "
            f"{option('pp')} (with accel train: --shape.layers=4)"
        )
    ends = max(spec.embedding, spec.outside - spec.embedding)
    return (-(-spec.layers // layout.pp) * spec.layer + ends) / layout.tp + more


def rank_params(spec: ModelSpec, layout: Layout) -> list[tuple[float, int]]:
    """Returns the parameters on a rank before ZeRO shards them, as pairs (parameters, ranks that ZeRO shards over).

    With e ranks that share the experts, a rank has 1 / e of the experts' parameters, and 1 / e of the data-parallel
    ranks hold the same experts (Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.2). Tensor parallel doesn't cut
    experts. With e > 1, ZeRO shards them over the tensor-parallel ranks too.
    """
    psi = stage_params(spec, layout)
    if layout.ep * layout.tp == 1 or layout.pp > 1 or not spec.expert_params:
        return [(psi, layout.shards)]
    holders = layout.shards // layout.ep * (layout.tp if layout.ep > 1 else 1)
    return [(psi - spec.expert_params / layout.tp, layout.shards), (spec.expert_params / layout.ep, holders)]


def model_states(spec: ModelSpec, layout: Layout) -> tuple[float, float, float]:
    """Returns the bytes of parameters, gradients and optimizer states on a rank.

    In mixed precision with Adam, parameters take 2 Psi bytes, gradients take 2 Psi bytes, and optimizer states take K
    Psi bytes with K = 12. Each ZeRO stage divides more of the parameters, gradients and optimizer states by the
    data-parallel size N (Rajbhandari et al. 2020, "ZeRO", section 3.1, section 5 and figure 1):

    - Stage 1 divides the optimizer states: 2 Psi + 2 Psi + K Psi / N.
    - Stage 2 also divides the gradients: 2 Psi + (2 + K) Psi / N.
    - Stage 3 also divides the parameters: (2 + 2 + K) Psi / N.

    With expert parallelism, ``rank_params`` tells which parameters a rank has, and over how many ranks ZeRO divides
    them.
    """
    weight, gradient, master, moment, _, _ = PRECISIONS[layout.precision]
    parts = rank_params(spec, layout)
    whole, shard = sum(psi for psi, _ in parts), sum(psi / ranks for psi, ranks in parts)
    held = [shard if layout.zero >= stage else whole for stage in (3, 2, 1)]
    state = master + MOMENTS[layout.optimizer] * moment
    return weight * held[0] + second_shards(spec, layout), gradient * held[1], state * held[2]


def second_shards(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes of the second copy of the blocks' parameters that hpZ keeps in shards over ``hpz`` ranks
    (ZeRO++ section 3.2). The parameters outside the blocks are gathered once for both passes, and have no second copy.
    """
    if not layout.hpz:
        return 0.0
    return PRECISIONS[layout.precision][0] * (stage_params(spec, layout) - spec.outside) / layout.hpz


def offloaded(spec: ModelSpec, layout: Layout) -> tuple[float, float, float]:
    """Returns three byte counts under CPU offload: parameters on the device, gradients on the device, and everything on
    the host.

    The host holds the shards of parameters and gradients, and of optimizer states that aren't on the disk. The host
    runs the optimizer. At ZeRO stage 1, the device holds the gathered parameters and the accumulated gradients. At ZeRO
    stage 2, the device holds the gathered parameters.
    """
    weight, gradient, master, moment, _, _ = PRECISIONS[layout.precision]
    psi = stage_params(spec, layout)
    state = master + MOMENTS[layout.optimizer] * moment
    host = (weight + gradient + (0 if layout.disk else state)) * psi / layout.shards
    second = second_shards(spec, layout)
    return weight * psi if layout.zero < 3 else second, gradient * psi if layout.zero == 1 else 0.0, host


def layer_activations(spec: ModelSpec, layout: Layout, *, whole: bool = False) -> float:
    """Returns the bytes that one layer keeps for the backward pass of one micro-batch. ``whole`` leaves out the
    recomputation of ``layout``.

    The list gives the sizes of the saved tensors in units of s b h bytes, for elements of 2 bytes. Two numbers, such as
    2 + 2, stand for two tensors:

    - 2 + 2 for the inputs of both LayerNorms, divided by t only under sequence parallel.
    - 2 + 2 for the inputs of the QKV product and the first MLP product, not divided by t.
    - 6 for Q, K and V, divided by t.
    - 2 for the attention's output, divided by t.
    - 8 + 8 for the input and the output of the MLP's GELU, divided by t.

    A column-parallel product saves its whole gathered input on every rank, so tensor parallel doesn't reduce the bytes
    of this input. Without tensor parallel, the total is 32 s b h bytes. Korthikanti et al. 2022 ("Reducing Activation
    Recomputation in Large Transformer Models", equations 1 to 4) count 34 s b h bytes, because they include two dropout
    masks. Korthikanti et al. also divide the inputs of matrix products by t, and gather these inputs again in the
    backward pass (section 4.2.2).

    Attention that stores the softmax adds 2 a s^2 b bytes. Fused attention adds only a 4-byte log-sum-exp per head and
    token, which is 4 a s b bytes. Each LayerNorm saves a 4-byte mean and a 4-byte deviation per token, so both
    LayerNorms save 16 s b bytes. Under autocast the residual stream and both LayerNorm inputs are float32. Under
    autocast, the products of Q, K and V save three copies of their input instead of one, which adds 4 s b h bytes.

    ``full`` recomputation keeps only the layer's input. ``selective`` recomputation keeps the layer's input, the result
    of each matrix product, and the attention's output. With ``selective`` recomputation, the saved tensors take 2 + 6 +
    2 + 2 + 8 + 2 = 22 times s b h bytes. The layer's input is divided by t only under sequence parallel. The result of
    a row-parallel product is saved whole on every rank, because it is saved before the scatter. Q, K, V, the
    attention's output and the GELU's input are divided by t.

    Under context parallel, s is the length of a rank's share of the sequence. Ulysses saves two copies of the
    attention's output: one copy is sharded by heads, and the other by positions. The second copy of the attention's
    output adds 2 s b h / t bytes. Ring attention saves a float32 copy instead, unless the output is float32.
    ``attention_kv_heads`` tells how many heads of keys and values are saved.
    """
    s, b, h, t = spec.seq / layout.cp, layout.micro_batch, spec.hidden, layout.tp
    element = PRECISIONS[layout.precision][4]
    unit = s * b * h * element
    narrow = t if layout.sequence_parallel else 1
    residual = layout.residual / element
    qkv = 1 + 2 * attention_kv_heads(spec, layout) / spec.heads
    recompute = "none" if whole else layout.recompute
    if recompute == "full":
        return unit * residual / narrow
    core = 4 * spec.heads * s * b / t  # log-sum-exp
    if recompute == "selective":
        return unit * (residual / narrow + 2 + (qkv + 1 + 4) / t) + core
    norms = 16 * s * b / narrow
    turned = 0.0
    if layout.cp > 1:
        turned = s * b * h / t * (element if not layout.ring else 4 if element < 4 else 0)
    copies = 4 if layout.precision.startswith("autocast") else 2
    return unit * (2 * residual / narrow + copies + (qkv + 1 + 8) / t) + core + norms + turned


def attention_kv_heads(spec: ModelSpec, layout: Layout) -> int:
    """Returns the number of key-value heads in attention, over all tensor-parallel ranks.

    A rank has a_kv / t of them. If c doesn't divide this number, Ulysses repeats the heads until it does, so that a
    rank exchanges lcm(a_kv / t, c) heads. Ring attention repeats them to the number of query heads.
    """
    if layout.cp == 1:
        return spec.kv_heads
    return spec.heads if layout.ring else layout.tp * math.lcm(max(1, spec.kv_heads // layout.tp), layout.cp)


def activations(spec: ModelSpec, layout: Layout) -> float | None:
    """Returns the peak bytes of activations over all ranks, or None if the model's shape isn't known. The peak is on
    the rank of a pipeline's first or last stage. With ``full`` recomputation, the rank also holds the activations of
    one whole layer at a time.
    """
    return at_the_peak(spec, layout, kept_activations(spec, layout))


def at_the_peak(spec: ModelSpec, layout: Layout, kept: tuple[float, float] | None) -> float | None:
    """Returns ``activations`` for the result ``kept`` of ``kept_activations``."""
    if kept is None:
        return None
    again = layout.recompute == "full" and spec.is_transformer
    return max(kept) + (layer_activations(spec, layout, whole=True) if again else 0.0)


def kept_activations(spec: ModelSpec, layout: Layout) -> tuple[float, float] | None:
    """Returns the bytes that are kept for the backward pass on the rank of the first stage, and on the rank of the last
    stage while it computes the loss. Returns None if the model's shape isn't known.

    A rank has L / p layers, and holds the activations of these layers for the number of micro-batches that
    ``in_flight`` returns. The last stage also holds the float32 log-probabilities (4 s b V / t bytes), the inputs of
    the last norm and of the head, the token ids and the targets. The last stage holds its output tensors for one
    micro-batch, or for all micro-batches in GPipe.
    """
    element = PRECISIONS[layout.precision][4]
    if not spec.is_transformer:
        whole = spec.activation_bytes * layout.micro_batch * element / 4
        return (whole, whole) if spec.activation_bytes else None
    each = -(-spec.layers // layout.pp) * layer_activations(spec, layout)
    first, last = in_flight(layout)
    tail = 0.0
    if spec.vocab:
        tokens = spec.seq * layout.micro_batch / layout.cp
        narrow = layout.tp if layout.sequence_parallel else 1
        tail = 4 * tokens * -(-spec.vocab // layout.tp) + (layout.residual / narrow + element) * tokens * spec.hidden
        tail += (8 / narrow + 16) * tokens
    return first * each, last * each + (last if layout.pipeline == "gpipe" else 1) * tail


def in_flight(layout: Layout) -> tuple[float, float]:
    """Returns how many micro-batches have their activations in memory at the peak, as two counts.

    The first count is the maximum over all ranks, and the second count is for the rank of the last stage. The rank of
    the first stage usually has the most micro-batches in memory, but in a zero-bubble schedule the last rank has the
    most. Neither count is larger than m, the number of micro-batches. The list gives both counts for each schedule:

    - GPipe: both counts are m.
    - 1F1B: the first count is p, and the second count is 1 (Narayanan et al. 2021, section 2.2).
    - Interleaved with v chunks and rounds of r micro-batches: the first count is ((v - 1) r + 2 p - 1) / v, and the
      second count is ((v - 1) r + 1) / v. If r = p, the first count of the interleaved schedule is p + (p - 1) / v
      (Korthikanti et al. 2022, section 4.2.3).
    - Zero-bubble: the first count is p, and the second count is (min(2 p - 1, m) + 1) / 2 (Qi et al. 2024, section 6).
      In a zero-bubble schedule, the stages run down the ranks and back up in a V, so the first rank has both the first
      and the last stage. Before its first backward pass, the first rank runs 2 p - 1 forward passes of the first stage
      and one forward pass of the last stage.
    """
    p, m, v = layout.pp, layout.accumulation, layout.chunks
    if p == 1:
        return 1.0, 1.0
    if layout.pipeline == "zero-bubble":
        return min(p, m), (min(2 * p - 1, m) + 1) / 2
    first, last = {"gpipe": (float(m), float(m)), "1f1b": (float(p), 1.0)}.get(layout.pipeline, (0.0, 0.0))
    if layout.pipeline == "interleaved":
        a_round = m // max(1, m // p)
        first, last = ((v - 1) * a_round + 2 * p - 1) / v, ((v - 1) * a_round + 1) / v
    return min(m, first), min(m, last)


def block_params(spec: ModelSpec, layout: Layout) -> float:
    """Returns the number of parameters on a rank of the largest block, which FSDP2 gathers and reduces at once."""
    experts = spec.expert_params / max(1, spec.mixtures)
    return (spec.block - experts) / layout.tp + experts / layout.ep


def temporary(spec: ModelSpec, layout: Layout) -> float:
    """Returns an estimate of the bytes of temporary buffers. The buffers don't all exist at the same time.

    In ZeRO 3, a rank holds the gathered parameters of two blocks, because one block is prefetched while another is in
    use. A rank also holds the parameters outside the blocks, and the gradients of one block. In ZeRO 2, a rank holds
    the gradients of one block until they are reduced. The gradient of a sharded embedding takes V h elements until the
    gradient is sharded. Under gradient accumulation, the embedding's gradient is sharded after the last micro-batch.
    ``autocast_copies`` and ``loss_gradients`` tell the other buffers.
    """
    weight, gradient, *_ = PRECISIONS[layout.precision]
    block = block_params(spec, layout)
    held = gradient * block if layout.zero >= 2 else 0.0
    held += gradient * spec.embedding * (1 - 1 / layout.tp)
    if layout.zero == 3:
        held += 2 * weight * block + weight * spec.outside / layout.tp
        if layout.disk_parameters:  # the shards of two blocks are read, or gradients of that size are written
            held += 2 * weight * block / layout.shards
    held += autocast_copies(spec, layout)
    return held + loss_gradients(spec, layout)


def loss_gradients(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes of temporary tensors in the backward pass of the cross entropy.

    PyTorch makes the float32 gradients of the log-probabilities and of the logits, 8 s b V / t bytes. Under tensor
    parallel, torch's ``loss_parallel`` makes three tensors of this size instead of two: the targets, the probabilities
    and their sum (``_nll_loss_and_log_softmax_backward``).
    """
    if not spec.is_transformer:
        return 0.0
    return (12 if layout.tp > 1 else 8) * spec.seq * layout.micro_batch * spec.vocab / (layout.tp * layout.cp)


def autocast_copies(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes of autocast's 2-byte copies of the weights of matrix products. The embedding isn't one."""
    if not layout.precision.startswith("autocast"):
        return 0.0
    return 2 * (sum(psi for psi, _ in rank_params(spec, layout)) - spec.embedding / layout.tp)


def stepping(spec: ModelSpec, layout: Layout) -> float:
    """Returns the bytes that the optimizer's step takes in addition to the model states.

    Master weights add a float32 copy of the gradients. Adam adds the square roots of all second moments, because Adam's
    ``foreach`` implementation computes all square roots at once. Returns 0 under CPU offload, because the optimizer's
    step then runs on the host. With states on the disk, three parts of the states are in memory at a time, and
    the copies of one part.
    """
    _, _, master, moment, _, _ = PRECISIONS[layout.precision]
    if layout.offload:
        return 0.0
    copies = master + (moment if layout.optimizer in ("adam", "adamw") else 0)
    copied = copies * stage_params(spec, layout) / (layout.shards if layout.zero else 1)
    if not layout.disk:
        return copied
    parameters, gradients, states = model_states(spec, layout)
    states += parameters + gradients if layout.disk_parameters else 0.0
    shards = layout.shards if layout.zero else 1
    part = max(DISK_PART, 12 * spec.embedding / layout.tp / shards)  # a larger tensor is a part of its own
    return min(3 * part, states) + min(part, copied)


def kv_cache(spec: ModelSpec, batch: int, context: int, *, tp: int = 1, element: float = 2.0) -> float:
    """Returns the bytes of the KV cache on a rank.

    The cache has 2 L (h / a) a_kv s b / t elements, where a_kv is the number of key and value heads. The formula is
    from Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 3.3.
    """
    if not (spec.layers and spec.hidden and spec.heads):
        return 0.0
    return 2 * spec.layers * (spec.hidden / spec.heads) * spec.kv_heads * context * batch * element / tp


def inference_memory(spec: ModelSpec, *, weights: str, world: int, batch: int = 1, tp: int = 1) -> Memory:
    """Returns the memory of a rank that generates ``batch`` sequences of ``spec.seq`` tokens, with the weights sharded
    over ``world`` ranks. Raises ``BadConfig`` if ``weights`` is not in ``WEIGHT_BYTES``.
    """
    if weights not in WEIGHT_BYTES:
        raise BadConfig(f"the precision of the weights can't be {weights!r}; use one of {', '.join(WEIGHT_BYTES)}")
    element = 4.0 if weights == "fp32" else 2.0
    return Memory(
        parameters=WEIGHT_BYTES[weights] * spec.params / world,
        gradients=0.0,
        optimizer=0.0,
        activations=0.0,
        temporary=batch * spec.vocab * (element + 4) / tp,
        kv_cache=kv_cache(spec, batch, spec.seq, tp=world, element=element),
    )
