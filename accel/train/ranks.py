"""Describes the position of this process among the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process, the world size, the device, and the mesh of each technique (None if unused).

    ``data`` is the mesh that ZeRO works over. The mesh ``data`` has one axis, or two axes (replicas and shards), and
    includes the ranks that share sequences (``cp``). The samples are divided into ``data_ranks`` parts, and this rank
    trains on part ``data_rank``. ``saving`` is a gloo group of all ranks. The ranks of ``ep`` hold different experts,
    and the ranks of ``beside``, which include those of ``tp``, hold the same experts.
    """

    rank: int
    world: int
    device: torch.device
    data: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    beside: DeviceMesh | None = None
    saving: dist.ProcessGroup | None = None
    data_rank: int = 0
    data_ranks: int = 1

    @property
    def averaged(self) -> int:
        """Returns the number of ranks that gradients are averaged over."""
        return self.data.size() if self.data is not None else 1

    @property
    def counts(self) -> bool:
        """Tells whether the sum over all ranks includes this rank's loss and target count.

        The ranks of a tensor-parallel group see the same targets, so only the first rank of the group is
        counted. Each context-parallel rank has other targets.
        """
        return self.tp is None or self.tp.get_local_rank() == 0
