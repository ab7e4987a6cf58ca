"""Writes and reads the tensors of a checkpoint one by one, where ``Disk`` keeps them."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from .store import Disk


def save_planner(disk: Disk | None) -> DefaultSavePlanner:
    """Returns the planner of a checkpoint's writes."""
    return DefaultSavePlanner() if disk is None else _Saving(disk)


def load_planner(disk: Disk | None) -> DefaultLoadPlanner:
    """Returns the planner of a checkpoint's reads."""
    return DefaultLoadPlanner() if disk is None else _Loading(disk)


class _Saving(DefaultSavePlanner):
    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        return self.disk.copy(found) if isinstance(found, torch.Tensor) else found


class _Loading(DefaultLoadPlanner):
    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self.disk = disk

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = super().lookup_tensor(index)
        self.disk.load([found])  # a tensor may be read in several pieces, so each piece needs the others
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:  # noqa: ARG002
        if self.disk.holds(tensor):
            self.disk.keep(tensor)
            self.disk.wait([tensor])
