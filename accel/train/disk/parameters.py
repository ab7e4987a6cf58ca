"""Keeps the shards of parameters on the disk, except while FSDP2 gathers them (Rajbhandari et al. 2021, "ZeRO-Infinity:
Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 5.1).

FSDP2 reads the shards of a block only when it gathers the block's parameters. So the shards are read just before, and
freed right after. The shards of the next block in the order of the pass are read ahead. Only the optimizer's step
changes shards and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .store import Disk


def park(module: nn.Module, disk: Disk) -> None:
    """Moves the shards of ``module``, which FSDP2 has sharded, to the disk, and reads them where they are gathered."""
    groups = [
        group
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    units = [_Unit(group, disk) for group in groups]
    for index, unit in enumerate(units):
        unit.group._reset_sharded_params = True  # at the first pass, FSDP2 would compare the shards with its own
        unit.around = units[index - 1] if index else None, units[index + 1] if index + 1 < len(units) else None
        for tensor in unit.shards:
            disk.keep(tensor)
        disk.wait(unit.shards)


class _Unit:
    """Parameters that FSDP2 gathers together. ``around`` are the units before and after this unit."""

    def __init__(self, group: Any, disk: Disk) -> None:
        self.group, self.disk = group, disk
        self.around: tuple[_Unit | None, _Unit | None] = (None, None)
        self._unshard, self._wait = group.unshard, group.wait_for_unshard
        # FSDP2 has no hook before it reads the shards.
        group.unshard, group.wait_for_unshard = self.unshard, self.wait_for_unshard

    @property
    def shards(self) -> Sequence[torch.Tensor]:
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    def unshard(self, async_op: bool = False) -> None:
        if self.group.is_unsharded or self.group._all_gather_result is not None:
            return
        several = self.group._all_gather_process_group.size() > 1
        if several:
            self.disk.load(self.shards)
        self._unshard(async_op)
        if several:
            self.disk.release(self.shards)
        self._read_ahead()

    def wait_for_unshard(self) -> None:
        alone = self.group._all_gather_result is not None and self.group._all_gather_process_group.size() == 1
        if alone:  # FSDP2 reads the shards of a single rank here
            self.disk.load(self.shards)
        self._wait()
        if alone:
            self.disk.release(self.shards)

    def _read_ahead(self) -> None:
        backward = torch._C._current_graph_task_id() != -1
        following = self.around[0 if backward else 1]
        if following is not None and not following.group.is_unsharded:
            self.disk.fetch(following.shards)
