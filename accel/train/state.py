"""Gathers the state of a run for a checkpoint, and takes over the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from accel.errors import BadCheckpoint

from .config.schema import TrainConfig
from .optimizer.master import MasterOptimizer
from .optimizer.scale import LossScale
from .parallel.compression import PowerSGD
from .precision.delayed import History
from .precision.modes import keeps_master, parameter_dtype, scales_loss

MODEL, OPTIMIZER, COMPRESSION = "model.", "optimizer.", "compression."
HISTORY = "fp8.history"


class RunState:
    """This rank's part of the state of a run. ``memory`` is the state of PowerSGD, and ``history`` of delayed scaling,
    if the run uses them."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: MasterOptimizer,
        scale: LossScale,
        memory: PowerSGD | None,
        history: History | None,
        config: TrainConfig,
    ) -> None:
        self.module, self.optimizer, self.scale, self.config = module, optimizer, scale, config
        self.memory, self.history = memory, history

    def tensors(self) -> dict[str, Any]:
        """Returns the checkpoint's tensors, named ``model.*``, ``optimizer.*``, with PowerSGD ``compression.*``, and
        with delayed scaling ``fp8.history``."""
        memory = self.memory.state_dict() if self.memory is not None else {}
        history = {HISTORY: self.history.steps} if self.history is not None else {}
        return self._weights() | {f"{COMPRESSION}{name}": value for name, value in memory.items()} | history

    def facts(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the plain values of the state, for ``run.json`` of the checkpoint with ``tensors``."""
        found: dict[str, Any] = {"scale": self.scale.state_dict()}
        if self.memory is not None:
            begun = any(name.startswith(COMPRESSION) for name in tensors)
            found["powersgd"] = {"iter": self.memory.state.iter, "rank": self.memory.rank, "begun": begun}
        return found

    def wanted(self, run: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Returns the tensors to read from a checkpoint. ``run`` is the checkpoint's ``run.json``, and ``names`` lists
        the names of the checkpoint's tensors.

        Raises ``BadCheckpoint`` if the checkpoint has weights of another precision, and ``checkpoint.convert`` isn't
        set.
        """
        saved = run.get("powersgd") or {}
        self._check_precision(run)
        self.optimizer.materialize()
        before, now = run["config"]["optimizer"], self.config.optimizer
        if (before["name"], before["momentum"], before.get("options", {})) == (now.name, now.momentum, now.options):
            # A checkpoint of the same optimizer lacks a moment only if the moment was never updated. A checkpoint of
            # another optimizer also lacks the moments that the other optimizer doesn't use.
            self.optimizer.forget_all_but({n.removeprefix(OPTIMIZER) for n in names if n.startswith(OPTIMIZER)})
        found = self._weights()
        for name in self.optimizer.names:
            weight, master = f"{MODEL}{name}", f"{OPTIMIZER}{name}.master"
            if master in found and master not in names:  # the checkpoint's own weights become the master weights
                found[weight] = found.pop(master)
            elif master in names and master not in found:
                found[master] = torch.empty_like(found.pop(weight), dtype=torch.float32)
        if self.memory is not None and saved.get("begun") and saved["rank"] == self.memory.rank:
            found |= {f"{COMPRESSION}{name}": value for name, value in self.memory.empty().items()}
        kept = ("fp8", "fp8_keep", "fp8_history")
        precision, own = run["config"]["precision"], vars(self.config.precision)
        if self.history is not None and HISTORY in names and all(precision.get(k) == own[k] for k in kept):
            found[HISTORY] = torch.empty_like(self.history.steps)
        return found

    def take(self, run: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Takes over the tensors ``state`` that were read from a checkpoint, and its plain values ``run``."""
        own = self.module.state_dict()
        masters = {name: f"{OPTIMIZER}{name}.master" for name in self.optimizer.names}
        with torch.no_grad():
            for name, value in state.items():
                if name.startswith(MODEL):
                    self.optimizer.take(own[name.removeprefix(MODEL)], value)
            for name, master in masters.items():
                if f"{MODEL}{name}" not in state:  # the master weights become the weights
                    self.optimizer.take(own[name], state[master])
        read = {name.removeprefix(OPTIMIZER): v for name, v in state.items() if name.startswith(OPTIMIZER)}
        weights = {f"{name}.master": state.get(f"{MODEL}{name}") for name in masters}
        self.optimizer.load_state_dict({**weights, **read})
        if self.history is not None and HISTORY in state:
            self.history.load(state[HISTORY])
        if self.memory is not None and run.get("powersgd"):
            self.memory.load_state_dict(
                {name.removeprefix(COMPRESSION): v for name, v in state.items() if name.startswith(COMPRESSION)}
            )
            self.memory.state.iter = int(run["powersgd"]["iter"])
        if self.scale.enabled and scales_loss(_mode(run)):
            self.scale.load_state_dict(run["scale"])

    def _weights(self) -> dict[str, Any]:
        found = {f"{MODEL}{name}": value for name, value in self.module.state_dict().items()}
        return found | {f"{OPTIMIZER}{name}": value for name, value in self.optimizer.state_dict().items()}

    def _check_precision(self, run: Mapping[str, Any]) -> None:
        before, now = _mode(run), self.config.precision.resolved
        if self.config.checkpoint.convert or _weights_of(before) == _weights_of(now):
            return
        raise BadCheckpoint(
            f"the run began in {before}, and precision.mode is {now} now; pass --resume-as {now} to go on in {now}, or "
            f"--precision {before}, or start with --fresh"
        )


def _mode(run: Mapping[str, Any]) -> str:
    return str(run["config"]["precision"]["mode"])


def _weights_of(mode: str) -> tuple[bool, torch.dtype]:
    """Returns whether the weights of ``mode`` are float32 master weights, and the dtype of the exact weights."""
    return keeps_master(mode), torch.float32 if keeps_master(mode) else parameter_dtype(mode)
