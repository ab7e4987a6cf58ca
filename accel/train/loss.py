"""Losses are sums with a count, so that the gradient is the same however a batch is cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

IGNORED = -100


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross entropies and how many targets are counted (those that aren't -100).

    ``outputs``: float[..., classes], ``targets``: int64[...].
    """
    flat = targets.flatten()
    total = F.cross_entropy(outputs.flatten(0, -2).float(), flat, ignore_index=IGNORED, reduction="sum")
    return total, (flat != IGNORED).sum()


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the squared differences and the number of elements."""
    total = (outputs.float() - targets.float()).pow(2).sum()
    return total, torch.tensor(targets.numel(), device=targets.device)
