"""Communication hooks of DDP: gradients that are smaller on their way between ranks than where they are added up.

``bf16`` and ``fp16`` halve what is sent and round it. ``powersgd`` sends a product of two thin matrices for each weight
(Vogels et al. 2019, "PowerSGD") and keeps what it left out for the next step; that memory is not in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel.train.config import ParallelConfig


def compress(module: DistributedDataParallel, config: ParallelConfig) -> None:
    """Register what ``config.compression`` names on ``module``."""
    if config.compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            module.process_group,
            matrix_approximation_rank=config.compression_rank,
            # PowerSGD begins after DDP has rebuilt its buckets, which is after the first step.
            start_powerSGD_iter=max(2, config.compression_start),
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif config.compression != "none":
        dtype = torch.bfloat16 if config.compression == "bf16" else torch.float16
        module.register_comm_hook(module.process_group, rounded(dtype))


def rounded(dtype: torch.dtype) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    """A hook that averages in ``dtype``; torch's own for bfloat16 refuses everything but NCCL."""
    return lambda group, bucket: _average(group, bucket, dtype)  # DDP refuses hooks with postponed annotations


def _average(group: dist.ProcessGroup, bucket: Any, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().to(dtype).div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
