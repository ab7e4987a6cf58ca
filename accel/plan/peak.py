"""Estimates the memory of a rank at the instants of a training step that may be the fullest.

A tensor counts only at the instants at which it is in memory. The symbols are those of ``accel.plan.memory``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import (
    Memory,
    at_the_peak,
    autocast_copies,
    block_params,
    kept_activations,
    layer_activations,
    loss_gradients,
    model_states,
    offloaded,
    rank_params,
    second_shards,
    stepping,
    temporary,
)
from .rules import RING_SCORES
from .spec import PRECISIONS, Layout, ModelSpec


def training_memory(spec: ModelSpec, layout: Layout) -> Memory:
    """Returns the memory that a rank needs for training."""
    parameters, gradients, optimizer = model_states(spec, layout)
    host, disk = 0.0, optimizer if layout.disk else 0.0
    if layout.disk:
        optimizer = 0.0
    if layout.disk_parameters:
        disk, parameters, gradients = disk + parameters + gradients, 0.0, 0.0
    if layout.offload:
        optimizer = 0.0
        parameters, gradients, host = offloaded(spec, layout)
    kept = kept_activations(spec, layout)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=at_the_peak(spec, layout, kept),
        temporary=temporary(spec, layout),
        host=host,
        disk=disk,
        stepping=stepping(spec, layout),
        teacher=4.0 * spec.teacher,  # every rank holds the whole teacher in float32
        instants=_instants(spec, layout, optimizer, 4.0 * spec.teacher, kept or (0.0, 0.0)),
    )


def sharded(layout: Layout) -> bool:
    """Tells whether FSDP2 holds the parameters (``accel.train.parallel.zero``). FSDP2 keeps a rank's shards beside the
    gathered parameters. A single data-parallel rank has FSDP2 only with tensor parallel, or if the shards are
    elsewhere."""
    data = layout.dp * layout.cp > 1
    apart = layout.offload or layout.disk_parameters
    return layout.tp > 1 or apart or (data and (layout.zero > 0 or layout.pp > 1))


def _keeps_buckets(layout: Layout) -> bool:
    """Tells whether DDP averages the gradients. DDP keeps its buckets of gradients from step to step."""
    return layout.zero == 0 and layout.world > 1 and layout.tp * layout.pp == 1


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Bytes of parameters and gradients on a rank. ``between`` are the parameters between the passes of two steps, and
    ``passing`` those in the passes. ``early`` are the gradients in memory when the last micro-batch begins its backward
    pass, and ``late`` those when it ends."""

    between: float
    passing: float
    early: float
    late: float


def _held(spec: ModelSpec, layout: Layout) -> _Held:
    weight, gradient, *_ = PRECISIONS[layout.precision]
    parts = rank_params(spec, layout)
    whole = sum(psi for psi, _ in parts)
    shard = sum(psi / (ranks if layout.zero else 1) for psi, ranks in parts)
    # Shards of the parameters and gradients may be on the host or on the disk.
    own = 0.0 if layout.offload or layout.disk_parameters else 1.0
    if not sharded(layout):
        early = gradient * whole if layout.accumulation > 1 or _keeps_buckets(layout) else 0.0
        return _Held(between=weight * whole, passing=weight * whole, early=early, late=gradient * whole)
    gathered = weight * whole if layout.zero < 3 else weight * _outside(spec, layout) + second_shards(spec, layout)
    early = 0.0
    if layout.accumulation > 1:  # before ZeRO 2, the gradients are reduced after the last micro-batch
        # Tensor parallel shards the embedding's gradient only then too.
        rest = spec.embedding * (1 - 1 / layout.tp)
        early = gradient * (own * shard if layout.zero >= 2 else whole + rest)
    return _Held(
        between=own * weight * shard,
        passing=own * weight * shard + gathered,
        early=early,
        late=own * gradient * shard,
    )


