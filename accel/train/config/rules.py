"""Checks that a config can run, without torch or a process group. Each message names a problem and its fix in one
sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from accel.errors import BadConfig

from .schema import APEX, COMPRESSION, MODES, OPTIMIZERS, PIPELINES, RECOMPUTE, SCHEDULES, STYLES, TrainConfig


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
    if not config.model or not config.data:
        raise BadConfig(
            "the config needs the keys model and data; write model = 'package.module:factory', and data the same way "
            "(docs/how-to/training.md)"
        )
    if config.parallel.tp > 1 and not config.tensor_parallel:
        raise BadConfig(
            "tensor parallelism needs a plan of the modules to split; write a table [tensor_parallel] with e.g. "
            '"blocks.*.attention.query" = "column"'
        )


def _names(config: TrainConfig) -> Iterator[str]:
    choices = (
        ("precision.mode", config.precision.mode, (*MODES, *APEX)),
        ("optimizer.name", config.optimizer.name, OPTIMIZERS),
        ("schedule.name", config.schedule.name, SCHEDULES),
        ("parallel.recompute", config.parallel.recompute, RECOMPUTE),
        ("parallel.compression", config.parallel.compression, COMPRESSION),
        ("parallel.pipeline", config.parallel.pipeline, PIPELINES),
    )
    for key, value, known in choices:
        if value not in known:
            yield f"{key} is {value!r}; use one of {', '.join(known)}"
    for pattern, style in config.tensor_parallel.items():
        if style not in STYLES:
            yield f"tensor_parallel.{pattern!r} is {style!r}; use one of {', '.join(STYLES)}"
    if config.parallel.zero not in (0, 1, 2, 3):
        yield f"parallel.zero is {config.parallel.zero}; ZeRO has the stages 0, 1, 2 and 3"


def _numbers(config: TrainConfig) -> Iterator[str]:
    positive = {
        "steps": config.steps,
        "global_batch": config.global_batch,
        "micro_batch": config.micro_batch,
        "log_every": config.log_every,
        "parallel.replicate": config.parallel.replicate,
        "parallel.tp": config.parallel.tp,
        "parallel.pp": config.parallel.pp,
        "parallel.cp": config.parallel.cp,
        "parallel.compression_rank": config.parallel.compression_rank,
        "optimizer.lr": config.optimizer.lr,
        "checkpoint.keep": config.checkpoint.keep,
        "precision.loss_scale": config.precision.loss_scale,
        "precision.growth_interval": config.precision.growth_interval,
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
    if config.precision.resolved == "fp16-only" and config.optimizer.name != "sgd" and config.optimizer.eps < 1e-7:
        yield f"optimizer.eps {config.optimizer.eps:g} is 0 in float16; use --optimizer.eps=1e-4 with fp16-only"


def _layout(config: TrainConfig, world_size: int) -> Iterator[str]:
    p = config.parallel
    if world_size < 1:
        yield f"the world size is {world_size}; give at least one rank"
        return
    if min(p.tp, p.pp, p.cp, p.replicate) < 1 or config.micro_batch < 1:
        return
    fixed = p.tp * p.pp * p.cp
    if world_size % fixed:
        shape = f"tp {p.tp} x pp {p.pp}" + (f" x cp {p.cp}" if p.cp > 1 else "")
        yield f"{world_size} ranks don't divide into {shape}; use a multiple of {fixed} ranks"
        return
    data = config.data_ranks(world_size)
    if data * p.cp % p.replicate:
        shards = data * p.cp
        yield f"{shards} data-parallel ranks don't divide into {p.replicate} replicas; use a divisor of {shards}"
    if p.cp > 1 and fixed > p.cp:
        yield "context parallel can't be combined with tensor or pipeline parallel; use tp 1 and pp 1 with cp"
    if p.compression != "none" and (p.zero or p.tp * p.pp > 1):
        yield "only DDP can compress gradients; use parallel.zero = 0, tp 1 and pp 1 with compression"
    if (p.hpz or p.qwz or p.qgz) and p.zero != 3:
        yield "hpz, qwz and qgz are parts of ZeRO++, which works at stage 3; use parallel.zero = 3 with them"
    if (p.hpz or p.qwz or p.qgz) and p.tp * p.cp > 1:
        yield "ZeRO++ works with data-parallel ranks only; use tp 1 and cp 1 with hpz, qwz and qgz"
    shards = data * p.cp // p.replicate
    if p.hpz and (shards % p.hpz or not 1 < p.hpz < shards):
        yield f"hpz {p.hpz} can't group {shards} shards; use a divisor of {shards} between 1 and {shards}, or 0"
    if p.sync_batchnorm and p.tp * p.pp > 1:
        yield "sync_batchnorm works with data-parallel ranks only; use tp 1 and pp 1 with it"
    if config.compile and p.tp * p.pp * p.cp > 1:
        yield "compiled blocks can't be combined with tp, pp or cp; use compile = false with them"
    if config.pack and (config.compile or p.pp * p.cp > 1):
        yield "packing needs the whole, uncompiled model on a rank; use pp 1, cp 1 and compile = false with pack"
    if not config.drop_last and p.pp > 1:
        yield "the micro-batches of a pipeline must all have the same size; use drop_last = true with pp"
    if p.compression == "powersgd" and "fp16" in config.precision.resolved:
        yield "PowerSGD would carry an fp16 overflow into the next step; use a bf16 precision.mode with PowerSGD"
    if config.global_batch % (config.micro_batch * data):
        step = config.micro_batch * data
        best = max(step, config.global_batch // step * step)
        yield (
            f"global_batch {config.global_batch} is not a multiple of micro_batch {config.micro_batch} x {data} "
            f"data-parallel ranks; use --global-batch={best}"
        )
    if p.pp > 1 and p.zero == 3:
        yield "ZeRO 3 would gather all parameters for every micro-batch of a pipeline; use parallel.zero = 2 with pp"
    yield from _pipeline(config, world_size)
    if p.pp > 1 and config.shape.layers and config.shape.layers < p.pp:
        yield f"{config.shape.layers} layers can't be cut into {p.pp} pipeline stages; use a smaller pp"
    heads, kv_heads, seq = config.shape.heads, config.shape.kv_heads, config.shape.seq
    if heads % p.tp or kv_heads % p.tp:
        grouped = f" ({kv_heads} of keys and values)" if kv_heads else ""
        yield f"tp {p.tp} must divide the {heads} heads{grouped}; use a divisor"
    if heads % p.cp or kv_heads % p.cp or seq % p.cp:
        yield (
            f"cp {p.cp} must divide the {heads} heads ({kv_heads or heads} of keys and values) and the sequence of "
            f"{seq}; use a common divisor"
        )
    if p.offload and p.zero == 0:
        yield "CPU offload needs shards, which ZeRO 0 doesn't have; use parallel.zero = 3"


def _pipeline(config: TrainConfig, world_size: int) -> Iterator[str]:
    p, batches = config.parallel, config.accumulation(world_size)
    if p.pp == 1:
        return
    if batches < p.pp:
        yield (
            f"{batches} micro-batches a step leave most of {p.pp} pipeline stages idle; use --micro-batch="
            f"{max(1, config.global_batch // (config.data_ranks(world_size) * p.pp))}, or a larger global_batch"
        )
    elif p.pipeline == "interleaved" and batches % (batches // p.pp):
        yield f"interleaved needs whole rounds of {p.pp} micro-batches, not {batches}; use a multiple of {p.pp}"
