"""Says whether a layout of ranks is possible, for both ``accel plan`` and ``accel train``. Each message names a problem
and its fix in one sentence, in words that fit both commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RECOMPUTE = ("none", "selective", "full")
# The bytes of optimizer states that a step with states on the disk updates at once. A larger tensor is updated alone.
DISK_PART = 2**24
# Ring attention computes at most this many scores at once. It computes a larger block of scores in parts.
RING_SCORES = 2**25
CP_METHODS = ("ulysses", "ring")
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
# A stated number of parameters contradicts the shape if it is this many times larger or smaller than the formula's
# number. A mixture of experts has up to 40 times as many parameters, and a model that shares its layers has 20 times
# fewer.
_CONTRADICTION = 100
_LARGEST_VOCABULARY = 300_000


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How ``world`` ranks share the work of a training run. ``accel.plan.spec.Layout`` explains the fields."""

    world: int
    zero: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_method: str = "ulysses"
    ep: int = 1
    replicate: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    pipeline: str = "1f1b"
    hpz: int = 0
    qwz: bool = False
    qgz: bool = False
    offload: bool = False
    disk: str = ""
    disk_parameters: bool = False

    @property
    def ring(self) -> bool:
        """Tells whether context-parallel ranks pass keys and values around, instead of sharing the heads."""
        return self.cp_method == "ring"


