"""The place of this process among the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process, the world size, the device, and the mesh of each technique (None if it isn't used).

    ``data``: the mesh that ZeRO works over, either one axis, or replicas and shards. Ranks that share sequences
    (``cp``) belong to it too. ``data_rank``: the part of the samples that this rank sees, out of ``data_ranks`` parts.
    ``saving``: a gloo group of all ranks.
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
        """Returns the number of ranks that gradients are averaged over."""
        return self.data.size() if self.data is not None else 1

    @property
    def counts(self) -> bool:
        """Tells whether this rank's loss and target count go into the sum over all ranks.

        The ranks of one tensor-parallel group see the same targets, so only the first of them counts.
        """
        return self.tp is None or self.tp.get_local_rank() == 0
