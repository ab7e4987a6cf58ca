"""Converts between a DTensor and the part of it that this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of ``tensor``, which shares its memory. Returns a plain ``tensor`` itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_layout(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of which every rank has a ``part``, with the layout and the shape of ``whole``. Returns
    ``part`` itself if ``whole`` is plain."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
