"""Steps an optimizer on float32 copies of 2-byte parameters (master weights)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel.plan.rules import DISK_PART

from ..config.schema import OptimizerConfig
from ..disk.gradients import Gradients
from ..disk.store import Disk
from ..precision.modes import keeps_master
from ..shards import local, with_layout
from .make import FACTOR, make
from .norm import scale_gradients, share_of_squares


class MasterOptimizer:
    """The optimizer that ``config`` names, with float32 copies of the parameters if the mode keeps master weights.

    Works on plain parameters and on DTensors. Each rank copies and updates its own shards only, as plain tensors. With
    DTensors, the first step would take seconds longer, because DTensor then works out the layouts of all operators.

    If ``disk`` names a folder, the copies and the moments are kept there. A step then updates a part of the parameters
    at a time, while the next part is read and the previous part is written. At most three parts are in memory.
    ``parked`` tells whether the parameters and gradients are on the disk too (``accel.train.disk.parameters``,
    ``accel.train.disk.gradients``).
    """

    def __init__(
        self, module: nn.Module, config: OptimizerConfig, mode: str, disk: str = "", *, parked: bool = False
    ) -> None:
        self.disk, self.parked = Disk(Path(disk)) if disk else None, parked
        self._before = (0, 0)  # The bytes that the disk had read and written at the start of this step.
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.gradients = Gradients(self.parameters, self.disk) if parked and self.disk is not None else None
        self.master: list[torch.Tensor] | None = None
        if keeps_master(mode):
            self.master = [self._copied(p) for p in self.parameters]
        whole = self.master or self.parameters
        self._shards = [local(t.detach()) if isinstance(t, DTensor) else t for t in whole]
        cut = any(shard.shape != tensor.shape for shard, tensor in zip(self._shards, whole, strict=True))
        self.inner = make(self.names, self._shards, config, parts=self.disk is not None, cut=cut)

    def _copied(self, parameter: nn.Parameter) -> torch.Tensor:
        master = parameter.detach().float()
        if self.disk is not None and parameter.dtype != torch.float32:  # a float32 parameter is its own copy
            self.disk.keep(master)
            self.disk.wait([master])
        return master

    def weights(self, module: nn.Module) -> Mapping[str, Any]:
        """Returns ``module.state_dict()`` with the master weights in place of the rounded parameters.

        A parameter that has several names has its master weights under all of them.
        """
        found = module.state_dict()
        if self.master is not None:
            masters = {id(p): master for p, master in zip(self.parameters, self.master, strict=True)}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found[name] = masters.get(id(parameter), found[name])
        return found if self.disk is None else _FromDisk(found, self.disk)

    def collect(self) -> None:
        """Makes the gradients of all micro-batches the ``grad`` of their parameters. If the parameters are on the disk,
        so are the gradients, and ``value`` reads them."""
        if self.gradients is not None:
            self.gradients.give()

    def share_of_squares(self, rank: int, ranks: int) -> torch.Tensor:
        """Returns this rank's share of the squares of all gradients, as ``norm.share_of_squares`` does."""
        known = self.gradients.norms if self.gradients is not None else None
        return share_of_squares(self.parameters, rank, ranks, known)

    def step(self, factor: float = 1.0) -> None:
        """Updates the parameters once from their gradients, multiplied by ``factor``."""
        if self.disk is None:
            self._update(range(len(self.parameters)), factor)
            return
        for part in self._parts([p.grad is not None for p in self.parameters]):
            self._update(part, factor)

    def begin(self) -> None:
        """Begins to count the bytes of a step."""
        if self.disk is not None:
            self._before = self.disk.read, self.disk.written

    @property
    def moved(self) -> dict[str, int]:
        """Returns the bytes that this step has read from the disk and written to it, for the log."""
        if self.disk is None:
            return {}
        read, written = self._before
        return {"disk_read_bytes": self.disk.read - read, "disk_written_bytes": self.disk.written - written}

    def _update(self, part: Sequence[int], factor: float) -> None:
        """Updates the parameters with the indices ``part``."""
        scale_gradients((self.parameters[index] for index in part), factor)
        held = [(self.parameters[index], self._shards[index]) for index in part]
        held = [(parameter, shard) for parameter, shard in held if parameter is not shard]
        with torch.no_grad():
            for parameter, shard in held:
                if self.master is None:
                    shard.data = local(parameter)  # FSDP2 may have moved the shard to pinned memory
                shard.grad = _gradient(parameter, shard.dtype)
            self.inner.step()
            if self.master is not None and held:
                torch._foreach_copy_([local(parameter) for parameter, _ in held], [shard for _, shard in held])
            for _, shard in held:
                shard.grad = None

    def _parts(self, used: Sequence[bool]) -> Iterator[Sequence[int]]:
        """Yields the parameters that are ``used``, a part at a time, with their states in memory. The inner optimizer
        sees the yielded part alone."""
        assert self.disk is not None
        groups = self.inner.param_groups
        parts = self._cut(used)
        try:
            for number, (group, part) in enumerate(parts):
                self.disk.fetch(self._needed(part))
                if number + 1 < len(parts):
                    self.disk.fetch(self._needed(parts[number + 1][1]))
                self.disk.load(self._needed(part))
                whole, group["params"] = group["params"], [self._shards[index] for index in part]
                self.inner.param_groups = [group]
                try:
                    yield part
                finally:
                    group["params"] = whole
                if number:
                    self.disk.wait(self._states(parts[number - 1][1]))
                self._keep(part)
                self.disk.release(self._gradients(part))
        finally:
            self.inner.param_groups = groups

    def _cut(self, used: Sequence[bool]) -> list[tuple[dict[str, Any], list[int]]]:
        """Returns pairs (group, indices of some of its parameters). The states of the parameters of a pair take up to
        ``DISK_PART`` bytes."""
        places = {id(shard): index for index, shard in enumerate(self._shards)}
        found: list[tuple[dict[str, Any], list[int]]] = []
        for group in self.inner.param_groups:
            size = DISK_PART
            for index in (places[id(tensor)] for tensor in group["params"]):
                own = 12 * local(self.parameters[index]).numel()  # a master copy and two moments
                if used[index]:
                    if size + own > DISK_PART:
                        found.append((group, []))
                        size = 0
                    found[-1][1].append(index)
                    size += own
        return found

    def _states(self, part: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yields the states of the parameters ``part`` that belong on the disk. Scalars, such as step counts, stay in
        memory."""
        for index in part:
            if self.parked:
                yield self.parameters[index]
            if self.master is not None and self.parameters[index].dtype != torch.float32:
                yield self.master[index]
            for value in self.inner.state.get(self._shards[index], {}).values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    yield value

    def _gradients(self, part: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yields the gradients of the parameters ``part`` that are on the disk."""
        for gradient in (self.parameters[index].grad for index in part if self.gradients is not None):
            if gradient is not None:
                yield gradient

    def _needed(self, part: Sequence[int]) -> Iterator[torch.Tensor]:
        yield from self._states(part)
        yield from self._gradients(part)

    def _keep(self, part: Sequence[int]) -> None:
        assert self.disk is not None
        for tensor in self._states(part):
            self.disk.keep(tensor)

    def zero_grad(self, *, keep: bool = False) -> None:
        """Drops the gradients. With ``keep``, fills them with zeros, because they are views of DDP's buckets. Otherwise
        the first micro-batch of the next step would make a second set of gradients, beside the buckets."""
        for parameter in self.parameters:
            if keep and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        if self.gradients is not None:
            self.gradients.drop()

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr * group.get(FACTOR, 1.0)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part of the optimizer state (master weights and moments) as plain tensors.

        Leaves out scalars, such as step counts.
        """
        masters = () if self.master is None else self._shards
        for tensor in (*masters, *(v for state in self.inner.state.values() for v in state.values())):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                yield tensor

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as ``<parameter>.master`` and ``<parameter>.<moment>``. A moment of a
        DTensor is a DTensor."""
        found: dict[str, Any] = {}
        for name, whole, shard in zip(self.names, self.master or self.parameters, self._shards, strict=True):
            if self.master is not None:
                found[f"{name}.master"] = whole
            for key, value in self.inner.state.get(shard, {}).items():
                scalar = not (isinstance(value, torch.Tensor) and value.ndim)  # such as a step count
                found[f"{name}.{key}"] = value if scalar else with_layout(value, whole)
        return found

    def materialize(self) -> None:
        """Allocates the optimizer state before the first step, so that a checkpoint can be read into the state's
        tensors."""
        old = [dict(group) for group in self.inner.param_groups]
        for group in self.inner.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        everything = range(len(self._shards))
        for part in [everything] if self.disk is None else self._parts([True] * len(self._shards)):
            for index in part:
                self._shards[index].grad = torch.zeros_like(self._shards[index])
            self.inner.step()
            for index in part:
                self._shards[index].grad = None
        for group, before in zip(self.inner.param_groups, old, strict=True):
            group.clear()
            group.update(before)

    def forget_all_but(self, saved: Collection[str]) -> None:
        """Drops the moments of each parameter that has no moments in ``saved``. ``saved`` holds names as in
        ``state_dict``. A parameter has no moments in ``saved`` if the parameter got no gradient before the checkpoint,
        or if every step was skipped. Adam's bias correction has to start with the parameter's first gradient.
        """
        for name, shard in zip(self.names, self._shards, strict=True):
            if not any(f"{name}.{key}" in saved for key in self.inner.state.get(shard, {})):
                dropped = self.inner.state.pop(shard, {})
                if self.disk is not None:
                    self.disk.forget(value for value in dropped.values() if isinstance(value, torch.Tensor))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies a ``state_dict`` into the existing tensors."""
        with torch.no_grad():
            for name, shard in zip(self.names, self._shards, strict=True):
                if self.master is not None:
                    self.take(shard, state[f"{name}.master"])
                for key, value in self.inner.state.get(shard, {}).items():
                    if isinstance(value, torch.Tensor):
                        self.take(value, state[f"{name}.{key}"])
                    else:
                        self.inner.state[shard][key] = state[f"{name}.{key}"]

    def take(self, own: torch.Tensor, value: torch.Tensor) -> None:
        """Copies ``value`` into the parameter or state ``own``, which has the same layout."""
        own, value = local(own), local(value)
        if self.disk is None:
            own.copy_(value)
        else:
            self.disk.take(own, value)

    def value(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the values of a parameter or a gradient in memory."""
        if tensor is None or self.disk is None:
            return tensor
        return self.disk.copy(tensor.detach())


class _FromDisk(Mapping[str, Any]):
    """Tensors by name, which are read from the disk one by one."""

    def __init__(self, tensors: Mapping[str, Any], disk: Disk) -> None:
        self.tensors, self.disk = tensors, disk

    def __getitem__(self, name: str) -> Any:
        found = self.tensors[name]
        return self.disk.copy(found) if isinstance(found, torch.Tensor) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _gradient(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the gradient of this rank's part of ``parameter``, or None if ``parameter`` has no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient).to(dtype)
