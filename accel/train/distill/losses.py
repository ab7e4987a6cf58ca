"""Computes how far a student is from its teacher. Each loss is a sum over the counted positions, like the losses of
``accel.train.loss``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from accel.errors import BadConfig

from ..loss import IGNORED


def of_logits(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns T^2 KL(teacher || student) of each position, float[...] from logits float[..., classes].

    Both distributions are softened by the temperature T. The factor T^2 keeps the size of the gradients (Hinton et al.
    2015, "Distilling the Knowledge in a Neural Network", section 2). Raises ``BadConfig`` for logits of another shape.
    """
    if student.shape != teacher.shape:
        raise BadConfig(
            f"the teacher's logits have the shape {list(teacher.shape)} and the student's {list(student.shape)}; take "
            "a teacher with the same classes, or use distillation.logits = 0"
        )
    wanted = F.log_softmax(teacher.float() / temperature, -1)
    found = F.log_softmax(student.float() / temperature, -1)
    return F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1) * temperature**2


def of_hidden(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared difference of the hidden states at each position, float[...] from float[..., width]
    (Jiao et al. 2020, "TinyBERT", equation 9, for equal widths). Raises ``BadConfig`` for other shapes."""
    if student.shape != teacher.shape:
        raise BadConfig(
            f"a hidden state of the teacher has the shape {list(teacher.shape)} and the student's "
            f"{list(student.shape)}; take a teacher of the same width, or use distillation.hidden = 0"
        )
    return (student.float() - teacher.float()).pow(2).mean(-1)


def of_attention(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns KL(teacher || student) of the attention at each position, as the mean over the heads: float[batch,
    positions] from log-probabilities float[batch, heads, positions, positions] (Wang et al. 2020, "MiniLM", equation
    4). If the numbers of heads differ, the probabilities are first averaged over the heads."""
    if student.shape[0] != teacher.shape[0] or student.shape[2:] != teacher.shape[2:]:
        raise BadConfig(
            f"the teacher's attention has the shape {list(teacher.shape)} and the student's {list(student.shape)}; "
            "take a teacher that cuts the inputs into the same positions, or use distillation.attention = 0"
        )
    if student.shape[1] != teacher.shape[1]:
        student, teacher = (logs.exp().mean(1, keepdim=True).clamp_min(1e-30).log() for logs in (student, teacher))
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1).mean(1)


def over_counted(positions: torch.Tensor, targets: Any, count: torch.Tensor) -> torch.Tensor:
    """Returns the mean of ``positions`` times ``count``, the number of targets that the loss counted.

    If every position has a target that is a class number, takes the mean over the positions whose target isn't -100.
    """
    if isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.shape == positions.shape:
        counted = targets != IGNORED
        # Positions that aren't counted may hold NaN, such as attention that is masked everywhere.
        return torch.where(counted, positions, 0.0).sum() * (count / counted.sum().clamp(min=1))
    return positions.mean() * count
