"""The dims of a signature as ``torch.export`` has them."""

from __future__ import annotations

import torch

from accel.signature import DimRange


def export_dim(name: str, bounds: DimRange, *, open_end: bool = False) -> torch.export.Dim:
    """``bounds`` under ``name``. Of a dim that goes in steps, a multiple of their number, in which whoever reads the
    program finds the step."""
    step = bounds.step
    most = None if open_end else bounds.max // step
    steps = torch.export.Dim(name if step == 1 else f"_{name}", min=bounds.min // step, max=most)
    return steps if step == 1 else step * steps
