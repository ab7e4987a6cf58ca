"""Understands models that return an object with a loss or with logits, such as the models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .batch import one_tensor
from .loss import IGNORED, Loss, cross_entropy, squared_error, summed

BUILT_IN = (cross_entropy, squared_error)


class ObjectLoss:
    """Computes the sum and the count of a loss. ``loss`` gets the model's outputs, except in two cases:

    - If ``loss`` is the default loss and the outputs have a ``loss``, takes the model's own loss. The model computed
      the mean over the counted targets, from the labels among its inputs.
    - If ``loss`` is a loss of accel and the outputs have ``logits``, ``loss`` gets the logits.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self._count: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loss not in BUILT_IN or isinstance(outputs, torch.Tensor):
            return summed(self.loss, outputs, targets)
        own, logits = getattr(outputs, "loss", None), getattr(outputs, "logits", None)
        if self.loss is not cross_entropy or not isinstance(own, torch.Tensor):
            return summed(self.loss, outputs if logits is None else logits, targets)
        targets = one_tensor(targets, "the model's own loss")
        if self._count is None:
            self._count = _count_of(own, logits, targets)
        count = self._count(targets)
        if not int(count):  # the mean of no targets is NaN
            return tensor_of(outputs).float().sum() * 0, count
        return own.float() * count, count


def tensor_of(outputs: Any) -> torch.Tensor:
    """Returns a tensor of the outputs that every parameter's gradient depends on."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    found: torch.Tensor = outputs.loss if logits is None else logits
    return found


def _count_of(own: torch.Tensor, logits: Any, targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that counts the targets which the model's mean loss ``own`` is over.

    A causal language model shifts its labels itself, so that the first label of a sequence isn't counted. Only the
    values show whether a model does so: the mean over the shifted or over the unshifted labels equals ``own``.
    """
    if targets.is_floating_point():
        return lambda labels: torch.tensor(labels.numel(), device=labels.device)
    if not isinstance(logits, torch.Tensor) or targets.dim() < 2 or logits.shape[:-1] != targets.shape:
        return _counted
    scores = logits.detach().float()
    means = [
        F.cross_entropy(some.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        for some, labels in ((scores, targets), (scores[..., :-1, :], targets[..., 1:]))
    ]
    plain, shifted = ((mean - own.detach()).abs().nan_to_num(torch.inf) for mean in means)
    return _counted if plain <= shifted else lambda labels: _counted(labels[..., 1:])


def _counted(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()
