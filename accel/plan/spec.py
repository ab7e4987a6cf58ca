"""Defines the inputs of a plan: the size of the model, its layout over ranks, and the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from accel.errors import BadConfig
from accel.spelling import option
from accel.tables.precision import PRECISIONS as _WEIGHTS

from .rules import Axes, layout_problems, shape_problems

# Each row lists the bytes per element of six tensors: parameters, gradients, float32 master copies, one optimizer
# moment, activations, and tensors that are sent to another rank. The rows "fp16" and "bf16" are mixed precision as in
# the ZeRO paper, with 2 bytes per parameter, 2 bytes per gradient and 4 bytes per master copy.
PRECISIONS: dict[str, tuple[int, int, int, int, int, int]] = {
    "fp32": (4, 4, 0, 4, 4, 4),
    "autocast-bf16": (4, 4, 0, 4, 2, 4),
    "autocast-fp16": (4, 4, 0, 4, 2, 4),
    "bf16": (2, 2, 4, 4, 2, 2),
    "fp16": (2, 2, 4, 4, 2, 2),
    "bf16-only": (2, 2, 0, 2, 2, 2),
    "fp16-only": (2, 2, 0, 2, 2, 2),
}
# The bytes per weight at inference, by precision.
WEIGHT_BYTES = {row.name: row.weight_bytes for row in _WEIGHTS.values() if row.weight_bytes is not None}
# The number of moments that each optimizer keeps per parameter.
MOMENTS = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"^(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)$")


def quantity(text: str) -> float:
    """Converts a text such as ``80G``, ``80GiB``, ``7.5e9``, ``7.5B`` or ``400T`` to a number. The unit G is 10^9, and
    GiB is 2^30.

    Raises ``BadConfig`` if ``text`` is not a quantity.
    """
    match = _QUANTITY.match(text.strip().lower().replace(",", ""))
    unit = match[2] if match else ""
    bare = unit if unit in ("b", "") else unit.removesuffix("b")
    factor = _UNITS.get(bare, _BINARY.get(bare))
    if match is None or factor is None or not math.isfinite(float(match[1])):
        raise BadConfig(f"can't read the quantity {text!r}; write e.g. 80G, 80GiB, 7.5e9 or 7.5B")
    return float(match[1]) * factor


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The size of a model. The value 0 in a field means that the value isn't known. The fields from ``layers`` to
    ``seq`` describe a decoder-only transformer.

    ``activation_bytes`` and ``flops`` are measured on fake tensors for one sample in float32. ``flops`` counts the
    forward pass only. The numbers measured on fake tensors are used only if the model isn't a transformer of known
    shape. ``largest`` is the number of parameters of the largest block, which ZeRO 3 gathers at once. ``outside`` is
    the number of parameters outside all blocks, which ZeRO 3 gathers only once per micro-batch. ``teacher`` is the
    number of parameters of a teacher that runs beside the model (distillation). ``mixtures`` is the number of blocks
    with experts. Each has ``experts`` experts, of which a token uses ``top_k``. All experts of all blocks together have
    ``expert_params`` parameters.
    """

    params: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    seq: int = 0
    largest: int = 0
    outside: int = 0
    activation_bytes: int = 0
    flops: float = 0.0
    teacher: int = 0
    mixtures: int = 0
    experts: int = 0
    top_k: int = 0
    expert_params: int = 0

    def __post_init__(self) -> None:
        if not self.params and not (self.layers and self.hidden):
            raise BadConfig(
                f"the size of the model is missing; pass the number of parameters as {option('params')}, or the "
                f"model's shape as {option('layers')}, {option('hidden')} and {option('vocab')}"
            )
        named = ("params", "layers", "hidden", "heads", "kv_heads", "vocab", "seq")
        stated = {name: getattr(self, name) for name in named}
        if self.largest:  # the number of parameters was counted
            stated["params"] = 0
        for problem in shape_problems(**stated):
            raise BadConfig(problem)
        if self.heads and not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.params:
            object.__setattr__(self, "params", transformer_params(self))

    @cached_property
    def is_transformer(self) -> bool:
        """Tells whether enough of the shape is known to estimate activations, tensor parallel and pipeline parallel."""
        return bool(self.layers and self.hidden and self.heads and self.seq)

    @property
    def idle(self) -> float:
        """Returns the number of parameters of the experts that a token doesn't use."""
        return self.expert_params * (1 - self.top_k / self.experts) if self.experts else 0.0

    @cached_property
    def embedding(self) -> int:
        """Returns the number of parameters of the token embedding, V h."""
        return self.vocab * self.hidden

    @cached_property
    def block(self) -> int:
        """Returns the number of parameters that ZeRO 3 gathers at once. If ``largest`` is unknown, returns the number
        of parameters of a layer or of the embedding, whichever is larger.
        """
        if self.largest:
            return self.largest
        return max(self.layer, self.embedding) if self.layers else 0

    @cached_property
    def layer(self) -> int:
        """Returns the number of parameters of one layer, without embeddings. If ``outside`` is unknown, a head that
        doesn't share the embedding's table is spread over the layers.
        """
        return (self.params - (self.outside or self.embedding)) // self.layers if self.layers else 0