def layout_problems(axes: Axes, global_batch: int) -> Iterator[str]:
    """Yields a message for each problem of a layout with ``global_batch`` samples in a step, whatever the model is."""
    counts = {name: getattr(axes, name) for name in ("world", "tp", "pp", "cp", "ep", "replicate", "micro_batch")}
    for name, count in {**counts, "global_batch": global_batch}.items():
        if count < 1:
            yield f"{name} is {count}; use at least 1"
    choices = (
        ("recompute", axes.recompute, RECOMPUTE),
        ("pipeline", axes.pipeline, PIPELINES),
        ("cp_method", axes.cp_method, CP_METHODS),
    )
    for name, value, known in choices:
        if value not in known:
            yield f"{name} is {value!r}; use one of {', '.join(known)}"
    if axes.zero not in (0, 1, 2, 3):
        yield f"{axes.zero} is no ZeRO stage; use stage 0, 1, 2 or 3"
    if min(*counts.values(), global_batch) < 1:
        return
    fixed = axes.tp * axes.pp * axes.cp
    if axes.world % fixed:
        shape = f"tp {axes.tp} x pp {axes.pp}" + (f" x cp {axes.cp}" if axes.cp > 1 else "")
        yield f"{axes.world} ranks can't be divided evenly into groups of {shape}; use a multiple of {fixed} ranks"
        return
    yield from _zero(axes)
    if axes.ep > 1:
        yield from _experts(axes, axes.world // fixed)
    if axes.pp > 1 and axes.zero == 3:
        yield "ZeRO 3 would gather all parameters for every micro-batch of a pipeline; use ZeRO 2 with pp"
    yield from _batches(axes, axes.world // fixed, global_batch)


def _experts(axes: Axes, ranks: int) -> Iterator[str]:
    if ranks % axes.ep:
        yield f"{ranks} data-parallel ranks can't form whole groups of ep {axes.ep}; use a divisor of {ranks}"
    if axes.pp * axes.cp > 1:
        yield "expert parallel works with data- and tensor-parallel ranks only; use pp 1 and cp 1 with ep"
    if axes.zero == 0 or axes.replicate > 1 or axes.hpz or axes.qwz or axes.qgz or axes.offload:
        yield "expert parallel works with plain ZeRO only; use ZeRO 1, 2 or 3 without replicas, ZeRO++ and offload"


def _zero(axes: Axes) -> Iterator[str]:
    ranks, plusplus = axes.world // (axes.tp * axes.pp), axes.hpz or axes.qwz or axes.qgz
    if ranks % axes.replicate:
        yield (
            f"{ranks} data-parallel ranks can't be divided evenly into {axes.replicate} replicas; use a divisor of "
            f"{ranks}"
        )
    if plusplus and axes.zero != 3:
        yield "hpZ, qwZ and qgZ are parts of ZeRO++, which works at stage 3; use ZeRO 3 with them"
    if plusplus and axes.tp * axes.cp > 1:
        yield "ZeRO++ works with data-parallel ranks only; use tp 1 and cp 1 with hpZ, qwZ and qgZ"
    shards = ranks // axes.replicate
    if axes.hpz and (shards % axes.hpz or not 1 < axes.hpz < shards):
        yield (
            f"hpZ {axes.hpz} can't group {shards} shards; use a divisor of {shards} between 1 and {shards}, or leave "
            "out hpZ"
        )
    if axes.disk_parameters and (axes.zero != 3 or not axes.disk):
        yield "parameters on a disk need a folder, and shards of the parameters; use ZeRO 3 and disk with them"
    if axes.disk_parameters and (axes.offload or axes.hpz or axes.ep > 1):
        yield "parameters on a disk can't be kept on the host or in second shards; leave out offload, hpZ and ep"
    if axes.offload and axes.zero == 0:
        yield "CPU offload needs shards, which ZeRO 0 doesn't have; use ZeRO 3 with offload"


def _batches(axes: Axes, ranks: int, global_batch: int) -> Iterator[str]:
    """Yields the problems of a step. ``ranks`` is the number of data-parallel ranks."""
    step, pp = axes.micro_batch * ranks, axes.pp
    if global_batch % step:
        yield (
            f"a global batch of {global_batch} is not a multiple of micro-batch {axes.micro_batch} x {ranks} "
            f"data-parallel ranks; use --global-batch={max(step, global_batch // step * step)}"
        )
        return
    batches = global_batch // step
    if pp > 1 and batches < pp:
        most = max(1, global_batch // (ranks * pp))
        smaller = next(size for size in range(most, 0, -1) if global_batch % (size * ranks) == 0)
        yield (
            f"{batches} micro-batches a step leave most of {pp} pipeline stages idle; use --micro-batch={smaller} "
            f"--global-batch={max(smaller * ranks * pp, global_batch)}"
        )
    elif pp > 1 and axes.pipeline == "interleaved" and batches % (batches // pp):
        yield f"interleaved needs whole rounds of {pp} micro-batches, not {batches}; use a multiple of {pp}"


def shape_problems(
    *, params: int, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, seq: int
) -> Iterator[str]:
    """Yields a message for each contradiction in a model's stated shape. A value of 0 means unknown."""
    if min(params, layers, hidden, heads, kv_heads, vocab, seq) < 0:
        yield "the model's shape has a negative number; sizes start at 1"
        return
    if heads and hidden % heads:
        yield (
            f"the hidden size {hidden} is not a multiple of the number of heads, {heads}; correct one of these numbers"
        )
    if kv_heads and not heads:
        yield f"a shape with {kv_heads} key-value heads also needs the number of query heads; give heads too"
    elif kv_heads and heads % kv_heads:
        yield (f"{heads} query heads can't be divided evenly over {kv_heads} key-value heads; use a divisor of {heads}")
    if not (params and layers and hidden):
        return
    embedding = (vocab or _LARGEST_VOCABULARY) * hidden
    usual = 12 * layers * hidden**2 + embedding
    if params > _CONTRADICTION * usual or params * _CONTRADICTION < usual - (0 if vocab else embedding):
        about = 12 * layers * hidden**2 + vocab * hidden
        yield (
            f"{params:,} parameters contradict {layers} layers of hidden size {hidden}, which have about {about:,}; "
            "correct one of these numbers, or leave out the number of parameters"
        )
    elif params < vocab * hidden:
        yield (
            f"{params:,} parameters are less than the embedding of {vocab} x {hidden}; correct one of these numbers, "
            "or leave out the number of parameters"
        )


def fit_problems(
    *, tp: int, pp: int, cp: int, ring: bool, sequence: bool, layers: int, heads: int, kv_heads: int, seq: int
) -> Iterator[str]:
    """Yields a message for each problem of a possible layout with a model's shape. A value of 0 means unknown. ``ring``
    tells whether context parallel is ring attention, which doesn't divide the heads. ``sequence`` tells whether
    tensor-parallel ranks also share the sequence."""
    kv_heads = kv_heads or heads
    if pp > 1 and layers and pp > layers:
        yield f"{layers} layers can't be cut into {pp} pipeline stages; use a smaller pp"
    if heads % tp or kv_heads % tp:
        yield (
            f"the tensor-parallel size {tp} has to divide {heads} query heads and {kv_heads} key-value heads evenly; "
            "use a common divisor"
        )
    if seq % cp:
        yield f"the context-parallel size {cp} has to divide {seq} tokens of a sequence evenly; use a divisor of {seq}"
    elif sequence and seq // cp % tp:
        left = f" that cp {cp} leaves on a rank" if cp > 1 else " of a sequence"
        yield (
            f"the tensor-parallel size {tp} has to divide {seq // cp} tokens{left} evenly; use a divisor, or "
            "parallel.sequence_parallel = false"
        )
    if not ring and heads % tp == 0 and heads // tp % cp:
        left = f" that tp {tp} leaves on a rank" if tp > 1 else ""
        yield (
            f"the context-parallel size {cp} has to divide {heads // tp} query heads{left} evenly; use a divisor, or "
            "cp_method ring"
        )
