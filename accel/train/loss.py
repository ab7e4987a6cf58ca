"""Losses are sums with a count, so that the gradient is the same however a batch is cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from accel.errors import BadConfig

Loss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

IGNORED = -100


def seen_by(loss: Loss, outputs: torch.Tensor) -> torch.Tensor:
    """``outputs`` as ``loss`` takes them: logits that are cut along the vocabulary (a DTensor) stay so for
    ``cross_entropy``, inside torch's ``loss_parallel()``, which the backward pass needs too; any other loss sees them
    whole."""
    if isinstance(outputs, DTensor) and loss is not cross_entropy:
        return outputs.full_tensor()
    return outputs


def summed(loss: Loss, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``loss`` says of ``outputs``, as ``seen_by`` gives them. Raises ``BadConfig`` where that is no sum with its
    count."""
    found = loss(seen_by(loss, outputs), targets)
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(v, torch.Tensor) and not v.ndim for v in found):
        return found
    raise BadConfig(
        f"the loss returned {_kind(found)}; it returns the sum of the losses and how many targets it counted, two "
        "tensors of one number (docs/training.md)"
    )


def _kind(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {list(found.shape)}"
    return f"({', '.join(map(_kind, found))})" if isinstance(found, tuple) else f"a {type(found).__name__}"


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross entropies and how many targets are counted (those that aren't -100).

    ``outputs``: float[..., classes], ``targets``: int64[...]. Raises ``BadConfig`` where they are something else.
    """
    if not isinstance(outputs, torch.Tensor):
        raise BadConfig(
            f"the model returns {_kind(outputs)}, and without a loss of your own it has to return the scores of the "
            'classes; name one that takes it, loss = "FILE.py:NAME" (docs/training.md)'
        )
    if targets.is_floating_point():
        raise BadConfig(
            f"the targets are {str(targets.dtype).removeprefix('torch.')}, and without a loss of your own they have to "
            'be classes (int64); loss = "accel.train.loss:squared_error" is for numbers'
        )
    flat = targets.flatten()
    total = F.cross_entropy(outputs.flatten(0, -2).float(), flat, ignore_index=IGNORED, reduction="sum")
    return total, (flat != IGNORED).sum()


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the squared differences and the number of elements."""
    total = (outputs.float() - targets.float()).pow(2).sum()
    return total, torch.tensor(targets.numel(), device=targets.device)


def pair(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[loss, counted targets] in float64, detached."""
    both = [value.full_tensor() if isinstance(value, DTensor) else value for value in (total.detach(), count)]
    return torch.stack([value.double() for value in both])