def _instants(
    spec: ModelSpec, layout: Layout, optimizer: float, teacher: float, kept: tuple[float, float]
) -> dict[str, float]:
    """Returns the bytes of all tensors together at five instants of a step. ``kept`` has the activations of the first
    and the last stage.

    - ``loss``: the last stage has kept all its activations, and runs the backward pass of the loss. A pipeline keeps
      the logits until their backward pass ends.
    - ``layer``: the backward pass is in one of the last layers, after the logits are freed (``_in_a_layer``).
    - ``end``: the backward pass is in the first layer. In a step with one micro-batch, each layer's gradients are made
      while its activations are freed. The layers are alike, so the memory changes linearly from the last layer to the
      first, and is largest at one of the ends.
    - ``embedding``: all activations are freed. The gradient of the embedding is made whole. Then it is added to the
      gradient of earlier micro-batches, or reduced. FSDP2 reduces the gradients of all parameters outside the blocks
      together and last, from a copy in one buffer.
    - ``step``: the optimizer's step. FSDP2 has freed the gathered parameters.
    """
    gradient, element = PRECISIONS[layout.precision][1], PRECISIONS[layout.precision][4]
    held, buffers = _held(spec, layout), _buffers(spec, layout)
    first, last = kept
    tokens = spec.seq * layout.micro_batch / layout.cp if spec.is_transformer else 0.0
    logits = tokens * spec.vocab / layout.tp
    passing = optimizer + teacher + held.passing
    begun, ended = passing + held.early, passing + max(held.early, held.late)
    copies = autocast_copies(spec, layout)
    table = gradient * spec.embedding / layout.tp
    whole = layer_activations(spec, layout, whole=True) if spec.is_transformer else 0.0
    layer = buffers.flowing + whole
    fresh = table if layout.accumulation > 1 else 0.0
    outside = 2 * gradient * _outside(spec, layout) if buffers.reduces else fresh
    missing = table if held.early < held.late and not buffers.reduces else 0.0
    return {
        "loss": begun + copies + last + loss_gradients(spec, layout) + (element * logits if layout.pp > 1 else 0.0),
        "layer": begun + copies + first + _in_a_layer(spec, layout, buffers, whole),
        "end": ended - missing + layer + buffers.gathered + buffers.reduced + buffers.head,
        "embedding": ended + outside,
        "step": optimizer + teacher + held.between + held.late + stepping(spec, layout),
    }


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Bytes of temporary tensors in the backward pass of a layer. ``reduces`` tells whether the backward pass of each
    block reduces its gradients.

    - ``gathered``: at ZeRO 3, the gathered parameters of the block in use and of the next one.
    - ``reduced``: the copy of a block's gradients that is being reduced.
    - ``head``: the gradient of the head, which FSDP2 keeps whole until all blocks are done.
    - ``made``: the new gradient of the MLP's second weight, with 4 h^2 / t values.
    - ``flowing``: the gradients of the layer's output (s b h values) and of the MLP's hidden layer (4 s b h / t), or
      the tensors of ring attention, if these are larger.
    """

    reduces: bool
    gathered: float = 0.0
    reduced: float = 0.0
    head: float = 0.0
    made: float = 0.0
    flowing: float = 0.0


def _buffers(spec: ModelSpec, layout: Layout) -> _Buffers:
    weight, gradient, _, _, element, _ = PRECISIONS[layout.precision]
    # FSDP2 reduces gradients on the last micro-batch, and from ZeRO 2 on every micro-batch.
    reduces = sharded(layout) and (layout.zero >= 2 or layout.accumulation == 1)
    block, gathered, flowing, made = block_params(spec, layout), 0.0, 0.0, 0.0
    if layout.zero == 3:
        gathered = 2 * weight * block
        if layout.disk_parameters:  # the shards of two blocks are read, or gradients of that size are written
            gathered += 2 * weight * block / layout.shards
    if spec.is_transformer:
        narrow = layout.tp if layout.sequence_parallel else 1
        tokens = spec.seq * layout.micro_batch / layout.cp
        flowing = tokens * spec.hidden * (layout.residual / narrow + 4 * element / layout.tp)
        if layout.ring and layout.cp > 1:
            flowing = max(flowing, _ring_attention(spec, layout, tokens))
        made = 4 * gradient * spec.hidden**2 / layout.tp
    # A pipeline's first stage has no head.
    alone = layout.accumulation == 1 and not _keeps_buckets(layout)
    head = gradient * spec.embedding / layout.tp if (reduces or alone) and layout.pp == 1 else 0.0
    return _Buffers(
        reduces=reduces,
        gathered=gathered,
        reduced=gradient * block if reduces else 0.0,
        head=head if spec.is_transformer else 0.0,
        made=made,
        flowing=flowing,
    )


def _ring_attention(spec: ModelSpec, layout: Layout, tokens: float) -> float:
    """Returns the bytes of the temporary tensors in the backward pass of ring attention, less the activations of the
    layer's MLP, which are freed by then.

    A rank holds the gradient of the attention's output, the float32 gradients of queries, keys and values, keys and
    values twice (one pair arrives), and the scores of a block with their gradients. Below float32, it also has float32
    copies of the queries and of the output's gradient.
    """
    element = PRECISIONS[layout.precision][4]
    scores = min(RING_SCORES, layout.micro_batch * spec.heads / layout.tp * (spec.seq / (2 * layout.cp)) ** 2)
    tensors = 3 * 4 + 5 * element + (2 * 4 if element < 4 else 0)
    # The input of the MLP's norm is freed too, but the gradient of the layer's output has the same size.
    freed = element + 8 * element / layout.tp
    return tokens * spec.hidden * (tensors / layout.tp - freed) + 2 * 4 * scores


def _in_a_layer(spec: ModelSpec, layout: Layout, buffers: _Buffers, whole: float) -> float:
    """Returns the bytes that the backward pass of one of the last two layers needs in addition to the kept activations.
    In the last layer but one, the activations of the last layer are freed, and its gradients are reduced. ``whole`` has
    the activations of a layer without recomputation."""
    if not spec.is_transformer:
        return buffers.gathered + buffers.reduced
    kept = whole if layout.recompute == "none" else layer_activations(spec, layout)
    # A layer's activations are made again, except those that ``selective`` recomputation keeps.
    again = {"none": 0.0, "full": whole, "selective": whole - kept}[layout.recompute]
    more = again + buffers.gathered + buffers.head + buffers.made + buffers.flowing
    return more + max(0.0, buffers.reduced - kept)


def _outside(spec: ModelSpec, layout: Layout) -> float:
    """Returns the number of parameters outside the blocks on a rank, before ZeRO shards them."""
    return (spec.outside or spec.embedding) / layout.tp
