"""Defines the config of a training run as frozen dataclasses, one per table of the TOML file, and the choices of each
key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import toml

# The precision modes, and the map from apex's names (O0 to O3) to these modes. See ``accel.train.precision.modes``.
MODES = ("fp32", "autocast-bf16", "autocast-fp16", "bf16", "fp16", "bf16-only", "fp16-only")
APEX = {"O0": "fp32", "O1": "autocast-fp16", "O2": "fp16", "O3": "fp16-only"}
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
# The styles that the config's table ``[tensor_parallel]`` may assign to a module. See ``accel.train.parallel.tensor``.
STYLES = ("column", "row", "vocabulary", "sequence", "split", "heads")
# The granularity of the scales of fp8. See ``accel.train.precision.fp8``.
FP8 = ("none", "tensorwise", "rowwise", "delayed")
# What the stages of a pipeline are cut by. See ``accel.train.parallel.split``.
SPLITS = ("flops", "measured")
COMPRESSION = ("none", "bf16", "fp16", "powersgd")
# Multiplies ``hang_seconds`` for the first step, because the first step includes imports, building the model and
# reading a checkpoint.
FIRST_STEP_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The number formats of parameters and matrix products.

    ``mode`` is one of ``MODES``, or O0 to O3. ``tf32`` lets CUDA round float32 products to TF32. ``loss_scale`` is the
    first loss scale of the fp16 modes. The scale halves on overflow and doubles after ``growth_interval`` good steps. A
    step that overflows is skipped, and counts as one of the run's steps.

    ``fp8`` runs the products of linear layers in 8-bit floats, with a scale for a tensor (``tensorwise``) or for a row
    (``rowwise``). ``delayed`` takes the scale of a tensor from the largest values of the last ``fp8_history`` steps.
    The layers whose names match one of the patterns ``fp8_keep``, separated by commas, stay in ``mode``.
    """

    mode: str = "fp32"
    fp8: str = "none"
    fp8_history: int = 16
    fp8_keep: str = "*head*"
    tf32: bool = False
    loss_scale: float = 65536.0
    growth_interval: int = 2000

    @property
    def resolved(self) -> str:
        """Returns the mode as one of ``MODES``, with apex's names (O0 to O3) translated."""
        return APEX.get(self.mode, self.mode)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout of the ranks: a mesh ``(pp, dp_replicate, dp_shard, tp)``.

    ``dp_shard`` is computed from the world size and the other axes.

    ``zero`` is the ZeRO stage. Stage 0 replicates everything. Stage 1 shards the optimizer states over the
    data-parallel ranks, stage 2 also shards the gradients, and stage 3 also shards the parameters. ``offload`` keeps
    the shards on the host. ``disk`` is a folder in which each rank keeps its optimizer states and master weights, which
    then take memory only during the optimizer's step. ``disk_parameters`` also keeps the shards of the parameters
    and gradients there. Parameters then take memory only while a block gathers them (stage 3). ``replicate`` is the
    number of replicas of the sharded group (hybrid sharding).

    ``tp`` is the number of ranks that share each tensor. With ``sequence_parallel``, each tensor-parallel rank holds
    only its part of the sequence between the modules that ``tensor_parallel`` splits. ``pp`` is the number of pipeline
    stages. ``pipeline`` names the schedule of the stages, such as ``1f1b``. The stages are cut by ``pipeline_split``:
    the FLOPs of the modules (``flops``), or the measured times of the modules and of the tensors that stages send
    (``measured``). ``cp`` is the number of data-parallel ranks over which each sequence is split. ``cp_split`` names
    the last module that works on whole sequences, or several, separated by commas. ``*`` matches any text without a
    dot. ``cp_method`` is ``ulysses``, which shares the heads during attention, or ``ring``, which passes keys and
    values on.
    ``ep`` is the number of data-parallel ranks that share the experts of each block.
    ``sync_batchnorm`` lets batch norm use the statistics of all data-parallel ranks. ``recompute`` is the mode of
    activation checkpointing.

    ZeRO++ (stage 3): Each group of ``hpz`` ranks shares a second copy of the parameters, so that the backward pass
    gathers only within the group. ``qwz`` gathers parameters in int8 blocks. ``qgz`` reduces gradients in int8 blocks.

    ``compression`` selects DDP's format for sending gradients: bf16, fp16 or PowerSGD. PowerSGD has the rank
    ``compression_rank`` and begins after ``compression_start`` uncompressed steps.
    """

    zero: int = 0
    replicate: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    pp: int = 1
    pipeline: str = "1f1b"
    pipeline_split: str = "flops"
    cp: int = 1
    cp_split: str = "embed"
    cp_method: str = "ulysses"
    ep: int = 1
    hpz: int = 0
    qwz: bool = False
    qgz: bool = False
    compression: str = "none"
    compression_rank: int = 4
    compression_start: int = 100
    sync_batchnorm: bool = False
    recompute: str = "none"
    offload: bool = False
    disk: str = ""
    disk_parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer.

    ``clip`` is the limit for the norm of all gradients together, or 0 for no limit. SGD uses ``momentum``. Adam uses
    ``betas`` and ``eps``. ``name`` may also be the dotted name of a class such as ``torch.optim.RMSprop``, which gets
    ``options``. ``groups`` maps patterns of parameter names to options: the parameters that match a pattern get other
    values, such as no weight decay. A parameter belongs to the first pattern that matches its name.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def planned(cls, name: str) -> OptimizerConfig:
        """Returns the config of the optimizer that a plan calls ``name``. A plan calls SGD with momentum ``momentum``,
        and SGD without momentum ``sgd``."""
        if name == "momentum":
            return cls(name="sgd")
        return cls(name="sgd", momentum=0.0) if name == "sgd" else cls(name=name)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps.

    The rate rises for ``warmup`` steps. Then the rate follows the curve ``name`` down to ``floor`` times ``lr``.
    ``name`` may also be the dotted name of a schedule of torch, such as ``torch.optim.lr_scheduler.StepLR``, which gets
    ``options`` and ends where it does.
    """

    name: str = "constant"
    warmup: int = 0
    floor: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The rules for writing and keeping checkpoints.

    ``every`` is the number of steps between two checkpoints, or 0 for a single checkpoint at the end. ``keep`` is the
    number of newest checkpoints to keep. ``best`` names a metric of ``evaluate``, and the checkpoint that is best by
    this metric is kept too. A ``-`` before the metric's name (``-loss``) means that lower values are better.
    ``asynchronous`` writes checkpoints while training goes on. ``convert`` lets a run go on from a checkpoint of
    another precision mode. The exact weights of the checkpoint then become the master weights, or the other way round.
    """

    every: int = 0
    keep: int = 2
    best: str = ""
    asynchronous: bool = True
    convert: bool = False


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """The teacher of a run, and the weights of the losses against the teacher.

    ``teacher`` is any model that accel opens: a factory, a run folder, a folder of transformers, or a file such as
    ``teacher.onnx``. ``weights`` is a state dict or a checkpoint for the module of a factory. ``logits`` is the weight
    of the KL divergence between the teacher's and the student's outputs, both softened by ``temperature``. ``hidden``
    is the weight of the squared difference of the blocks' outputs, and ``attention`` of the KL divergence of the
    attention. ``targets`` is the weight of the run's own loss.
    """

    teacher: str = ""
    weights: str = ""
    temperature: float = 2.0
    logits: float = 1.0
    hidden: float = 0.0
    attention: float = 0.0
    targets: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The routers of a model with experts.

    ``balance`` is the weight of the loss that makes the load of all experts alike, and ``z`` the weight of the loss
    that keeps the routers' logits small. An expert takes at most ``capacity`` times the mean number of tokens in a
    rank's micro-batch, or all of its tokens if ``capacity`` is 0.
    """

    balance: float = 0.0
    z: float = 0.0
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The shape of a transformer. ``accel plan`` uses this shape for a model without a config. A value of 0 means
    unknown."""

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

    ``model`` names a factory of an ``nn.Module``. ``data`` names a factory of a map-style dataset of training samples
    ``(inputs, targets)``. ``loss`` names a function ``(outputs, targets) -> (sum of losses, count)``. The default loss
    is the sum of the cross entropy over all tokens whose target isn't -100. Another built-in loss is
    ``accel.train.loss:squared_error``. ``evaluate`` names a function ``module -> {metric: value}``. Rank 0 calls
    ``evaluate`` every ``evaluate_every`` steps and at the end.

    ``global_batch`` is the number of samples per step over all ranks. ``micro_batch`` is the number of samples that a
    rank runs through the model at once. Gradients are accumulated over the micro-batches of a step. ``pack`` is the
    length of the sequences into which samples of any length are packed (see ``data/packing.py``). With ``pack``, the
    batch sizes count sequences. ``pack = 0`` takes samples unchanged. With ``drop_last = false``, the smaller last
    batch of an epoch is used too.

    ``tensor_parallel`` maps module-name patterns to styles (see ``accel.train.parallel.tensor``). ``compile`` compiles
    each block with torch.compile. ``peak_flops`` is the FLOP/s of one rank's device (989e12 for an H100 in bf16), for
    the MFU in the log. If a step takes longer than ``hang_seconds``, the run stops and names the hanging rank.
    ``hang_seconds = 0`` sets no limit. The first step may take ten times ``hang_seconds``.
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
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    tensor_parallel: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Returns the config of a TOML file, overridden by each ``key=value`` or ``table.key=value`` of ``overrides``.

        Raises ``BadConfig`` if the file can't be read, names an unknown key, or has a value of the wrong type.
        """
        return cls.from_dict(toml.read(path, overrides))

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> TrainConfig:
        """Builds a config from nested plain values. This method is the inverse of ``dataclasses.asdict``."""
        return toml.build(cls, body)

    def to_toml(self) -> str:
        """Returns the whole config as TOML. Loading the TOML text gives an equal config."""
        return toml.dump(dataclasses.asdict(self))

    def data_ranks(self, world_size: int) -> int:
        """Returns the number of ranks with different samples: the world size divided by tp, pp and cp."""
        return world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    def accumulation(self, world_size: int) -> int:
        """Returns the number of micro-batches that a rank runs in a step."""
        return self.global_batch // (self.micro_batch * self.data_ranks(world_size))
