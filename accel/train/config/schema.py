"""The config of a training run: frozen dataclasses, one per table of the TOML file, and the choices of each key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import toml

# Precision modes, and the mode that each name of apex stands for. See ``accel.train.precision``.
MODES = ("fp32", "autocast-bf16", "autocast-fp16", "bf16", "fp16", "bf16-only", "fp16-only")
APEX = {"O0": "fp32", "O1": "autocast-fp16", "O2": "fp16", "O3": "fp16-only"}
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
RECOMPUTE = ("none", "selective", "full")
# The styles that ``[tensor_parallel]`` can give a module. See ``accel.train.parallel.tensor``.
STYLES = ("column", "row", "vocabulary", "sequence", "split")
COMPRESSION = ("none", "bf16", "fp16", "powersgd")
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
# The first step may take this many times ``hang_seconds``: imports, building the model and reading a checkpoint.
FIRST_STEP_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The number formats of parameters and products.

    ``mode``: one of ``MODES``, or O0 to O3. ``tf32``: lets CUDA round float32 products to TF32. ``loss_scale``: the
    first loss scale of the fp16 modes. The scale halves on overflow and doubles after ``growth_interval`` good steps.
    """

    mode: str = "fp32"
    tf32: bool = False
    loss_scale: float = 65536.0
    growth_interval: int = 2000

    @property
    def resolved(self) -> str:
        """Returns the mode. A name of apex is replaced by the mode that it stands for."""
        return APEX.get(self.mode, self.mode)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout of the ranks: a mesh ``(pp, dp_replicate, dp_shard, tp)``.

    ``dp_shard`` follows from the world size and the other axes.

    ``zero``: the ZeRO stage. Stage 0 replicates everything. Stage 1 shards the optimizer states over the data-parallel
    ranks, stage 2 also shards the gradients, and stage 3 also shards the parameters. ``offload``: keeps the shards on
    the host. ``replicate``: the number of replicas of the sharded group (hybrid sharding).

    ``tp``: the number of ranks that share each tensor. ``sequence_parallel``: a tensor-parallel rank also holds only a
    part of the sequence between the modules that the plan cuts. ``pp``: the number of pipeline stages, which run in the
    order of the schedule ``pipeline``. ``cp``: the number of data-parallel ranks that share the sequences of the same
    samples. The module ``cp_split`` is the last module before the sequences are cut. ``recompute``: activation
    checkpointing.

    ZeRO++ (stage 3): ``hpz`` ranks together hold a second copy of the parameters in shards, so that the backward gather
    stays among these ranks. ``qwz`` gathers parameters in int8 blocks, ``qgz`` reduces gradients in int8 blocks.

    ``compression``: how DDP sends gradients: bf16, fp16, or PowerSGD of rank ``compression_rank`` after
    ``compression_start`` exact steps.
    """

    zero: int = 0
    replicate: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    pp: int = 1
    pipeline: str = "1f1b"
    cp: int = 1
    cp_split: str = "embed"
    hpz: int = 0
    qwz: bool = False
    qgz: bool = False
    compression: str = "none"
    compression_rank: int = 4
    compression_start: int = 100
    recompute: str = "none"
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer.

    ``clip``: the largest norm of all gradients together, 0 for no limit. ``momentum``: for SGD. ``betas``, ``eps``: for
    Adam.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps.

    The rate rises for ``warmup`` steps. Then it follows the curve ``name`` down to ``floor`` times ``lr``.
    """

    name: str = "constant"
    warmup: int = 0
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The rules by which checkpoints are written and kept.

    ``every``: steps from one checkpoint to the next, 0 for only one at the end. ``keep``: how many of the newest to
    keep. ``best``: the metric of ``evaluate`` whose best checkpoint is kept too, with ``-`` in front if lower is better
    (``-loss``). ``asynchronous``: writes checkpoints while training goes on.
    """

    every: int = 0
    keep: int = 2
    best: str = ""
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The shape of a transformer, for ``accel plan`` if the model doesn't have a config of its own. 0 means unknown."""

    params: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    seq: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config of a whole run.

    ``model``: a factory of an ``nn.Module``. ``data``: a factory of a map-style dataset of training samples ``(inputs,
    targets)``. ``loss``: a function ``(outputs, targets) -> (sum of losses, count)``. The default is the cross entropy
    summed over tokens, which leaves out targets of -100. ``accel.train.loss:squared_error`` is another. ``evaluate``: a
    function ``module -> {metric: value}``. Rank 0 runs it every ``evaluate_every`` steps and at the end.

    ``global_batch``: samples per step over all ranks. ``micro_batch``: samples per rank and pass; gradients are
    accumulated over the micro-batches of a step. ``pack``: the samples are documents of any length, which are packed
    into sequences of this many positions (see ``data/packing.py``). Batches then count sequences. 0 takes samples as
    they are. ``drop_last = false`` trains on the last, smaller batch of an epoch too.

    ``tensor_parallel``: how modules are cut, by name pattern (see ``accel.train.parallel.tensor``). ``compile``:
    compiles each block with torch.compile. ``peak_flops``: FLOP/s of one rank's device (989e12 for an H100 in bf16),
    for the MFU in the log. ``hang_seconds``: the run stops after this time without a step, and names the rank that
    hangs. 0 waits forever. The first step may take ten times as long.
    """

    model: str = ""
    data: str = ""
    loss: str = ""
    evaluate: str = ""
    evaluate_every: int = 0
    steps: int = 1000
    global_batch: int = 32
    micro_batch: int = 8
    seed: int = 0
    deterministic: bool = False
    compile: bool = False
    log_every: int = 10
    loader_processes: int = 0
    hang_seconds: float = 1800.0
    peak_flops: float = 0.0
    tensorboard: bool = False
    pack: int = 0
    drop_last: bool = True
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    tensor_parallel: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Returns the config of a TOML file, each ``key=value`` or ``table.key=value`` of ``overrides`` applied to it.

        Raises ``BadConfig`` if the file can't be read, names an unknown key, or has a value of the wrong type.
        """
        return cls.from_dict(toml.read(path, overrides))

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> TrainConfig:
        """Returns the config of nested plain values; the inverse of ``dataclasses.asdict``."""
        return toml.build(cls, body)

    def to_toml(self) -> str:
        """Returns the whole config as TOML; loading that text gives an equal config."""
        return toml.dump(dataclasses.asdict(self))

    def data_ranks(self, world_size: int) -> int:
        """Returns how many ranks see different samples: the world size divided by tp, pp and cp."""
        return world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    def accumulation(self, world_size: int) -> int:
        """Returns how many micro-batches a rank runs in a step."""
        return self.global_batch // (self.micro_batch * self.data_ranks(world_size))
