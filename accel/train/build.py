"""From the config to a model that is laid out over the ranks, and the passes that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.errors import BadConfig, BadData
from accel.plan.measure import blocks, trial
from accel.train import context_parallel, tensor_parallel
from accel.train import loss as losses
from accel.train.compression import PowerSGD, compress
from accel.train.config import TrainConfig
from accel.train.inputs import input_names
from accel.train.layout import Ranks
from accel.train.packing import Packed, keep_apart
from accel.train.passes import Accumulated, Passes
from accel.train.precision import parameter_dtype
from accel.train.quantized_comm import set_quantized
from accel.train.recompute import recompute
from accel.train.zero import shard


@dataclass(frozen=True, kw_only=True)
class Built:
    """``module``: what this rank holds, by the names that the whole model has. ``inputs``: the names of its inputs."""

    module: nn.Module
    passes: Passes
    inputs: Sequence[str]
    memory: PowerSGD | None = None  # of the compression of gradients
    flops: float = 0.0  # of one sample, forward and backward; 0 where nobody asked or it can't be known


def make(spec: str) -> Any:
    """What the factory ``package.module:name`` or ``file.py:name`` makes."""
    from accel.sources.python_object import load_object
    from accel.sources.torch_source import call_factory

    return call_factory(load_object(spec, "factory")[1], spec)


def make_data(config: TrainConfig) -> Any:
    """The training samples of ``config``, packed where it says so. Raises ``BadData`` where the factory makes something
    else."""
    data = make(config.data)
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise BadData(
            f"{config.data} made a {type(data).__name__}; a data factory makes a list or another map-style dataset "
            "(__len__ and __getitem__), an iterable one can't be gone on with at a step (docs/training.md)"
        )
    if len(data) and not (isinstance(data[0], tuple | list) and len(data[0]) == 2):
        raise BadData(
            f"a sample of {config.data} is a {type(data[0]).__name__}; it has to be (inputs, targets) "
            "(docs/training.md)"
        )
    return Packed(data, config.pack) if config.pack else data


def make_model(spec: str) -> nn.Module:
    """The model of a factory. Raises ``BadConfig`` where that makes something else."""
    made = make(spec)
    made = made[0] if isinstance(made, tuple) else made
    if not isinstance(made, nn.Module):
        raise BadConfig(f"{spec} made a {type(made).__name__}; a model factory makes an nn.Module (docs/training.md)")
    return made


def build(config: TrainConfig, ranks: Ranks, loss: losses.Loss, data: Sequence[Any]) -> Built:
    """This rank's part of ``config``'s model, cut, recomputed and sharded as it says."""
    p, mode = config.parallel, config.precision.resolved
    torch.manual_seed(config.seed)  # the same weights on every rank
    module = make_model(config.model).to(device=ranks.device, dtype=parameter_dtype(mode)).train()
    inputs = input_names(module)
    flops = _flops(module, data) if config.peak_flops and ranks.rank == 0 else 0.0
    if isinstance(data, Packed):
        keep_apart(module, data, ranks.device, parameter_dtype(mode))
    if ranks.cp is not None:
        context_parallel.share(module, config, ranks, data)
    recompute(module, p.recompute)
    if config.compile:
        for block in blocks(module):
            block.compile()
    styles = tensor_parallel.match(module, config.tensor_parallel) if ranks.tp is not None else {}
    if p.sequence_parallel:
        tensor_parallel.check_sequence(module, styles)
    if ranks.pp is not None:
        from accel.train import pipeline

        stages = pipeline.cut(module, config, ranks, data)
        module = pipeline.whole(stages)
    if ranks.tp is not None:
        tensor_parallel.distribute(module, ranks.tp, styles, sequence=p.sequence_parallel)
    ddp = ranks.tp is None and ranks.pp is None
    if ranks.pp is not None:
        for stage in stages:
            shard(stage.module, ranks.data, p.zero, offload=p.offload, ddp=False, parts=stage.blocks)
        return Built(module=module, passes=pipeline.Pipelined(stages, config, ranks, loss), inputs=inputs, flops=flops)
    called = shard(module, ranks.data, p.zero, offload=p.offload, ddp=ddp, parts=blocks(module), hpz=p.hpz)
    if p.qwz or p.qgz:
        set_quantized(called, ranks.averaged // p.replicate, gather=p.qwz, reduce=p.qgz)
    memory = compress(called, p) if isinstance(called, DistributedDataParallel) else None
    passes = Accumulated(called, loss, zero=p.zero, mode=mode, device=ranks.device, cp=ranks.cp)
    return Built(module=module, passes=passes, inputs=inputs, memory=memory, flops=flops)


def _flops(module: nn.Module, data: Sequence[Any]) -> float:
    """Of a sample: the backward pass takes twice the forward pass; what is computed again for it doesn't count."""
    sample = data[0][0][0] if isinstance(data, Packed) else data[0][0]
    if isinstance(sample, Mapping):
        return 0.0
    return 3 * trial(module, tuple(sample) if isinstance(sample, tuple | list) else (sample,))[1]
