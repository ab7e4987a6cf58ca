"""The ZeRO stages, on PyTorch's own engine: DDP for stage 0, FSDP2 (``fully_shard``) for the rest.

    stage  what is sharded             reshard after forward   reduce gradients
    0      nothing (DDP)               -                       on the last micro-batch
    1      optimizer states            no                      on the last micro-batch
    2      + gradients                 no                      on every micro-batch
    3      + parameters                yes (blocks)            on every micro-batch

Under FSDP2 the optimizer always works on shards; what a stage adds is how long the whole of a thing is kept. At stages
1 and 2 the gathered parameters stay through all micro-batches of a step; on the last one they always go, because the
optimizer steps the shards and a gathered copy left alive would hide the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

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
) -> nn.Module:
    """``module`` laid out over ``mesh`` (1-D: data-parallel ranks; 2-D: replicas, then shards) at ZeRO stage ``zero``.

    Returns the module to call; it is ``module`` itself except at stage 0, where DDP wraps it. Without a mesh: one
    process, nothing is done. Gradients come out averaged over the data-parallel ranks. ``ddp=False``: FSDP2 at stage 0
    too (tensor and pipeline parallel ask for it; the mesh then shards over one rank). ``parts``: what is gathered
    together, by default the blocks. ``hpz``: at stage 3 the parameters stay in shards over this many ranks between
    forward and backward (ZeRO++), which costs memory and saves the wide gather.
    """
    if mesh is None:
        return module
    if zero == 0 and ddp:
        if not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedDataParallel(module, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    reshard = hpz or zero == 3
    for block in blocks(module) if parts is None else parts:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    # What lies outside the blocks is held all through both passes; giving it back between them would save nothing.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    return module


@contextmanager
def micro_batch(module: nn.Module, zero: int, *, last: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch of a step run inside; ``last``: the step's last one."""
    if isinstance(module, DistributedDataParallel):
        if last:
            yield
        else:
            with module.no_sync():
                yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or zero >= 2)
        module.set_reshard_after_backward(last or zero == 3)
    yield
