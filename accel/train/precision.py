"""Implements the precision modes, the optimizer with master weights, and loss scaling.

Mode                 apex  parameters, gradients   master   products   loss scale
fp32                 O0    float32                 -        float32    -
autocast-bf16              float32                 -        bfloat16   -
autocast-fp16        O1    float32                 -        float16    dynamic
bf16                       bfloat16                float32  bfloat16   -
fp16                 O2    float16                 float32  float16    dynamic
bf16-only                  bfloat16                -        bfloat16   -
fp16-only            O3    float16                 -        float16    dynamic
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .config.schema import APEX, OptimizerConfig

# A run logs this advice if the config uses apex's name for the precision mode.
ADVICE = {
    "O1": "O1 is autocast-fp16: if the device has bfloat16, use autocast-bf16, which needs no loss scale",
    "O2": "O2 is fp16: batch norm statistics are float16 too; don't use it for models that depend on them",
    "O3": "O3 is fp16-only: small updates vanish in float16; use it only to measure how fast a run could be",
}


def parameter_dtype(mode: str) -> torch.dtype:
    """Returns the dtype of the parameters."""
    mode = APEX.get(mode, mode)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode.removesuffix("-only"), torch.float32)


def keeps_master(mode: str) -> bool:
    """Tells whether the optimizer works on float32 copies of 2-byte parameters."""
    return APEX.get(mode, mode) in ("bf16", "fp16")


def scales_loss(mode: str) -> bool:
    """Tells whether some gradients are float16, so that the loss has to be scaled."""
    return "fp16" in APEX.get(mode, mode)


def autocast(mode: str, device: str) -> AbstractContextManager[Any]:
    """Returns the context that a forward pass runs in."""
    mode = APEX.get(mode, mode)
    if not mode.startswith("autocast-"):
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16 if mode.endswith("bf16") else torch.float16)


class MasterOptimizer:
    """The optimizer that ``config`` names, with float32 copies of the parameters if the mode keeps master weights.

    Works on plain parameters and on DTensor shards. Each rank holds copies of its own shards only.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, mode: str) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.master: list[torch.Tensor] | None = None
        stepped: list[torch.Tensor] = list(self.parameters)
        if keeps_master(mode):
            self.master = [p.detach().float() for p in self.parameters]
            stepped = self.master
        self.inner = _inner(stepped, config)

    def step(self) -> None:
        """Updates the parameters once from their gradients."""
        if self.master is None:
            self.inner.step()
            return
        for master, parameter in zip(self.master, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, parameter in zip(self.master, self.parameters, strict=True):
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part of the optimizer state (master weights and moments) as plain tensors.

        Leaves out scalars, such as step counts.
        """
        for tensor in (*(self.master or ()), *(v for state in self.inner.state.values() for v in state.values())):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as ``<parameter>.master`` and ``<parameter>.<moment>``."""
        found: dict[str, Any] = {}
        stepped = self.master or self.parameters
        for name, tensor in zip(self.names, stepped, strict=True):
            if self.master is not None:
                found[f"{name}.master"] = tensor
            for key, value in self.inner.state.get(tensor, {}).items():
                found[f"{name}.{key}"] = value
        return found

    def materialize(self) -> None:
        """Allocates the optimizer state before the first step, so that a checkpoint can be read into the state's
        tensors."""
        stepped = self.master or self.parameters
        old = [(group["lr"], group["weight_decay"]) for group in self.inner.param_groups]
        for group in self.inner.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        for tensor in stepped:
            tensor.grad = torch.zeros_like(tensor)
        self.inner.step()
        for tensor in stepped:
            tensor.grad = None
        for group, (lr, decay) in zip(self.inner.param_groups, old, strict=True):
            group["lr"], group["weight_decay"] = lr, decay

    def forget_all_but(self, saved: Collection[str]) -> None:
        """Drops the moments of each parameter that has no moments in ``saved``. ``saved`` holds names as in
        ``state_dict``. A parameter has no moments in ``saved`` if the parameter got no gradient before the checkpoint,
        or if every step was skipped. Adam's bias correction has to start with the parameter's first gradient.
        """
        stepped = self.master or self.parameters
        for name, tensor in zip(self.names, stepped, strict=True):
            if not any(f"{name}.{key}" in saved for key in self.inner.state.get(tensor, {})):
                self.inner.state.pop(tensor, None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies a ``state_dict`` into the existing tensors."""
        stepped = self.master or self.parameters
        with torch.no_grad():
            for name, tensor in zip(self.names, stepped, strict=True):
                if self.master is not None:
                    tensor.copy_(state[f"{name}.master"])
                for key, value in self.inner.state.get(tensor, {}).items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(state[f"{name}.{key}"])
                    else:
                        self.inner.state[tensor][key] = state[f"{name}.{key}"]


def _inner(tensors: list[torch.Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": True}
    meshes: dict[Any, list[torch.Tensor]] = {}  # tensors of different meshes can't be in one foreach operation
    for tensor in tensors:
        meshes.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    parameters = [{"params": same} for same in meshes.values()]
    if config.name == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(parameters, betas=(config.betas[0], config.betas[1]), eps=config.eps, **common)


class LossScale:
    """Dynamic loss scaling.

    If a gradient on any rank is not finite, the scale halves and every rank skips the step. After ``interval`` good
    steps the scale doubles. The method is from Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    def __init__(self, first: float, interval: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = first if enabled else 1.0
        self.interval = interval
        self.good = 0

    def update(self, *, finite: bool) -> None:
        """Adjusts the scale after a step."""
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good = max(self.scale / 2, 2.0**-20), 0
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": float(self.good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good = float(state["scale"]), int(state["good"])


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the 2-norm of all gradients together. The result is a float32 scalar, which is the same on every rank.

    The norm is not finite if any gradient is not finite. PyTorch can't compute one norm over plain tensors and DTensors
    of different meshes (pytorch#180346). Therefore, this function groups the gradients by the ranks that hold their
    shards, and sums the squares of each group over these ranks. ``stages`` is the group of the ranks that hold the
    other pipeline stages.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.zeros((), device=gradients[0].device if gradients else None)
    layouts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            cut = tuple(mesh.get_group(i) for i, place in enumerate(gradient.placements) if not place.is_replicate())
            layouts.setdefault(cut, []).append(gradient.to_local())
        else:
            layouts.setdefault((), []).append(gradient)
    for groups, tensors in layouts.items():
        squares = _squares(tensors, total.device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def share_of_squares(parameters: Iterable[nn.Parameter], rank: int, ranks: int) -> torch.Tensor:
    """Cuts the gradients into ``ranks`` parts and returns the sum of the squares of part ``rank`` as a float32 scalar.
    Each rank reads only its part of the gradients. If all ranks hold the same gradients, the sum over all ranks is the
    square of ``gradient_norm``.
    """
    gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
    parts = [g[g.numel() * rank // ranks : g.numel() * (rank + 1) // ranks] for g in gradients]
    device = gradients[0].device if gradients else torch.device("cpu")
    return _squares([part for part in parts if part.numel()], device)


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square().sum()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies every gradient by ``factor``, in place."""
    gradients: list[torch.Tensor] = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
