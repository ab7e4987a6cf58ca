"""Joins the process group, and slices each technique's mesh out of the mesh ``(pp, dp_replicate, dp_shard, tp)``."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from ..config.rules import check
from ..config.schema import FIRST_STEP_FACTOR, TrainConfig
from ..ranks import Ranks

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_FOREVER = timedelta(days=365)


def patience(config: TrainConfig) -> timedelta:
    """Returns the timeout of collectives, which is at least the time that the watchdog allows for the first step.

    A shorter timeout would end a collective before the watchdog names the hanging rank. Other ranks also wait in a
    collective while a rank evaluates or writes.
    """
    return timedelta(seconds=max(1800.0, FIRST_STEP_FACTOR * config.hang_seconds)) if config.hang_seconds else _FOREVER


def join(config: TrainConfig) -> Ranks:
    """Joins the process group that torchrun's environment variables describe, and returns this rank and its meshes.

    Without the variables of torchrun, the world size is 1.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check(config, world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1 and not config.parallel.disk_parameters:
        return Ranks(rank=0, world=1, device=device)
    if world == 1:  # FSDP2 gathers the shards of a single rank too
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return Ranks(rank=0, world=1, device=device, data=init_device_mesh(device.type, (1,), mesh_dim_names=AXES[2:3]))
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=patience(config))
    p = config.parallel
    saving = dist.new_group(backend="gloo", timeout=patience(config))
    samples = config.data_ranks(world)
    common: dict[str, Any] = {"rank": rank, "world": world, "device": device, "saving": saving, "data_ranks": samples}
    if p.ep > 1:
        mesh = init_device_mesh(device.type, (samples // p.ep, p.ep, p.tp), mesh_dim_names=("beside", "ep", "tp"))
        return Ranks(
            **common,
            data=mesh["beside", "ep"]._flatten("dp"),
            tp=mesh["tp"] if p.tp > 1 else None,
            ep=mesh["ep"],
            beside=mesh["beside", "tp"]._flatten("same_experts"),
            data_rank=rank // p.tp,
        )
    if p.tp == p.pp == 1:
        two = p.zero > 0 and p.replicate > 1
        shape = (p.replicate, world // p.replicate) if two else (world,)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES[1:3] if two else AXES[2:3])
        cp = init_device_mesh(device.type, (samples, p.cp), mesh_dim_names=("dp", "cp"))["cp"] if p.cp > 1 else None
        return Ranks(**common, data=mesh, cp=cp, data_rank=rank // p.cp)
    # With tp or pp, ZeRO stage 0 uses FSDP2 too, so that all parameters are DTensors. The axis dp_shard then has one
    # rank.
    averaged = samples * p.cp
    replicate = averaged if p.zero == 0 else p.replicate
    mesh = init_device_mesh(device.type, (p.pp, replicate, averaged // replicate, p.tp), mesh_dim_names=AXES)
    place = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
    cp = None
    if p.cp > 1:  # a mesh of its own, because a group of replicas may be smaller than cp
        cp = init_device_mesh(device.type, (p.pp, samples, p.cp, p.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))["cp"]
    return Ranks(
        **common,
        data=mesh[AXES[1:3]] if replicate > 1 else mesh["dp_shard"],
        tp=mesh["tp"] if p.tp > 1 else None,
        pp=mesh["pp"] if p.pp > 1 else None,
        cp=cp,
        data_rank=(place["dp_replicate"] * (averaged // replicate) + place["dp_shard"]) // p.cp,
    )
