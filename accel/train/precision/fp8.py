"""Runs the matrix products of linear layers in 8-bit floats (fp8), in the forward and backward pass.

Inputs and weights are E4M3. With one scale for a tensor (``tensorwise``), gradients are E5M2, as in Micikevicius et al.
2022, "FP8 Formats for Deep Learning", section 3. With one scale for a row of each product (``rowwise``), gradients are
E4M3 too, and scales are powers of two. A scale is the largest value of E4M3 or E5M2 divided by the largest absolute
value of the tensor or row (dynamic scaling). Weights, gradients and sums stay in the precision of the run.

On GPUs, torchao computes the products. On a CPU, which has no fp8 products, the operands are rounded to fp8 in the same
way, and the products are computed in float32. ``delayed`` has the scales of earlier steps (delayed scaling), which
torchao doesn't have.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from accel.errors import BadConfig, MissingExtra

from ..config.schema import PrecisionConfig
from .delayed import Delayed, History

# The sizes of a layer have to be multiples of this number, because GPUs multiply fp8 in tiles of 16.
_TILE = 16
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def convert(module: nn.Module, config: PrecisionConfig, device: torch.device) -> tuple[str, History | None]:
    """Changes the linear layers of ``module`` in place, so that their products run in fp8. Returns a message that names
    the layers that stay in the run's precision, and the history of delayed scaling.

    These are the layers whose names match a pattern of ``config.fp8_keep``, and the layers whose sizes aren't multiples
    of 16. Raises ``BadConfig`` if no layer is left, and ``MissingExtra`` if a GPU's torchao isn't installed.
    """
    linear = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    patterns = [pattern.strip() for pattern in config.fp8_keep.split(",") if pattern.strip()]
    kept = {
        name
        for name, part in linear.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        or part.in_features % _TILE
        or part.out_features % _TILE
    }
    if len(kept) == len(linear):
        raise BadConfig(
            f"the model has no linear layer for fp8 (sizes have to be multiples of {_TILE}, and precision.fp8_keep is "
            f"{config.fp8_keep!r}); leave out precision.fp8"
        )
    chosen = [name for name in linear if name not in kept]
    history = None
    if config.fp8 == "delayed":
        history = History(len(chosen), config.fp8_history, device)
        for index, name in enumerate(chosen):
            one: nn.Module = linear[name]
            one.forward = Delayed(linear[name], history, index)
    elif device.type == "cuda":
        _by_torchao(module, config.fp8, chosen)
    else:
        for name in chosen:
            layer: nn.Module = linear[name]
            layer.forward = _Layer(linear[name], rowwise=config.fp8 == "rowwise")
    said = f"{len(chosen)} of {len(linear)} linear layers compute in fp8"
    if kept:
        said += f"; these don't: {', '.join(sorted(kept))}"
    if chosen[-1] == [*linear][-1]:
        said += f"; if {chosen[-1]} makes the model's output, precision.fp8_keep = {chosen[-1]!r} is more exact"
    return said, history


def _by_torchao(module: nn.Module, recipe: str, chosen: Any) -> None:
    try:
        from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError as error:
        raise MissingExtra("torchao", "fp8") from error
    convert_to_float8_training(
        module,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: name in chosen,
    )


class _Layer:
    """The ``forward`` of the linear layer ``layer``, with operands rounded to fp8."""

    def __init__(self, layer: nn.Linear, *, rowwise: bool) -> None:
        self.layer, self.rowwise = layer, rowwise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            flat, weight = x.flatten(0, -2).to(dtype), self.layer.weight.to(dtype)
            found: torch.Tensor = _Product.apply(flat, weight, self.rowwise)
            found = found.view(*x.shape[:-1], -1)
            return found if self.layer.bias is None else found + self.layer.bias.to(dtype)


class _Product(torch.autograd.Function):
    """Returns x w^T, float[rows, out] from float[rows, in] and float[out, in], with all operands in fp8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rowwise: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        return _times(rounded(x, _E4M3, _dim(rowwise, 1)), rounded(weight, _E4M3, _dim(rowwise, 1)).T, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rowwise, form = ctx.rowwise, _E4M3 if ctx.rowwise else _E5M2
        # A product sums over one dim of each operand, so the scales are for the other dim.
        to_x = _times(rounded(gradient, form, _dim(rowwise, 1)), rounded(weight, _E4M3, _dim(rowwise, 0)), x.dtype)
        to_weight = rounded(gradient, form, _dim(rowwise, 0)).T, rounded(x, _E4M3, _dim(rowwise, 0))
        return to_x, _times(*to_weight, x.dtype), None


def _dim(rowwise: bool, dim: int) -> int | None:
    return dim if rowwise else None


def _times(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (one @ two).to(dtype)


def rounded(value: torch.Tensor, form: torch.dtype, dim: int | None) -> torch.Tensor:
    """Returns ``value`` rounded to the fp8 format ``form``, as float32.

    All values have one scale. With ``dim``, the values along ``dim`` have a scale of their own, which is a power of
    two.
    """
    value = value.detach().float()
    if not value.numel():
        return value
    largest = value.abs().amax() if dim is None else value.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(form).max / largest.double().clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(scale.log2().floor())
    low = (value * scale).clamp(-torch.finfo(form).max, torch.finfo(form).max).to(form)
    return low.float() / scale
