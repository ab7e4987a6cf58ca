"""Finds out whether a model computes gradients when it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch


def computes_gradients(run: Callable[[], object]) -> bool:
    """Tells whether ``run``, which calls a model, computes gradients, such as forces from an energy. PyTorch runs such
    a model, but can't export it."""
    read = False

    def unpack(tensor: torch.Tensor) -> torch.Tensor:  # called for each tensor that a gradient is computed from
        nonlocal read
        read = True
        return tensor

    with suppress(Exception), torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda one: one, unpack):
        run()
    return read
