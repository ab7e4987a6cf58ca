"""Writes gradients to the disk as soon as they are reduced (Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU
Memory Wall for Extreme Scale Deep Learning", section 5.1).

FSDP2 reduces the gradients of a block at the end of the block's backward pass, and hands them over one by one. The
optimizer's step reads them back, a part at a time. The norm of a gradient is taken before it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ..shards import local
from .store import Disk


class Gradients:
    """The gradients of ``parameters``, which FSDP2 has sharded. ``norms`` has the 2-norm of each gradient of this rank
    in a step, by the number of its parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], disk: Disk) -> None:
        self.parameters, self.disk = parameters, disk
        self._places: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._last: torch.Tensor | None = None
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))

    @property
    def norms(self) -> Mapping[int, torch.Tensor]:
        return self._norms

    @torch.no_grad()
    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Adds the gradient of a micro-batch to the gradient on the disk."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        place = self._places.get(index)
        if place is None:
            place = self._places[index] = torch.empty_like(gradient)
        if index in self._norms:
            self.disk.load([place])
            local(place).add_(local(gradient))
        else:
            self.disk.renew(place)
            local(place).copy_(local(gradient))
        self._norms[index] = torch._foreach_norm([local(place)], 2, dtype=torch.float32)[0]
        self.disk.keep(place)
        if self._last is not None:  # so that a slow disk doesn't fill the memory
            self.disk.wait([self._last])
        self._last = place

    def give(self) -> None:
        """Makes each parameter's ``grad`` the tensor on the disk, until ``drop``."""
        for index in self._norms:
            self.parameters[index].grad = self._places[index]

    def drop(self) -> None:
        """Gives up the values of this step."""
        self._norms.clear()
