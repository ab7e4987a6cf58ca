"""Builds this rank's part of the model, and the forward and backward passes, from the config."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.artifact import Artifact
from accel.errors import BadConfig, BadData, kind_of, one_line
from accel.plan.measure import blocks, sample_of, trial

from . import loss as losses
from .batch import input_names
from .config.schema import TrainConfig
from .data.packing import Packed, keep_apart
from .data.samples import Labelled
from .data.stream import Stream
from .distill.teacher import Lessons
from .experts import dispatch
from .experts.balance import Balance
from .experts.block import mixtures
from .optimizer.make import check_groups
from .parallel import batch_norm, tensor_check
from .parallel import context as context_parallel
from .parallel import tensor as tensor_parallel
from .parallel.compression import PowerSGD, compress
from .parallel.quantized_comm import set_quantized
from .parallel.zero import shard
from .passes import Accumulated, Passes
from .precision import fp8
from .precision.delayed import History
from .precision.modes import keeps_master, parameter_dtype
from .ranks import Ranks
from .recompute import recompute


@dataclass(frozen=True, kw_only=True)
class Built:
    """This rank's part of the model.

    ``module`` holds this rank's modules, under their names in the whole model. ``inputs`` names the model's inputs.
    ``memory`` is the state of PowerSGD, and ``history`` the state of delayed scaling in fp8. ``advice`` are messages
    for the person who watches the run. ``flops`` is the number of FLOPs of one sample in the forward and backward pass,
    or 0 if the FLOPs weren't counted. ``alike`` tells whether all ranks hold the same gradients after a backward pass.
    """

    module: nn.Module
    passes: Passes
    inputs: Sequence[str]
    memory: PowerSGD | None = None
    history: History | None = None
    advice: Sequence[str] = ()
    flops: float = 0.0
    alike: bool = False


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Opens a context in which the user's code draws the same random numbers on every rank and after every resume.

    Seeds torch, NumPy and ``random``. NumPy and ``random`` get their previous state back at the end.
    """
    before, array = random.getstate(), np.random.get_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(array)


def make(spec: str, seed: int) -> Any:
    """Returns the result of the factory ``package.module:name`` or ``file.py:name``. Imports and calls the factory in
    the context ``seeded``."""
    from accel.sources.python_object import load_object
    from accel.sources.torch.factory import call_factory

    with seeded(seed):
        factory = load_object(spec, "factory")[1]
    with seeded(seed):
        return call_factory(factory, spec)


def make_data(config: TrainConfig) -> Any:
    """Returns the training samples of ``config``, packed if ``config.pack`` is set.

    Raises ``BadData`` if the factory doesn't make a map-style or iterable dataset of ``(inputs, targets)``.
    """
    data = make(config.data, config.seed)
    # torch's IterableDataset has a __getitem__ that only raises an error.
    iterated = isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__getitem__")
    if iterated and isinstance(data, Iterable) and not isinstance(data, torch.utils.data.DataLoader):
        data = _stream(data, config)
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise BadData(
            f"{config.data} returned {kind_of(data)} as the data; return a list of samples (inputs, targets), another "
            "map-style dataset (with __len__ and __getitem__), or an iterable dataset (docs/how-to/training.md)"
        )
    if not len(data):
        raise BadData(
            f"{config.data} returned {kind_of(data)} without samples as the data; return at least one sample "
            "(docs/how-to/training.md)"
        )
    try:
        sample = data[0]
    except Exception as error:  # user code may raise any exception
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise BadData(
            f"sample 0 of {config.data} can't be fetched ({reason}); let the dataset take indices from 0 to "
            f"{len(data) - 1} (docs/how-to/training.md)"
        ) from error
    if isinstance(sample, Mapping) and "labels" in sample:
        return Labelled(data)
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise BadData(
            f"sample 0 of {config.data} is {kind_of(sample)}; let each sample be a tuple (inputs, targets), or a dict "
            "of inputs with labels (docs/how-to/training.md)"
        )
    return Packed(data, config.pack) if config.pack else data


