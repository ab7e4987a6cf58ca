"""Estimates the memory, the communication and the time of a training run, from a training config or a ``ModelSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from accel.errors import BadConfig
from accel.plan.search import Plan, search
from accel.plan.spec import Layout, Machine, ModelSpec
from accel.train.config.rules import check
from accel.train.config.schema import OPTIMIZERS, OptimizerConfig, ShapeConfig, TrainConfig


def plan(spec: ModelSpec, layout: Layout, machine: Machine | None = None) -> Plan:
    """Returns the memory, the communication and the time of one layout. Raises ``BadConfig`` if the layout doesn't fit
    the model."""
    return Plan.of(spec, layout, machine or Machine())


def spec_of_config(config: TrainConfig) -> ModelSpec:
    """Returns the ``ModelSpec`` of the config's model. If the config's ``[shape]`` table is complete, reads the spec
    from the table. If the table isn't complete, builds the model with the config's factories and finds missing values
    of the spec by measuring the model.

    Raises ``BadConfig`` if the ``[shape]`` table isn't complete and the config names no model.
    """
    from accel.train.distill.teacher import parameters

    shape = config.shape
    given = {name: value for name, value in vars(shape).items() if value}
    given |= {"teacher": found} if (found := parameters(config.distillation)) else {}
    if shape.params or (shape.layers and shape.hidden):
        return ModelSpec(**{"params": 0, **given})
    if not config.model:
        raise BadConfig("the config names no model; give model = 'package.module:factory' or a [shape] table")
    from accel.plan.measure import sample_of, spec_of
    from accel.train.build import make_data, make_model

    module = make_model(config.model, config.seed)
    sample: Any = None
    if config.data:
        inputs = make_data(config)[0][0]
        sample = sample_of(inputs[0] if config.pack else inputs)
    measured = spec_of(module, sample)
    return replace(measured, **experts_of(module), **given)


def experts_of(module: Any) -> dict[str, int]:
    """Returns the fields of a ``ModelSpec`` that describe the experts of ``module``."""
    from accel.train.experts.block import expert_count, expert_parameters, mixtures

    found = list(mixtures(module).values())
    if not found:
        return {}
    return {
        "mixtures": len(found),
        "experts": expert_count(found[0]),
        "top_k": int(getattr(found[0].get_submodule("gate"), "top_k", 1)),
        "expert_params": expert_parameters(module),
    }


def layout_of_config(config: TrainConfig, world: int) -> Layout:
    """Returns the layout of ``config`` on ``world`` ranks. Raises ``BadConfig`` if the layout doesn't fit the number of
    ranks."""
    check(config, world)
    p = config.parallel
    return Layout(
        world=world,
        zero=p.zero,
        tp=p.tp,
        sequence_parallel=p.sequence_parallel,
        pp=p.pp,
        cp=p.cp,
        cp_method=p.cp_method,
        ep=p.ep,
        replicate=p.replicate,
        hpz=p.hpz,
        qwz=p.qwz,
        qgz=p.qgz,
        precision=config.precision.resolved,
        optimizer=_optimizer(config),
        micro_batch=config.micro_batch,
        accumulation=config.accumulation(world),
        recompute=p.recompute,
        pipeline=p.pipeline,
        offload=p.offload,
        disk=p.disk,
        disk_parameters=p.disk_parameters,
    )


def search_for_config(
    config: TrainConfig, machine: Machine, world: int, fixed: Mapping[str, Any] | None = None
) -> list[Plan]:
    """Returns the plans of every layout that fits, fastest first, for the config's model and global batch.

    ``fixed`` maps fields of ``Layout`` to required values. Every layout keeps the config's settings for replicas,
    ZeRO++, offload and disk. If the config turns off sequence parallelism, no layout uses sequence parallelism. Raises
    ``BadConfig`` if no layout fits.
    """
    p, usual = config.parallel, type(config.parallel)()
    kept = {
        name: getattr(p, name)
        for name in ("replicate", "hpz", "qwz", "qgz", "offload", "disk", "disk_parameters", "sequence_parallel")
        if getattr(p, name) != getattr(usual, name)
    }
    found = search(
        spec_of_config(config),
        machine,
        world=world,
        global_batch=config.global_batch,
        precision=config.precision.resolved,
        optimizer=_optimizer(config),
        pipeline=config.parallel.pipeline,
        fixed=kept | dict(fixed or {}),
    )
    return [one for one in found if _runs(config_of(one, config), world)]


def config_of(chosen: Plan, base: TrainConfig | None = None) -> TrainConfig:
    """Returns ``base`` with the plan's layout. Without ``base``, makes a training config with the plan's layout and
    shape."""
    layout, spec = chosen.layout, chosen.spec
    if base is None:
        shape = ShapeConfig(**{field.name: getattr(spec, field.name) for field in fields(ShapeConfig)})
        chosen_optimizer = OptimizerConfig.planned(layout.optimizer)
        if layout.precision == "fp16-only":  # the usual eps is 0 in float16
            chosen_optimizer = replace(chosen_optimizer, eps=1e-4)
        base = TrainConfig(optimizer=chosen_optimizer, shape=shape)
    return replace(
        base,
        global_batch=layout.global_batch,
        micro_batch=layout.micro_batch,
        precision=base.precision
        if base.precision.resolved == layout.precision
        else replace(base.precision, mode=layout.precision),
        parallel=replace(
            base.parallel,
            zero=layout.zero,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            cp_method=layout.cp_method,
            ep=layout.ep,
            hpz=layout.hpz,
            qwz=layout.qwz,
            qgz=layout.qgz,
            pipeline=layout.pipeline,
            recompute=layout.recompute,
            replicate=layout.replicate,
            offload=layout.offload,
            disk=layout.disk,
            disk_parameters=layout.disk_parameters,
        ),
    )


def _runs(config: TrainConfig, world: int) -> bool:
    try:
        check(config, world)
    except BadConfig:
        return False
    return True


def _optimizer(config: TrainConfig) -> str:
    if config.optimizer.name == "sgd":
        return "momentum" if config.optimizer.momentum else "sgd"
    # The other optimizers of torch have one or two moments, and are planned as adamw, which has two.
    return config.optimizer.name if config.optimizer.name in OPTIMIZERS else "adamw"
