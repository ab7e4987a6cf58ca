"""Where a rank stands: the mesh ``(pp, dp_replicate, dp_shard, tp)``, and the part of it that each technique uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.train import watchdog
from accel.train.config import TrainConfig

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process: its rank, how many there are, its device, and its meshes (None where there is nothing to do).

    ``data``: what ZeRO works over: one axis, or replicas and shards; ranks that share sequences (``cp``) are in it too.
    ``data_rank`` of ``data_ranks``: which samples this rank sees. ``saving``: a gloo group of all.
    """

    rank: int
    world: int
    device: torch.device
    data: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    saving: dist.ProcessGroup | None = None
    data_rank: int = 0
    data_ranks: int = 1

    @property
    def averaged(self) -> int:
        """How many ranks gradients are averaged over."""
        return self.data.size() if self.data is not None else 1

    @property
    def counts(self) -> bool:
        """Whether what this rank counts is added up: ranks of one tensor-parallel group all see the same targets."""
        return self.tp is None or self.tp.get_local_rank() == 0


def patience(config: TrainConfig) -> timedelta:
    """How long ranks wait for one another in a collective: as long as whoever watches the run lets the first step take,
    so that a rank that hangs is named, and one that evaluates or writes for long isn't given up before."""
    return timedelta(seconds=max(1800.0, watchdog.START * config.hang_seconds)) if config.hang_seconds else _FOREVER


def join(config: TrainConfig) -> Ranks:
    """Join the process group that the environment describes (torchrun's variables); alone without one."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    config.validate(world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1:
        return Ranks(rank=0, world=1, device=device)
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=patience(config))
    p = config.parallel
    saving = dist.new_group(backend="gloo", timeout=patience(config))
    samples = config.data_ranks(world)
    common: dict[str, Any] = {"rank": rank, "world": world, "device": device, "saving": saving, "data_ranks": samples}
    if p.tp == p.pp == 1:
        two = p.zero > 0 and p.replicate > 1
        shape = (p.replicate, world // p.replicate) if two else (world,)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES[1:3] if two else AXES[2:3])
        cp = init_device_mesh(device.type, (samples, p.cp), mesh_dim_names=("dp", "cp"))["cp"] if p.cp > 1 else None
        return Ranks(**common, data=mesh, cp=cp, data_rank=rank // p.cp)
    # Stage 0 is FSDP2 too beside other axes, with shards over one rank, so that all parameters are of one kind.
    replicate = samples if p.zero == 0 else p.replicate
    mesh = init_device_mesh(device.type, (p.pp, replicate, samples // replicate, p.tp), mesh_dim_names=AXES)
    place = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
    return Ranks(
        **common,
        data=mesh[AXES[1:3]] if replicate > 1 else mesh["dp_shard"],
        tp=mesh["tp"] if p.tp > 1 else None,
        pp=mesh["pp"] if p.pp > 1 else None,
        data_rank=place["dp_replicate"] * (samples // replicate) + place["dp_shard"],
    )
