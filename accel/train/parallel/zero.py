"""Implements ZeRO with PyTorch's DDP for stage 0, and with FSDP2 (``fully_shard``) for stages 1 to 3.

Stage 0 shards nothing. Stage 1 shards the optimizer states. Stages 0 and 1 reduce gradients on the last micro-batch of
a step. Stage 2 also shards the gradients, and reduces gradients on every micro-batch. Stage 3 also shards the
parameters, and frees the gathered parameters of each block after the block's forward pass.

Under FSDP2 the optimizer always works on shards. Stages 1 to 3 differ in how long unsharded gradients and parameters
stay in memory. At stages 1 and 2 the gathered parameters stay in memory through all micro-batches of a step. After the
last micro-batch, the gathered parameters are always freed. The optimizer updates only the shards, so the gathered copy
would keep the old values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from accel.errors import BadConfig
from accel.plan.measure import blocks


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None,
    zero: int,
    *,
    offload: bool = False,
    ddp: bool = True,
    parts: Sequence[nn.Module] | None = None,
    hpz: int = 0,
    experts: Sequence[nn.Module] = (),
    beside: DeviceMesh | None = None,
) -> nn.Module:
    """Distributes ``module`` over ``mesh`` at ZeRO stage ``zero`` and returns the module to call.

    At stage 0, returns ``module`` wrapped in DDP. At stages 1 to 3, returns ``module`` itself. Gradients are averaged
    over the data-parallel ranks. ``mesh`` is 1-D (data-parallel ranks) or 2-D (replicas and shards). For a single
    process, ``mesh`` is None and ``module`` stays unchanged.

    Tensor and pipeline parallelism need ``ddp=False``. With ``ddp=False``, stage 0 uses FSDP2 too, but doesn't shard
    anything. Each module in ``parts`` gathers its parameters together. By default, ``parts`` are the model's blocks. If
    ``hpz`` is set (stage 3 with ZeRO++), the parameters stay in shards over ``hpz`` ranks between forward and backward.
    The ``hpz`` shards cost memory, but the backward pass then needs no gather over all ranks. With expert parallelism,
    ``experts`` are sharded over the ranks of ``beside``, which hold the same experts.
    """
    if mesh is None:
        return module
    if zero == 0 and ddp:
        if not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    reshard = hpz or zero == 3
    for part in experts if beside is not None else ():
        # The first dim is cut by experts already. A second cut of the same dim could be uneven.
        fully_shard(part, mesh=beside, reshard_after_forward=reshard, shard_placement_fn=lambda _: Shard(1))
    for block in blocks(module) if parts is None else parts:
        if apart := _of_another_dtype(block):
            fully_shard(apart, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    if apart := _of_another_dtype(module):
        fully_shard(apart, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    # The forward and backward pass both use the parameters outside the blocks, so freeing these parameters between the
    # passes would save nothing.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    return module


def _of_another_dtype(module: nn.Module) -> list[nn.Module]:
    """Returns the modules inside ``module`` whose parameters have a rarer dtype, such as float32 batch norm in a
    float16 model. FSDP2 gathers only parameters of one dtype together."""
    counts = Counter[torch.dtype]()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel()
    if len(counts) < 2:
        return []
    ((usual, _),) = counts.most_common(1)
    parts = [part for part in module.modules() if part is not module and not isinstance(part, FSDPModule)]
    return [part for part in parts if any(p.dtype != usual for p in part.parameters(recurse=False))]


@contextmanager
def micro_batch(module: nn.Module, zero: int, *, last: bool) -> Iterator[None]:
    """Opens the context in which one micro-batch runs its forward and backward pass.

    ``last`` marks the last micro-batch of a step. Raises ``BadConfig`` if the last micro-batch left a parameter out,
    because DDP then hasn't averaged the gradients.
    """
    if isinstance(module, DistributedDataParallel):
        if last:
            yield
            _check_reduced(module)
        else:
            with module.no_sync():
                yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or zero >= 2)
        module.set_reshard_after_backward(last or zero == 3)
    yield


def _check_reduced(module: DistributedDataParallel) -> None:
    try:
        module._check_reducer_finalized()
    except RuntimeError as error:
        trained = [(name, p) for name, p in module.module.named_parameters() if p.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = (
            [trained[int(number)][0] for number in numbers[1].split()]
            if numbers
            else [name for name, p in trained if p.grad is None]
        )
        raise BadConfig(
            f"the loss doesn't depend on {_listed(unused)}, but data-parallel ranks average the gradients of all "
            "parameters after each step's last micro-batch; use them for every batch, or freeze them with "
            "requires_grad_(False)"
        ) from error


def _listed(names: Sequence[str], most: int = 4) -> str:
    """Returns the names for a message, cut after ``most`` names."""
    if not names:
        return "some parameters"
    more = [f"{len(names) - most} more parameters"] if len(names) > most else []
    *first, last = [*names[:most], *more]
    return f"{', '.join(first)} and {last}" if first else last
