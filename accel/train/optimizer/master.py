"""Steps an optimizer on float32 copies of 2-byte parameters (master weights)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config.schema import OptimizerConfig
from ..precision.modes import keeps_master
from .make import FACTOR, make


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
        self.inner = make(self.names, stepped, config)

    def weights(self, module: nn.Module) -> dict[str, Any]:
        """Returns ``module.state_dict()`` with the master weights in place of the rounded parameters.

        A parameter that has several names has its master weights under all of them.
        """
        found = module.state_dict()
        if self.master is not None:
            masters = {id(p): master for p, master in zip(self.parameters, self.master, strict=True)}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found[name] = masters.get(id(parameter), found[name])
        return found

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
            group["lr"] = lr * group.get(FACTOR, 1.0)

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
        old = [dict(group) for group in self.inner.param_groups]
        for group in self.inner.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        for tensor in stepped:
            tensor.grad = torch.zeros_like(tensor)
        self.inner.step()
        for tensor in stepped:
            tensor.grad = None
        for group, before in zip(self.inner.param_groups, old, strict=True):
            group.clear()
            group.update(before)

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
