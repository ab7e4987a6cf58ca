"""The forward and backward passes of a step, micro-batches in turn; pipelines have ``accel.train.pipeline``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from accel.errors import BadConfig
from accel.train import loss as losses
from accel.train.context_parallel import part
from accel.train.inputs import call, moved, to_device
from accel.train.precision import autocast, parameter_dtype
from accel.train.zero import micro_batch

# Inputs and targets, each one tensor, a tuple or a dict of them; no targets where a rank only takes part.
Batch = tuple[Any, Any]


class Passes(Protocol):
    """What leaves the gradients of a step in the parameters."""

    def run(self, batches: Sequence[Batch], forth: float) -> torch.Tensor:
        """Forward and backward of ``forth`` times the sum of the losses; [sum of losses, counted targets] of this
        rank."""
        ...


class Accumulated:
    """Micro-batches in turn, gradients accumulated."""

    def __init__(
        self, module: nn.Module, loss: losses.Loss, *, zero: int, mode: str, device: torch.device, cp: DeviceMesh | None
    ) -> None:
        self.module, self.loss, self.zero, self.mode, self.device = module, loss, zero, mode, device
        self.cp = cp

    def run(self, batches: Sequence[Batch], forth: float) -> torch.Tensor:
        seen = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index, (x, y) in enumerate(batches):
            with micro_batch(self.module, self.zero, last=index == len(batches) - 1):
                with autocast(self.mode, self.device.type):
                    outputs = call(self.module, to_device(x, self.device, parameter_dtype(self.mode)))
                if y is None:
                    take_part(outputs)
                    continue
                targets = moved(y, self.device)
                if self.cp is not None:
                    targets = part(one_tensor(targets, "context parallel"), self.cp)
                with loss_parallel() if isinstance(outputs, DTensor) else nullcontext():
                    total, count = losses.summed(self.loss, outputs, targets)
                    del outputs  # the largest tensor there is; what the backward pass needs of it, the loss has kept
                    torch.autograd.backward(total * forth)
                seen += losses.pair(total, count)
        return seen


def one_tensor(targets: Any, who: str) -> torch.Tensor:
    """``targets``, where they are one. Raises ``BadConfig``."""
    if not isinstance(targets, torch.Tensor):
        raise BadConfig(f"{who} cuts targets; let the data give them as one tensor, no tuple or dict")
    return targets


def take_part(outputs: torch.Tensor) -> None:
    """The backward pass of a rank that has no sample left: the others wait for it in their collectives."""
    local = outputs.to_local() if isinstance(outputs, DTensor) else outputs
    torch.autograd.backward((local * 0).sum())


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    """The next ``count`` micro-batches."""
    return [next(batches) for _ in range(count)]
