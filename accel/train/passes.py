"""Runs the forward and backward passes of a step, one micro-batch after the other. ``parallel.pipeline`` runs the
passes of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from . import loss as losses
from .batch import Batch, call, moved, one_tensor, to_device
from .distill.teacher import Lessons
from .experts.balance import Balance
from .model_loss import ObjectLoss, tensor_of
from .parallel.batch_norm import uncounted
from .parallel.context import Cut
from .parallel.zero import micro_batch
from .precision.delayed import History
from .precision.modes import autocast, parameter_dtype
from .shards import local


class Passes(Protocol):
    """Computes the gradients of a step and puts them into the parameters' ``grad``."""

    def run(self, batches: Sequence[Batch], forth: float) -> torch.Tensor:
        """Runs the forward passes of ``batches``, multiplies the summed losses by the factor ``forth``, and runs the
        backward passes.

        Returns [sum of losses, counted targets] of this rank.
        """
        ...

    def figures(self) -> dict[str, torch.Tensor]:
        """Returns further sums over the counted targets of the last step for the log, by name."""
        ...


class Accumulated:
    """Runs one micro-batch after the other and accumulates the gradients. Under context parallelism, ``cut`` returns
    this rank's part of the targets. ``lessons`` adds the losses against a teacher, ``balance`` the losses of routers,
    and ``history`` the scales of fp8, if the run has them."""

    def __init__(
        self,
        module: nn.Module,
        loss: losses.Loss,
        *,
        zero: int,
        mode: str,
        device: torch.device,
        cut: Cut | None,
        lessons: Lessons | None = None,
        balance: Balance | None = None,
        history: History | None = None,
    ) -> None:
        self.module, self.zero, self.mode, self.device = module, zero, mode, device
        self.lessons, self.balance, self.history = lessons, balance, history
        self._watchers = [one for one in (lessons, balance) if one is not None]
        self.loss = ObjectLoss(loss)
        self.cut = cut

    def run(self, batches: Sequence[Batch], forth: float) -> torch.Tensor:
        seen = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index, (x, y) in enumerate(batches):
            apart = uncounted(self.module) if y is None else nullcontext()
            with apart, micro_batch(self.module, self.zero, last=index == len(batches) - 1):
                with autocast(self.mode, self.device.type), ExitStack() as watched:
                    for watcher in self._watchers:
                        watched.enter_context(watcher.watching())
                    outputs = call(self.module, to_device(x, self.device, parameter_dtype(self.mode)))
                if y is None:
                    if self.balance is not None:
                        self.balance.pass_by()
                    take_part(outputs)
                    continue
                targets, logits = moved(y, self.device), None
                if self.lessons is not None and self.lessons.teacher is None:
                    targets, logits = targets
                if self.cut is not None:
                    targets = self.cut.part(one_tensor(targets, "context parallel"))
                sharded = isinstance(getattr(outputs, "logits", outputs), DTensor)
                with loss_parallel() if sharded else nullcontext():
                    total, count = self.loss(outputs, targets)
                    if self.lessons is not None:
                        with autocast(self.mode, self.device.type):
                            total = self.lessons.add(x, outputs, targets, logits, total, count)
                    if self.balance is not None:
                        total = self.balance.add(total, count)
                    del outputs  # frees the step's largest tensor if the backward pass doesn't need it
                    torch.autograd.backward(total * forth)
                seen += losses.pair(total, count)
        if self.history is not None:
            self.history.end_step()
        return seen

    def figures(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for one in self._watchers:
            found |= one.figures()
        return found


def take_part(outputs: Any) -> None:
    """Runs the backward pass on a rank that has no sample, because the collectives of the other ranks wait for this
    rank."""
    whole = tensor_of(outputs)
    torch.autograd.backward((local(whole) * 0).sum())


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    """Returns the next ``count`` micro-batches."""
    return [next(batches) for _ in range(count)]
