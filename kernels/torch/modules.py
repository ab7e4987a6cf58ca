"""Defines the fused modules with which ``accel.fuse`` replaces Linear and Conv2d."""

from __future__ import annotations

import torch
from torch import nn

from .gemm import fused_conv2d, fused_gemm


class FusedLinear(nn.Module):
    """Computes ``act(x @ weight.T + bias) + residual`` for ``x`` (..., K) and ``weight`` (N, K), in one kernel."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, act: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.act = act

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x, weight, bias = _autocast(x, self.weight, self.bias)
        shape = (*x.shape[:-1], weight.shape[0])
        # If the residual has the output's shape and dtype, the kernel adds the residual. Otherwise, PyTorch adds the
        # residual with broadcasting and type promotion.
        inside = residual is not None and residual.shape == shape and residual.dtype == x.dtype
        flat = residual.reshape(-1, shape[-1]) if residual is not None and inside else None
        if x.numel():
            rows = x.reshape(-1, x.shape[-1])
            out = fused_gemm(rows, weight.t(), bias=bias, act=self.act, residual=flat).reshape(shape)
        else:  # no kernel takes empty tensors
            out = nn.functional.linear(x, weight, bias)
            inside = False
        return out if inside or residual is None else out + residual

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, act={self.act}, bias={self.bias is not None}"


class FusedConv2d(nn.Module):
    """Computes ``act(conv2d(x) + bias) + residual`` in one kernel. ``x`` and the result are NCHW views of NHWC memory.

    ``weight`` is (O, kernel height, kernel width, C).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        act: str,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.act = act
        self.stride, self.padding, self.dilation = stride, padding, dilation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() == 3:  # an image without a batch
            found: torch.Tensor = self(x[None], None if residual is None else residual[None])
            return found[0]
        x, weight, bias = _autocast(x, self.weight, self.bias)
        if not x.numel():  # no kernel takes empty tensors
            out = nn.functional.conv2d(x, weight.permute(0, 3, 1, 2), bias, self.stride, self.padding, self.dilation)
            return out if residual is None else out + residual
        inside = residual is not None and residual.dtype == x.dtype and residual.shape == self._shape_of(x)
        out = fused_conv2d(
            x.permute(0, 2, 3, 1),
            weight,
            bias=bias,
            act=self.act,
            residual=residual.permute(0, 2, 3, 1) if residual is not None and inside else None,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        ).permute(0, 3, 1, 2)
        return out if inside or residual is None else out + residual

    def _shape_of(self, x: torch.Tensor) -> tuple[int, ...]:
        """Returns the NCHW shape of the output for the input ``x``."""
        taps = zip(x.shape[2:], self.weight.shape[1:3], self.stride, self.padding, self.dilation, strict=True)
        sizes = ((size + 2 * pad - far * (tap - 1) - 1) // step + 1 for size, tap, step, pad, far in taps)
        return (x.shape[0], self.weight.shape[0], *sizes)

    def extra_repr(self) -> str:
        o, h, w, c = self.weight.shape
        return f"{c}, {o}, kernel=({h}, {w}), stride={self.stride}, padding={self.padding}, act={self.act}"


def _autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the operands in autocast's dtype if autocast is on. The bias is rounded too, as in Linear and Conv2d."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
