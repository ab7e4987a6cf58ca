"""Converts the dims of a signature for ``torch.export``."""

from __future__ import annotations

import torch

from accel.signature import DimRange


def export_dim(name: str, bounds: DimRange, *, open_end: bool = False) -> torch.export.Dim:
    """Returns a ``torch.export.Dim`` with the name ``name`` and the range ``bounds``. If ``open_end`` is True, the dim
    has no upper bound. A dim with a step becomes ``step`` times another dim, so that the exported program records the
    step.
    """
    step = bounds.step
    most = None if open_end else bounds.max // step
    steps = torch.export.Dim(name if step == 1 else f"_{name}", min=bounds.min // step, max=most)
    return steps if step == 1 else step * steps
