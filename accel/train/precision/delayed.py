"""Scales fp8 operands by the largest values of earlier steps (delayed scaling), so that no operand is read twice.

This is section 5 of Micikevicius et al. 2022, "FP8 Formats for Deep Learning", with the recipe of Transformer Engine:
inputs and weights are E4M3, gradients are E5M2, and a scale is the largest value of the format divided by the largest
absolute value of the last steps. All ranks have the same scales. A value that grew beyond the scale saturates. Until a
layer has a history, its scales follow the current values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The operands of a layer, each with its format.
_INPUT, _WEIGHT, _GRADIENT = range(3)
_FORMS = (E4M3, E4M3, E5M2)
# GPUs multiply fp8 in tiles of 16, so the dim that a product sums over is padded to a multiple of 16.
_TILE = 16


class History:
    """The largest absolute values of the operands of all layers: ``steps``, float32[steps, layers, 3], has those of the
    last steps, newest last."""

    def __init__(self, layers: int, length: int, device: torch.device) -> None:
        self.steps = torch.zeros(length, layers, len(_FORMS), device=device)
        self.now = torch.zeros(layers, len(_FORMS), device=device)
        self.largest = self.now.clone()

    def end_step(self) -> None:
        """Takes the largest values of a finished step over all ranks into the history."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.now, dist.ReduceOp.MAX)
        self.load(torch.cat((self.steps[1:], self.now[None])))
        self.now.zero_()

    def load(self, steps: torch.Tensor) -> None:
        """Replaces the history, as after a resume."""
        self.steps.copy_(steps)
        self.largest = self.steps.amax(0)


class Delayed:
    """The ``forward`` of the linear layer ``layer``, which is number ``index`` of ``history``."""

    def __init__(self, layer: nn.Linear, history: History, index: int) -> None:
        self.layer, self.history, self.index = layer, history, index

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            flat, weight = x.flatten(0, -2).to(dtype), self.layer.weight.to(dtype)
            found: torch.Tensor = _Product.apply(flat, weight, self)
            found = found.view(*x.shape[:-1], -1)
            return found if self.layer.bias is None else found + self.layer.bias.to(dtype)

    def low(self, value: torch.Tensor, operand: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``value`` times a scale, in the format of ``operand``, and the inverse of the scale, float32[].

        Notes the largest absolute value for later steps.
        """
        value, now = value.detach(), self.history.now[self.index, operand]
        current = value.abs().amax().float() if value.numel() else now.new_zeros(())
        torch.maximum(now, current, out=now)
        before = self.history.largest[self.index, operand]
        largest = torch.where(before > 0, before, current).clamp(min=1e-12)
        form = _FORMS[operand]
        scale = torch.finfo(form).max / largest
        most = torch.finfo(form).max
        return (value.float() * scale).clamp(-most, most).to(form), 1 / scale


class _Product(torch.autograd.Function):
    """Returns x w^T, float[rows, out] from float[rows, in] and float[out, in], with all operands in fp8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Delayed) -> torch.Tensor:
        low, by = zip(layer.low(x, _INPUT), layer.low(weight, _WEIGHT), strict=True)
        ctx.layer, ctx.dtype = layer, x.dtype
        ctx.save_for_backward(*low, *by)
        return _times(low[0], low[1], by[0], by[1], x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, by_x, by_weight = ctx.saved_tensors
        low, by = ctx.layer.low(gradient, _GRADIENT)
        to_x = _times(low, weight.T, by, by_weight, ctx.dtype)
        return to_x, _times(low.T, x.T, by, by_x, ctx.dtype), None


def _times(
    one: torch.Tensor, two: torch.Tensor, by_one: torch.Tensor, by_two: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns ``one two^T`` in ``dtype``, from fp8[rows, inner] and fp8[columns, inner], and their inverse scales."""
    if more := -one.shape[1] % _TILE:
        one, two = (F.pad(value.view(torch.uint8), (0, more)).view(value.dtype) for value in (one, two))
    return torch._scaled_mm(one.contiguous(), two.contiguous().T, scale_a=by_one, scale_b=by_two, out_dtype=dtype)