def transformer_params(spec: ModelSpec) -> int:
    """Returns the number of parameters of a GPT with the shape in ``spec`` and with tied embeddings.

    The formula for the number of parameters is 12 L h^2 (1 + 13/(12 h)) + (V + s) h (Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters", equation 2). Keys and values take 2 (h^2 + h) of the 12 h^2 +
    13 h parameters of a layer. Grouped-query attention removes 2 L (h^2 + h) (1 - a_kv / a) parameters (Ainslie et al.
    2023, "GQA", section 2.2). The number of query heads is a, and the number of heads of keys and values is a_kv.
    """
    h = spec.hidden
    grouped = 2 * (spec.heads - spec.kv_heads) * (h // spec.heads) * (h + 1) if spec.heads else 0
    return spec.layers * (12 * h**2 + 13 * h - grouped) + (spec.vocab + spec.seq) * h


@dataclass(frozen=True, kw_only=True)
class Layout(Axes):
    """The layout of a training run over ranks.

    ``micro_batch`` is the number of samples that a rank runs through the model at once. ``accumulation`` is the number
    of micro-batches per rank and optimizer step. ``cp`` is the number of ranks that share each sequence (Ulysses
    context parallel). ZeRO treats context-parallel ranks as data-parallel ranks. ``ep`` is the number of data-parallel
    ranks that share the experts. ``sequence_parallel`` shards the activations that tensor parallel would replicate,
    along the sequence dim. ``chunks`` is the number of stages per rank in the interleaved schedule.

    ``replicate`` is the number of shard groups in hybrid sharding. ZeRO shards within each group, and all groups hold
    the same values. ``hpz`` is the size of the groups that hold a second, sharded copy of the parameters for the
    backward gather (ZeRO++). ``qwz`` gathers the weights in int8, and ``qgz`` reduces the gradients in int8 (both
    ZeRO++). ``offload`` keeps the shards of ZeRO on the host (CPU offload). ``disk`` is
    the folder in which a rank keeps its optimizer states, or "" for memory. ``disk_parameters`` keeps the shards of
    the parameters and gradients there too.
    """

    precision: str = "bf16"
    optimizer: str = "adamw"
    accumulation: int = 1
    chunks: int = 2
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        _choice("precision", self.precision, PRECISIONS)
        _choice("optimizer", self.optimizer, MOMENTS)
        for name in ("accumulation", "chunks"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; use at least 1")
        ranks = self.world // max(1, self.tp * self.pp * self.cp)
        _refuse_impossible(self, max(1, ranks * self.micro_batch * self.accumulation))

    @classmethod
    def for_batch(cls, global_batch: int, **kind: Any) -> Layout:
        """Returns the layout ``kind`` with the accumulation that makes a step of ``global_batch`` samples.

        Raises ``BadConfig`` if the layout is impossible, or if the ranks can't share the samples evenly.
        """
        axes = Axes(**{field.name: kind[field.name] for field in fields(Axes) if field.name in kind})
        _refuse_impossible(axes, global_batch)
        ranks = axes.world // (axes.tp * axes.pp * axes.cp)
        return cls(**kind, accumulation=global_batch // (ranks * axes.micro_batch))

    @property
    def dp(self) -> int:
        """Returns the number of data-parallel ranks, which process different samples."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def shards(self) -> int:
        """Returns the number of ranks that ZeRO shards over."""
        return self.dp * self.cp // self.replicate

    @property
    def residual(self) -> int:
        """Returns the bytes of a value between two layers. Under autocast, these values are float32."""
        return 4 if self.precision.startswith("autocast") else PRECISIONS[self.precision][4]

    @property
    def global_batch(self) -> int:
        """Returns the number of samples in a step, over all ranks."""
        return self.dp * self.micro_batch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cluster.

    ``flops`` is the FLOP/s that a rank sustains. ``node_bandwidth`` is the bandwidth inside a node, and ``bandwidth``
    is the bandwidth between nodes. ``host_bandwidth`` is the bandwidth between a device and its host, and
    ``disk_bandwidth`` is the bandwidth of the disk. All bandwidths are in bytes per second and rank. ``latency`` is the
    time of an empty message in seconds. ``hbm`` is the memory of a rank in bytes, or 0 if not given. The defaults are
    rough figures of an 8-GPU node of 2023. A plan prints the machine figures that it assumes.
    """

    flops: float = 400e12
    node_bandwidth: float = 300e9
    bandwidth: float = 40e9
    host_bandwidth: float = 25e9
    disk_bandwidth: float = 3e9
    node_size: int = 8
    hbm: float = 0.0
    reserve: float = 0.06
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("flops", "node_bandwidth", "bandwidth", "host_bandwidth", "disk_bandwidth", "node_size"):
            if getattr(self, name) <= 0:
                raise BadConfig(f"the value of {name} is {getattr(self, name)}; use a value above 0")
        if self.latency < 0:
            raise BadConfig(f"the value of latency is {self.latency}; use 0 or more seconds")

    @property
    def usable(self) -> float:
        """Returns the bytes of memory that a rank may fill.

        A fraction ``reserve`` of the memory is left for the CUDA context and fragmentation.
        """
        return self.hbm * (1 - self.reserve)


def _refuse_impossible(axes: Axes, global_batch: int) -> None:
    for problem in layout_problems(axes, global_batch):
        raise BadConfig(problem)


def _choice(name: str, value: str, known: Mapping[str, Any] | tuple[str, ...]) -> None:
    if value not in known:
        raise BadConfig(f"{name} is {value!r}; use one of {', '.join(known)}")