def _stream(data: Iterable[Any], config: TrainConfig) -> Stream:
    for what, wrong in (("pack", config.pack), ("loader_processes", config.loader_processes)):
        if wrong:
            raise BadData(
                f"{config.data} returned an iterable dataset, which doesn't work with {what}; return a map-style "
                f"dataset (with __len__ and __getitem__), or use {what} = 0 (docs/how-to/training.md)"
            )
    return Stream(data, config.data, config.seed)


def make_model(spec: str, seed: int) -> nn.Module:
    """Returns the model that a factory makes, with the same weights on every rank.

    Raises ``BadConfig`` if the factory doesn't make an ``nn.Module``.
    """
    made = make(spec, seed)
    made = made[0] if isinstance(made, tuple) else made
    if not isinstance(made, nn.Module):
        raise BadConfig(
            f"{spec} returned {kind_of(made)} as the model; return a torch.nn.Module (docs/how-to/training.md)"
        )
    return made


def _experts(
    module: nn.Module, config: TrainConfig, ranks: Ranks, styles: Iterable[str]
) -> tuple[Balance | None, list[nn.Module]]:
    """Distributes the experts of ``module`` over the ranks. Returns the losses of the routers, or None if the run can't
    have them, and the modules of the experts. Tensor parallel cuts the modules ``styles``, which must not be routers or
    experts."""
    p, found, experts = config.parallel, mixtures(module), list[nn.Module]()
    whole = {part for name in found for part in (name, f"{name}.gate", f"{name}.experts")}
    if cut := next((name for name in styles if name in whole), None):
        raise BadConfig(
            f"[tensor_parallel] gives {cut} a style, but every rank needs whole routers and experts; leave {cut} out "
            "of [tensor_parallel]"
        )
    parts = ranks.tp if p.sequence_parallel and found else None
    if ranks.ep is not None or config.experts.capacity or parts is not None:
        experts = dispatch.distribute(module, ranks.ep, config.experts.capacity, parts)
    if found and p.pp * p.cp == 1:
        balance = Balance(module, config.experts, ranks.world, ranks.device, tp=ranks.tp, parts=parts is not None)
        return balance, experts
    if config.experts != type(config.experts)():
        raise BadConfig("the model has no mixture of experts that accel knows; leave out the table [experts]")
    return None, experts


