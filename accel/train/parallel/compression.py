"""Compresses gradients in communication hooks of DDP, so that the ranks send fewer bytes.

``bf16`` and ``fp16`` round the gradients and send half the bytes. ``powersgd`` approximates each weight's gradient by a
product of two thin matrices (Vogels et al. 2019, "PowerSGD"). ``powersgd`` keeps the approximation error for the next
step, and checkpoints save that error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..config.schema import ParallelConfig


def compress(module: DistributedDataParallel, config: ParallelConfig) -> PowerSGD | None:
    """Registers the communication hook that ``config.compression`` names.

    Returns the hook's state for checkpoints, or None if the hook has no state.
    """
    if config.compression == "powersgd":
        return PowerSGD(module, config)
    if config.compression != "none":
        dtype = torch.bfloat16 if config.compression == "bf16" else torch.float16
        module.register_comm_hook(module.process_group, rounded(dtype))
    return None


class PowerSGD:
    """Torch's PowerSGD with a state that can be saved and loaded.

    A parameter's state has ``error`` (the gradient minus its approximation) and ``q`` (the matrix that the next
    approximation starts with). Torch keeps the state by bucket, and DDP changes the buckets after the first step of a
    process. Therefore, this class saves the state by parameter whenever the buckets change.

    Only the mean error over the ranks matters, because the approximation is linear in the gradients. Therefore, a
    checkpoint saves a single copy of the state, and any number of ranks can load this copy.
    """

    def __init__(self, module: DistributedDataParallel, config: ParallelConfig) -> None:
        self.rank = config.compression_rank
        self.state = powerSGD_hook.PowerSGDState(
            module.process_group,
            matrix_approximation_rank=config.compression_rank,
            # PowerSGD begins after the first step, because DDP rebuilds its buckets after that step.
            start_powerSGD_iter=max(2, config.compression_start),
        )
        self.parameters = {name: p for name, p in module.module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._buckets: dict[int, tuple[str, ...]] = {}
        self._memory: dict[str, torch.Tensor] = {}
        # The hook is a lambda without annotations, because DDP would refuse the annotations of ``run``.
        module.register_comm_hook(self, lambda memory, bucket: memory.run(bucket))

    def run(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Compresses and reduces a bucket. DDP calls this method as a communication hook."""
        names, index = tuple(self._names[id(p)] for p in bucket.parameters()), bucket.index()
        if self._buckets.get(index, names) != names:
            # Drops this bucket and all later buckets. The earlier buckets are unchanged, and DDP already reduces them.
            for old in [old for old in self._buckets if old >= index]:
                self._memory |= self._by_parameter(old)
                for memory in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
                    memory.pop(old, None)
                del self._buckets[old]
        if index not in self._buckets:
            self._buckets[index] = names
            self._lay_out(index, bucket.buffer())
        return powerSGD_hook.powerSGD_hook(self.state, bucket)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns ``<parameter>.error``, averaged over the ranks, and ``<parameter>.q``. Returns {} before PowerSGD
        begins.

        Every rank has to call this method.
        """
        found = dict(self._memory)
        for index in self._buckets:
            found |= self._by_parameter(index)
        for name in [name for name in found if name.endswith(".error")]:
            found[name] = found[name] / dist.get_world_size(self.state.process_group)
            dist.all_reduce(found[name], group=self.state.process_group)
        return found

    def empty(self) -> dict[str, torch.Tensor]:
        """Returns zeros in the shapes of ``state_dict``, into which a checkpoint can be read."""
        found = {f"{name}.error": torch.zeros_like(p).detach() for name, p in self.parameters.items()}
        for name, (columns, rank) in self._thin(self.parameters):
            found[f"{name}.q"] = self.parameters[name].detach().new_zeros(columns, rank)
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a ``state_dict``."""
        self._memory = dict(state)

    def _thin(self, names: Any) -> list[tuple[str, tuple[int, int]]]:
        """Returns those of the parameters ``names`` that PowerSGD compresses, each with the shape of its ``q``.

        The order is the same as in torch's hook, which groups parameters of equal shape.
        """
        shapes: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name in names:
            rows = self.parameters[name].shape[0] if self.parameters[name].ndim else 1
            shapes[rows, self.parameters[name].numel() // max(1, rows)].append(name)
        found = []
        for (rows, columns), same in shapes.items():
            rank = min(rows, columns, self.rank)
            if powerSGD_hook._should_compress(rows, columns, rank, self.state.min_compression_rate)[0]:
                found += [(name, (columns, rank)) for name in same]
        return found

    def _by_parameter(self, index: int) -> dict[str, torch.Tensor]:
        if index not in self.state.error_dict:
            return {}
        names = self._buckets[index]
        errors = self.state.error_dict[index].split([self.parameters[name].numel() for name in names])
        thin = self._thin(names)
        starts = self.state.q_memory_dict[index].split([prod(shape) for _, shape in thin])
        return {
            **{f"{n}.error": e.view(self.parameters[n].shape).clone() for n, e in zip(names, errors, strict=True)},
            **{f"{n}.q": q.view(shape).clone() for (n, shape), q in zip(thin, starts, strict=True)},
        }

    def _lay_out(self, index: int, buffer: torch.Tensor) -> None:
        names = self._buckets[index]
        if f"{names[0]}.error" not in self._memory:
            return
        self.state.error_dict[index] = torch.cat([self._memory.pop(f"{name}.error").view(-1) for name in names])
        thin = self._thin(names)
        rows = sum(self.parameters[name].shape[0] * rank for name, (_, rank) in thin)
        self.state.p_memory_dict[index] = buffer.new_empty(rows)
        self.state.q_memory_dict[index] = torch.cat(
            [buffer.new_empty(0), *(self._memory.pop(f"{name}.q").view(-1) for name, _ in thin)]
        )


def rounded(dtype: torch.dtype) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """Returns a hook that averages gradients in ``dtype``. Torch's own hook for bfloat16 works only with NCCL."""
    return lambda group, bucket: _average(group, bucket, dtype)  # DDP refuses hooks with postponed annotations


def _average(group: dist.ProcessGroup, bucket: Any, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().to(dtype).div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
