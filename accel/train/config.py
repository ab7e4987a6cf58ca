"""What a training run is: one frozen config, from TOML and ``--key=value``, checked before any process group exists."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accel.errors import BadConfig, one_line

# Precision modes; the names of apex stand for the modes they describe. See ``accel.train.precision``.
MODES = ("fp32", "autocast-bf16", "autocast-fp16", "bf16", "fp16", "bf16-only", "fp16-only")
APEX = {"O0": "fp32", "O1": "autocast-fp16", "O2": "fp16", "O3": "fp16-only"}
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
RECOMPUTE = ("none", "selective", "full")
# What ``[tensor_parallel]`` may call a module. See ``accel.train.tensor_parallel``.
STYLES = ("column", "row", "vocabulary", "sequence", "split")
COMPRESSION = ("none", "bf16", "fp16", "powersgd")
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """``mode`` from ``MODES`` or O0-O3; ``tf32``: let CUDA round float32 products to TF32.

    ``loss_scale``: the first scale of the fp16 modes; it halves on overflow and doubles after ``growth_interval``
    good steps.
    """

    mode: str = "fp32"
    tf32: bool = False
    loss_scale: float = 65536.0
    growth_interval: int = 2000

    @property
    def resolved(self) -> str:
        """The mode with apex names replaced."""
        return APEX.get(self.mode, self.mode)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks are laid out: mesh ``(pp, dp_replicate, dp_shard, tp)``; ``dp_shard`` is what the world size leaves.

    ``zero``: 0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also parameters (over dp).
    ``replicate``: replicas of the sharded group (hybrid sharding). ``recompute``: activation checkpointing.
    ``sequence_parallel``: tensor-parallel ranks hold a part of the sequence each where the plan doesn't cut tensors.
    ``cp``: data-parallel ranks that share the sequences of the same samples, cut after the module ``cp_split``.
    ZeRO++ (stage 3): ``hpz`` ranks hold a second shard of the parameters, so that the backward gather stays among them;
    ``qwz`` gathers parameters in int8 blocks, ``qgz`` reduces gradients so.
    ``compression`` of DDP's gradients on their way: bf16, fp16, or PowerSGD of rank ``compression_rank`` after
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
    """``clip``: largest norm of all gradients together, 0 for none. ``momentum`` is SGD's, ``betas`` are Adam's."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps: ``warmup`` steps up, then ``name`` down to ``floor`` times ``lr``."""

    name: str = "constant"
    warmup: int = 0
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """``every`` steps (0: only at the end), the ``keep`` newest stay, and the best by ``best``: a metric of
    ``evaluate``,
    ``-`` in front where lower is better (``-loss``). ``asynchronous``: written while training goes on."""

    every: int = 0
    keep: int = 2
    best: str = ""
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """A transformer's shape, for ``accel plan``, where the model doesn't say it itself; 0 is unknown."""

    params: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    seq: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    ``model``: a factory of an ``nn.Module``. ``data``: a factory of a map-style dataset of training samples ``(inputs,
    targets)``. ``loss``: a function ``(outputs, targets) -> (sum of losses, count)``, by default the token-sum cross
    entropy, targets of -100 left out (``accel.train.loss:squared_error`` is there too). ``evaluate``: a function
    ``module -> {metric: value}``, run on rank 0 every ``evaluate_every`` steps and at the end. ``pack``: samples are
    documents of any length, which are put together into sequences of so many positions (0: samples are taken as they
    are; see ``accel.train.packing``). Batches are in samples (packed: in sequences); ``global_batch`` over all ranks is
    cut into micro-batches of ``micro_batch`` a rank, and gradients are accumulated over them. ``tensor_parallel``: how
    modules are cut, by name pattern (see ``accel.train.tensor_parallel``). ``compile``: each block by torch.compile.
    ``peak_flops`` of one rank's device a second (989e12 for an H100 in bf16) makes the log say the MFU.
    ``drop_last = false`` makes a last, smaller batch of what doesn't fill one at the end of an epoch.
    ``hang_seconds`` without a step stop the run, and the rank that hangs is named (0: never); until the first step
    it is ten times that.
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
        """The config in a TOML file, with ``key=value`` or ``table.key=value`` put over it.

        Raises ``BadConfig`` for what can't be read, an unknown key or a value of the wrong type.
        """
        try:
            body = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadConfig(f"{path} does not exist; give a training config, e.g. examples/digits.toml") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
            raise BadConfig(f"{path} is no TOML file ({one_line(error, None)}); correct it") from error
        for text in overrides:
            override(body, text)
        return cls.from_dict(body)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> TrainConfig:
        """The config of nested plain values; the inverse of ``dataclasses.asdict``."""
        return _build(cls, body, "")

    def to_toml(self) -> str:
        """The whole config as TOML; reading it back gives an equal config."""
        body = dataclasses.asdict(self)
        tables = {name: value for name, value in body.items() if isinstance(value, dict)}
        lines = [f"{name} = {_toml(value)}" for name, value in body.items() if name not in tables]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"

    def data_ranks(self, world_size: int) -> int:
        """Ranks that see different samples: the world over tp, pp and cp."""
        return world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)

    def accumulation(self, world_size: int) -> int:
        """Micro-batches a rank runs in a step."""
        return self.global_batch // (self.micro_batch * self.data_ranks(world_size))

    def validate(self, world_size: int) -> None:
        """Raise ``BadConfig``, one sentence with the fix, where this can't run on ``world_size`` ranks."""
        from accel.train.rules import check

        check(self, world_size)


def override(body: dict[str, Any], text: str) -> None:
    """Put ``table.key=value`` into nested ``body``; the value is read as TOML, else as text."""
    path, equals, value = text.partition("=")
    *tables, key = path.strip().replace("-", "_").split(".")
    if not equals or not key:
        raise BadConfig(f"can't read the override {text!r}; write --key=value or --table.key=value")
    for table in tables:
        inner = body.setdefault(table, {})
        if not isinstance(inner, dict):
            raise BadConfig(f"{table!r} in {text!r} is no table of the config; write --key=value")
        body = inner
    try:
        body[key] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        body[key] = value


def _build(kind: type[C], body: Mapping[str, Any], where: str) -> C:
    if not isinstance(body, Mapping):
        raise BadConfig(f"{where.rstrip('.')} is a table of the config, not {body!r}; write [{where.rstrip('.')}]")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in body if key not in hints]
    if unknown:
        raise BadConfig(f"the config has no {where}{unknown[0]}; the keys are: {', '.join(hints)}")
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in body.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast("type[Any]", kind), value, f"{where}.")
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise BadConfig(f'{where} is a table of texts, not {value!r}; write [{where}] with "pattern" = "style"')
        return dict(value)
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list | tuple) or not all(isinstance(v, int | float) for v in value):
            raise BadConfig(f"{where} is a list of numbers, not {value!r}; write e.g. {where} = [0.9, 0.95]")
        if len(value) != 2:
            raise BadConfig(f"{where} has {len(value)} numbers; give two, e.g. {where} = [0.9, 0.95]")
        return tuple(float(v) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise BadConfig(f"{where} is {value!r}, it has to be {_KIND_NAMES[kind]}; correct the config")
    return value


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _key(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
