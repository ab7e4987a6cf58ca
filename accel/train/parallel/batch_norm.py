"""Lets batch norm use the statistics of all data-parallel ranks instead of each rank's own.

On CUDA, this is torch's SyncBatchNorm, which works on GPUs only. ``SyncedBatchNorm`` works on any device, and with
ranks that have fewer samples than others, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accel.errors import BadConfig

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# With fewer samples on a rank, the statistics of a rank differ much from the statistics of all ranks.
_SMALL = 16


class SyncedBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks, after a call of ``join``. Until then, over the samples of this rank.

    If ``counted`` is False, this rank's samples aren't part of the statistics.
    """

    joined = False
    counted = True

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes inputs of at least 2 dims, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.joined and self.training):
            alone: torch.Tensor = super().forward(input)
            return alone
        self._check_input_dim(input)
        found: torch.Tensor = self._synced(input)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _synced(self, x: torch.Tensor) -> Any:
        out, mean, variance, count = _Normalize.apply(x, self.weight, self.bias, self.eps, self.counted)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return out


class _Normalize(torch.autograd.Function):
    """Normalizes ``x`` with the mean and the biased variance of all ranks (Ioffe and Szegedy 2015, "Batch
    Normalization", algorithm 1).

    The forward pass gathers each rank's count, mean and variance, and joins them without cancellation (Chan et al.
    1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", equation 2.1). The backward pass
    sums two vectors over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, counted: bool
    ) -> tuple[torch.Tensor, ...]:
        channels, dims = x.shape[1], [d for d in range(x.dim()) if d != 1]
        values = x.detach().float()
        count = values.numel() // channels if counted else 0
        local = values.new_zeros(2 * channels + 1)
        if count:
            variance, mean = torch.var_mean(values, dims, correction=0)
            local = torch.cat((mean, variance, values.new_tensor([float(count)])))
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        means, variances, counts = torch.stack(parts).split([channels, channels, 1], dim=1)
        total = counts.sum()
        if float(total) < 2:
            raise ValueError(f"batch norm needs more than one value per channel, but all ranks have {list(x.shape)}")
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        shape = [1, channels] + [1] * (x.dim() - 2)
        normal = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.dims, ctx.shape, ctx.dtype, ctx.counted = dims, shape, x.dtype, counted
        ctx.mark_non_differentiable(mean, variance, total)
        if weight is not None:
            normal = normal * weight.float().view(shape)
        if bias is not None:
            normal = normal + bias.float().view(shape)
        return normal.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        normal, weight, inverse, total = ctx.saved_tensors
        gradient = gradients[0].float()
        for_bias, for_weight = gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)
        sums = torch.stack((for_bias, for_weight))
        dist.all_reduce(sums)
        first, second = (sums / total).unbind()
        if ctx.counted:
            gradient = gradient - first.view(ctx.shape) - normal * second.view(ctx.shape)
        factor = inverse if weight is None else inverse * weight.float()
        for_x = (gradient * factor.view(ctx.shape)).to(ctx.dtype)
        if weight is None:
            return for_x, None, None, None, None
        return for_x, for_weight.to(weight.dtype), for_bias.to(weight.dtype), None, None


def cast(module: nn.Module, dtype: torch.dtype, *, keep: bool) -> nn.Module:
    """Converts the float parameters and buffers of ``module`` to ``dtype``, and returns ``module``. If ``keep`` is set,
    the parameters and statistics of batch norm keep their values and dtypes, as in apex' O2: a running mean over many
    steps would lose small updates."""
    parts = [part for part in module.modules() if isinstance(part, _BatchNorm)] if keep else []
    before = [({n: p.data for n, p in part._parameters.items() if p is not None}, {**part._buffers}) for part in parts]
    module.to(dtype=dtype)
    for part, (parameters, buffers) in zip(parts, before, strict=True):
        for name, value in parameters.items():
            part.get_parameter(name).data = value
        part._buffers.update(buffers)
    return module


def replace(module: nn.Module, *, asked: bool) -> nn.Module:
    """Returns ``module`` with a ``SyncedBatchNorm`` in place of each torch.nn.SyncBatchNorm, and if ``asked``, of each
    batch norm. Names, parameters and buffers stay the same.

    Raises ``BadConfig`` for a batch norm of another library, whose ``forward`` may do more.
    """
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if not isinstance(part, _BatchNorm) or isinstance(part, SyncedBatchNorm):
            continue
        if not (type(part) is nn.SyncBatchNorm or (asked and type(part) in _PLAIN)):
            if asked:
                kind = f"{type(part).__module__}.{type(part).__qualname__}"
                raise BadConfig(
                    f"{name} is a {kind}, which accel can't synchronize; use torch.nn.BatchNorm2d in the model, or "
                    "leave out --sync-batchnorm"
                )
            continue
        synced = SyncedBatchNorm(
            part.num_features, part.eps, part.momentum, affine=False, track_running_stats=part.track_running_stats
        )
        synced.affine, synced.training = part.affine, part.training
        for own, value in part._parameters.items():
            synced.register_parameter(own, value)
        for own, buffer in part._buffers.items():
            synced.register_buffer(own, buffer)
        if not name:
            return synced
        home, _, last = name.rpartition(".")
        setattr(module.get_submodule(home), last, synced)
    return module


def join(module: nn.Module, *, torchs: bool) -> nn.Module:
    """Makes the ``SyncedBatchNorm`` modules use the statistics of all ranks from here on. Every rank has to call this
    function. If ``torchs`` is set, returns a model with torch.nn.SyncBatchNorm in place of ``SyncedBatchNorm``."""
    if torchs and any(isinstance(part, SyncedBatchNorm) for part in module.modules()):
        found: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return found
    for part in module.modules():
        if isinstance(part, SyncedBatchNorm):
            part.joined = True
    return module


def synced(module: nn.Module) -> bool:
    """Tells whether ``module`` has a ``SyncedBatchNorm``."""
    return any(isinstance(part, SyncedBatchNorm) for part in module.modules())


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Opens a context in which this rank's samples aren't part of the statistics. A rank without samples runs the model
    on a spare sample."""
    parts = [part for part in module.modules() if isinstance(part, SyncedBatchNorm)]
    for part in parts:
        part.counted = False
    try:
        yield
    finally:
        for part in parts:
            part.counted = True


def advice(module: nn.Module, samples: int) -> str:
    """Returns a message if batch norm on this rank sees only its own ``samples`` samples at once, which are few.
    Returns "" if there is nothing to say."""
    found = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if not found or samples >= _SMALL or synced(module):
        return ""
    return (
        f"batch norm ({found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}) uses each rank's own "
        f"statistics, over {samples} samples; pass --sync-batchnorm to use the statistics of all ranks"
    )
