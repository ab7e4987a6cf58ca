"""Computes losses. Each loss is a sum and a count, so that the gradient doesn't depend on how a batch is split."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from accel.errors import BadConfig, BadData, kind_of

Loss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

IGNORED = -100


def seen_by(loss: Loss, outputs: torch.Tensor) -> torch.Tensor:
    """Returns ``outputs`` as whole tensors, or unchanged if ``loss`` is ``cross_entropy``.

    ``cross_entropy`` takes logits that are sharded along the vocabulary (a DTensor). ``cross_entropy`` and its backward
    pass run inside torch's ``loss_parallel()``. A loss other than ``cross_entropy`` gets whole tensors.
    """
    if isinstance(outputs, DTensor) and loss is not cross_entropy:
        return outputs.full_tensor()
    return outputs


def summed(loss: Loss, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum and the count that ``loss`` computes from ``outputs`` and ``targets``.

    Raises ``BadConfig`` if ``loss`` doesn't return a tuple of two tensors with one number each.
    """
    found = loss(seen_by(loss, outputs), targets)
    if isinstance(found, tuple) and len(found) == 2 and all(isinstance(v, torch.Tensor) and not v.ndim for v in found):
        return found
    raise BadConfig(
        f"the loss returned {_kind(found)}; return two tensors of one number each: the sum of the losses "
        "and the number of counted targets (docs/how-to/training.md)"
    )


def _kind(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {list(found.shape)}"
    return f"({', '.join(map(_kind, found))})" if isinstance(found, tuple) else kind_of(found)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the cross entropies and the number of counted targets. Targets of -100 aren't counted.

    ``outputs`` must be float[..., classes] and ``targets`` integers[...], else ``BadConfig`` is raised.
    """
    if not isinstance(outputs, torch.Tensor):
        raise BadConfig(
            f"the model returns {_kind(outputs)}, but the default loss takes a tensor of class scores, or an object "
            "with a loss or with logits; "
            'name a loss of your own with loss = "FILE.py:NAME" (docs/how-to/training.md)'
        )
    if targets.is_floating_point():
        raise BadConfig(
            f"the targets are {str(targets.dtype).removeprefix('torch.')}, but the default loss takes class numbers "
            '(int64); for a regression, use loss = "accel.train.loss:squared_error"'
        )
    flat = targets.flatten().long()
    total = F.cross_entropy(outputs.flatten(0, -2).float(), flat, ignore_index=IGNORED, reduction="sum")
    return total, (flat != IGNORED).sum()


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the squared differences and the number of elements.

    Raises ``BadData`` if the shapes differ, because torch would compare each output with each target.
    """
    if outputs.shape != targets.shape:
        raise BadData(
            f"the model returns the shape {list(outputs.shape)}, but the targets of the batch have the shape "
            f"{list(targets.shape)}; let each sample have targets of the shape {list(outputs.shape[1:])}, or change "
            "the model"
        )
    total = (outputs.float() - targets.float()).pow(2).sum()
    return total, torch.tensor(targets.numel(), device=targets.device)


def pair(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns [sum of losses, counted targets] as a detached float64 tensor."""
    both = [value.full_tensor() if isinstance(value, DTensor) else value for value in (total.detach(), count)]
    return torch.stack([value.double() for value in both])
