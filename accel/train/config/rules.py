"""Checks that a config can run, without torch or a process group. Each message names a problem and its fix in one
sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from accel.errors import BadConfig
from accel.plan.rules import Axes, fit_problems, layout_problems, shape_problems

from .schema import APEX, COMPRESSION, FP8, MODES, OPTIMIZERS, SCHEDULES, SPLITS, STYLES, TrainConfig


def check(config: TrainConfig, world_size: int) -> None:
    """Raises ``BadConfig`` with the first problem of ``config`` on ``world_size`` ranks."""
    for problem in problems(config, world_size):
        raise BadConfig(problem)


def problems(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Yields a message for each problem of ``config`` on ``world_size`` ranks, with the fix."""
    yield from _names(config)
    yield from _numbers(config)
    yield from _layout(config, world_size)


def runnable(config: TrainConfig) -> None:
    """Raises ``BadConfig`` if ``config`` lacks keys that a run needs. ``accel plan`` doesn't need these keys."""
    for problem in missing(config):
        raise BadConfig(problem)


def missing(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each key that ``config`` lacks and a run needs."""
    if not config.model or not config.data:
        yield (
            "the config needs the keys model and data; write model = 'package.module:factory', and data the same way "
            "(docs/how-to/training.md)"
        )
    if config.parallel.tp > 1 and not config.tensor_parallel:
        yield (
            "tensor parallelism needs a plan of the modules to split; write a table [tensor_parallel] with e.g. "
            '"blocks.*.attention.query" = "column"'
        )


# The weights of the losses, in the table ``[distillation]``.
_LESSONS = ("logits", "hidden", "attention", "targets")


def _names(config: TrainConfig) -> Iterator[str]:
    choices = (
        ("precision.mode", config.precision.mode, (*MODES, *APEX)),
        ("precision.fp8", config.precision.fp8, FP8),
        ("parallel.pipeline_split", config.parallel.pipeline_split, SPLITS),
        ("parallel.compression", config.parallel.compression, COMPRESSION),
    )
    for key, value, known in choices:
        if value not in known:
            yield f"{key} is {value!r}; use one of {', '.join(known)}"
    dotted = (
        ("optimizer", config.optimizer.name, OPTIMIZERS, "torch.optim.RMSprop"),
        ("schedule", config.schedule.name, SCHEDULES, "torch.optim.lr_scheduler.StepLR"),
    )
    for key, value, known, example in dotted:
        if value not in known and "." not in value:
            yield f"{key}.name is {value!r}; use one of {', '.join(known)}, or a class such as {example}"
    if config.schedule.name in SCHEDULES and config.schedule.options:
        yield f"schedule.options are for a schedule of torch, not for {config.schedule.name}; leave them out"
    if config.schedule.name not in SCHEDULES and config.schedule.floor:
        yield f"schedule.floor isn't used by {config.schedule.name}; leave it out, or use a schedule of accel"
    for pattern, style in config.tensor_parallel.items():
        if style not in STYLES:
            yield f"tensor_parallel.{pattern!r} is {style!r}; use one of {', '.join(STYLES)}"


def _numbers(config: TrainConfig) -> Iterator[str]:
    positive = {
        "steps": config.steps,
        "log_every": config.log_every,
        "parallel.compression_rank": config.parallel.compression_rank,
        "optimizer.lr": config.optimizer.lr,
        "checkpoint.keep": config.checkpoint.keep,
        "precision.loss_scale": config.precision.loss_scale,
        "precision.fp8_history": config.precision.fp8_history,
        "precision.growth_interval": config.precision.growth_interval,
        "distillation.temperature": config.distillation.temperature,
    }
    for key, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            yield f"{key} is {value}; it has to be more than 0"
    not_negative = {
        "evaluate_every": config.evaluate_every,
        "hang_seconds": config.hang_seconds,
        "peak_flops": config.peak_flops,
        "loader_processes": config.loader_processes,
        "pack": config.pack,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip": config.optimizer.clip,
        "schedule.warmup": config.schedule.warmup,
        "schedule.floor": config.schedule.floor,
        "checkpoint.every": config.checkpoint.every,
        "parallel.compression_start": config.parallel.compression_start,
        **{f"experts.{name}": value for name, value in vars(config.experts).items()},
        **{f"distillation.{name}": getattr(config.distillation, name) for name in _LESSONS},
    }
    for key, value in not_negative.items():
        if not (value >= 0 and math.isfinite(value)):
            yield f"{key} is {value}; it can't be negative"
    if not config.evaluate and config.checkpoint.best:
        yield (
            f"checkpoint.best is {config.checkpoint.best!r}, and nothing measures it; give evaluate, or "
            "pass --checkpoint.best= to turn it off"
        )
    if not config.evaluate and config.evaluate_every:
        yield f"evaluate_every is {config.evaluate_every}, and there is nothing to run; give evaluate a function"
    if config.schedule.warmup >= config.steps:
        yield f"schedule.warmup is {config.schedule.warmup} of {config.steps} steps; leave steps after the warm-up"
    if (
        config.precision.resolved == "fp16-only"
        and config.optimizer.name in ("adam", "adamw")
        and config.optimizer.eps < 1e-7
    ):
        yield f"optimizer.eps {config.optimizer.eps:g} is 0 in float16; use --optimizer.eps=1e-4 with fp16-only"


def _layout(config: TrainConfig, world_size: int) -> Iterator[str]:
    p, shape = config.parallel, config.shape
    yield from shape_problems(**vars(shape))
    shared = {field.name: getattr(p, field.name) for field in fields(Axes) if hasattr(p, field.name)}
    yield from layout_problems(Axes(world=world_size, micro_batch=config.micro_batch, **shared), config.global_batch)
    if min(p.tp, p.pp, p.cp) >= 1:
        sizes = {name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "seq")}
        kinds = {"ring": p.cp_method == "ring", "sequence": p.sequence_parallel}
        yield from fit_problems(tp=p.tp, pp=p.pp, cp=p.cp, **kinds, **sizes)
    yield from _combinations(config)
    yield from _distillation(config)
    yield from _experts(config)


def _experts(config: TrainConfig) -> Iterator[str]:
    p = config.parallel
    if config.experts != type(config.experts)() and p.pp * p.cp > 1:
        yield "the losses and the capacity of experts don't work with pp and cp; use pp 1 and cp 1 with [experts]"
    if p.ep > 1 and (config.compile or not config.drop_last):
        yield "expert parallel can't be combined with compile or smaller batches; use drop_last = true and no compile"


def _distillation(config: TrainConfig) -> Iterator[str]:
    told, p = config.distillation, config.parallel
    if not told.teacher:
        if told != type(told)():
            yield "[distillation] names no teacher; give distillation.teacher, or leave out the table"
        return
    if not told.logits + told.hidden + told.attention > 0:
        yield "nothing of the teacher is used; give distillation.logits, hidden or attention a weight above 0"
    if p.tp * p.pp * p.cp > 1 or config.pack:
        yield "distillation needs whole models and samples; use tp 1, pp 1, cp 1 and pack 0 with it"
    if config.compile and told.hidden + told.attention > 0:
        yield "compiled blocks don't show hidden states and attention; use compile = false with them"
    if p.recompute != "none" and told.attention > 0:
        yield "attention isn't kept under recomputation; use parallel.recompute = none with distillation.attention"


def _combinations(config: TrainConfig) -> Iterator[str]:
    p = config.parallel
    if p.compression != "none" and (p.zero or p.tp * p.pp > 1):
        yield "only DDP can compress gradients; use parallel.zero = 0, tp 1 and pp 1 with compression"
    if p.sync_batchnorm and p.tp * p.pp > 1:
        yield "sync_batchnorm works with data-parallel ranks only; use tp 1 and pp 1 with it"
    if config.compile and p.tp * p.pp * p.cp > 1:
        yield "compiled blocks can't be combined with tp, pp or cp; use compile = false with them"
    if config.precision.fp8 != "none" and (p.tp * p.pp > 1 or "fp16" in config.precision.resolved):
        yield "fp8 works with whole layers in fp32 or bf16; use tp 1, pp 1 and a bf16 precision.mode with precision.fp8"
    if config.pack and (config.compile or p.pp * p.cp > 1):
        yield "packing needs the whole, uncompiled model on a rank; use pp 1, cp 1 and compile = false with pack"
    if not config.drop_last and p.pp > 1:
        yield "the micro-batches of a pipeline must all have the same size; use drop_last = true with pp"
    if p.compression == "powersgd" and "fp16" in config.precision.resolved:
        yield "PowerSGD would carry an fp16 overflow into the next step; use a bf16 precision.mode with PowerSGD"
