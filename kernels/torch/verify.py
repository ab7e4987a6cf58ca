"""Verifies a fused module: runs the fused and the original module on the same inputs, and compares their outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from accel.errors import GateFailed
from torch import nn

# The largest allowed difference for each dtype of the output, relative to the largest element of the output. In fp32,
# the limit is several hundred rounding errors. For 16-bit dtypes, the limit is four units in the last place, because
# the original module rounds every intermediate result, and the fused module rounds only once.
LIMITS = {torch.float32: 1e-4, torch.float16: 4 * 2.0**-10, torch.bfloat16: 4 * 2.0**-7}
ACTS = {
    "none": nn.Identity(),
    "relu": nn.ReLU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "gelu_erf": nn.GELU(),
    "silu": nn.SiLU(),
}


def verify_layer(
    layer: nn.Linear | nn.Conv2d, norm: nn.Module | None, act: str, fused: nn.Module
) -> tuple[float, float]:
    """Runs ``verify`` on random inputs. Compares ``fused`` with the modules ``layer``, ``norm`` and activation, which
    run one after the other."""
    before = nn.Sequential(layer, *([norm] if norm is not None else []), ACTS[act]).eval()
    shape: tuple[int, ...]
    if isinstance(layer, nn.Linear):
        shape = (4, layer.in_features)
    else:  # even without padding, the output is at least three pixels high and wide
        taps = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        shape = (2, layer.in_channels, *(far * (tap - 1) + 1 + 2 * step for tap, step, far in taps))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    return verify(before, fused, (x,))


def verify(before: nn.Module, after: nn.Module, inputs: Sequence[Any]) -> tuple[float, float]:
    """Returns the largest difference and the allowed difference, both relative to the output's largest element.

    Raises ``GateFailed`` if the difference is over the limit, or the shape or dtype differs.
    """
    with torch.no_grad():
        # Both modules get a copy of the inputs, because a module may write to its inputs.
        wanted = _tensors(before(*copy.deepcopy(tuple(inputs))))
        got = _tensors(after(*copy.deepcopy(tuple(inputs))))
    if len(got) != len(wanted):
        raise GateFailed(
            f"the fused module returns {len(got)} tensors instead of {len(wanted)}; leave this module unfused and "
            "report the error"
        )
    worst, limit = 0.0, LIMITS[torch.float32]
    for at, (reference, value) in enumerate(zip(wanted, got, strict=True)):
        if value.shape != reference.shape or value.dtype != reference.dtype:
            raise GateFailed(
                f"output {at} of the fused module has dtype {value.dtype} and shape {list(value.shape)} instead of "
                f"dtype {reference.dtype} and shape {list(reference.shape)}; leave this module unfused and report the "
                "error"
            )
        if not reference.numel():
            continue
        allowed = LIMITS.get(reference.dtype, 0.0)
        scale = max(float(reference.double().abs().max()), 1e-30)
        difference = float((value.double() - reference.double()).abs().max()) / scale
        if not difference <= allowed:
            raise GateFailed(
                f"output {at} of the fused module differs from the original by {difference:.3g} times the original's "
                f"largest element, but the limit is {allowed:.3g}; leave this module unfused and report the error"
            )
        if difference >= worst:
            worst, limit = difference, allowed
    return worst, limit


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []
