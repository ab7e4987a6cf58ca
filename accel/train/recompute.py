"""Implements activation checkpointing. Blocks store few activations, and run again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel.plan.measure import blocks

# "selective" keeps the results of matrix products and of attention. Elementwise operations run again.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute(module: nn.Module, mode: str) -> None:
    """Changes ``module`` in place, so that its blocks run again in the backward pass. Parameter names don't change.

    The mode ``full`` keeps only the input of a block, ``selective`` also keeps the results of matrix products and
    attention, and ``none`` changes nothing.
    """
    if mode == "none":
        return
    context: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    )
    for block in blocks(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