def build(
    config: TrainConfig,
    ranks: Ranks,
    loss: losses.Loss,
    data: Sequence[Any],
    teacher: nn.Module | Artifact | None = None,
) -> Built:
    """Returns this rank's part of the model, with the pipeline, sharding and recomputation of ``config``. ``teacher``
    is the run's teacher, if it has one."""
    p, mode = config.parallel, config.precision.resolved
    module = make_model(config.model, config.seed).to(device=ranks.device).train()
    module = batch_norm.cast(module, parameter_dtype(mode), keep=keeps_master(mode))
    check_groups([name for name, _ in module.named_parameters()], config.optimizer)
    inputs = input_names(module)
    module = batch_norm.replace(module, asked=p.sync_batchnorm)
    _refuse_batch_norm(module, ranks)
    flops = _flops(module, data) if config.peak_flops and ranks.rank == 0 else 0.0
    if isinstance(data, Packed):
        keep_apart(module, data, ranks.device, parameter_dtype(mode))
    splits = context_parallel.split_names(module, p) if ranks.cp is not None else []
    styles = tensor_parallel.match(module, config.tensor_parallel) if ranks.tp is not None else {}
    if p.sequence_parallel:
        tensor_parallel.check_sequence(module, styles, splits)
    tried = tensor_check.try_whole(module, styles, config, ranks, data) if ranks.tp is not None else None
    cut, hooks = context_parallel.cutter(ranks, p), {}
    if cut is not None:
        hooks = context_parallel.share(module, splits, config, ranks, data, loss, cut)
        tried = tried.part(cut.part) if tried is not None else None
    advice, history = [], None
    if config.precision.fp8 != "none":
        said, history = fp8.convert(module, config.precision, ranks.device)
        advice.append(said)
    balance, experts = _experts(module, config, ranks, styles)
    recompute(module, p.recompute)
    for block in blocks(module) if config.compile else ():
        block.compile()
    if ranks.pp is not None:
        from .parallel import pipeline

        stages, said = pipeline.cut(module, config, ranks, loss, data)
        advice += filter(None, [said])
        module = pipeline.whole(stages)
    if ranks.tp is not None:
        tensor_parallel.distribute(
            module,
            ranks.tp,
            styles,
            sequence=p.sequence_parallel,
            first=splits,
            before=lambda: context_parallel.again(module, hooks, cut) if cut is not None else None,
        )
        if tried is not None and ranks.pp is None:  # a pipeline stage alone can't run a sample
            exact = parameter_dtype(mode) == torch.float32 and not config.precision.tf32
            tensor_check.check_same(module, tried, ranks.tp, exact=exact, sequence=p.sequence_parallel)
    ddp = ranks.tp is None and ranks.pp is None
    if ranks.pp is not None:
        # FSDP2 would hold a second copy of the parameters in the passes of a single data-parallel rank. Parameters that
        # tensor parallel cuts need FSDP2, so that the other parameters are DTensors too.
        single = ranks.averaged == 1 and ranks.tp is None and not p.offload
        for stage in stages:
            shard(
                stage.module, None if single else ranks.data, p.zero, offload=p.offload, ddp=False, parts=stage.blocks
            )
        run = pipeline.Pipelined(stages, config, ranks, loss, cut.part if cut is not None else None)
        return Built(module=module, passes=run, inputs=inputs, advice=advice, flops=flops)
    if ranks.world > 1:
        advice += filter(None, [batch_norm.advice(module, config.micro_batch)])
        module = batch_norm.join(module, torchs=ranks.device.type == "cuda" and config.drop_last)
    lessons = None
    if teacher is not None:
        lessons = Lessons(config, module, teacher if isinstance(teacher, nn.Module) else None, ranks.device)
    called = shard(
        module,
        ranks.data,
        p.zero,
        offload=p.offload,
        ddp=ddp,
        parts=blocks(module),
        hpz=p.hpz,
        experts=experts,
        beside=ranks.beside,
    )
    if p.qwz or p.qgz:
        set_quantized(called, ranks.averaged // p.replicate, gather=p.qwz, reduce=p.qgz)
    alike = isinstance(called, DistributedDataParallel)
    memory = compress(called, p) if isinstance(called, DistributedDataParallel) else None
    passes = Accumulated(
        called,
        loss,
        zero=p.zero,
        mode=mode,
        device=ranks.device,
        cut=cut,
        lessons=lessons,
        balance=balance,
        history=history,
    )
    return Built(
        module=module,
        passes=passes,
        inputs=inputs,
        memory=memory,
        history=history,
        advice=advice,
        flops=flops,
        alike=alike,
    )


def _refuse_batch_norm(module: nn.Module, ranks: Ranks) -> None:
    if batch_norm.synced(module) and (ranks.tp is not None or ranks.pp is not None):
        raise BadConfig(
            "the model has a SyncBatchNorm, which works with data parallelism alone; use tp 1 and pp 1 with it"
        )


def _flops(module: nn.Module, data: Sequence[Any]) -> float:
    """Returns the FLOPs of the forward and backward pass of a sample, without recomputation. The backward pass counts
    as twice the FLOPs of the forward pass."""
    inputs = data[0][0]
    return 3 * trial(module, sample_of(inputs[0] if isinstance(data, Packed) else inputs))[1]
