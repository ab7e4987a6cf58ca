"""Measures the times that ``split`` needs: of the modules of a chain, and of the tensors that stages send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import loss as losses
from ..batch import call, one_tensor, to_device
from ..config.schema import TrainConfig
from ..precision.modes import autocast, parameter_dtype
from ..ranks import Ranks
from .context import cutter
from .split import Times

# Each time is the median of this number of runs. One more run before them isn't counted.
_RUNS = 5


def measure(
    module: nn.Module, names: Sequence[str], config: TrainConfig, ranks: Ranks, loss: losses.Loss, data: Sequence[Any]
) -> Times:
    """Returns the times of the modules ``names`` on a micro-batch of ``data``, and of their outputs on the way to
    another rank. All ranks return the times of the first rank, and every rank has to call this function.

    The loss counts as a part of the last module. With ``tp``, a rank takes its share of the time of a whole module.
    """
    assert ranks.pp is not None
    said: list[Any] = [None]
    # The ranks that share the sequences of the first rank have to take part.
    together = [0] if ranks.cp is None else dist.get_process_group_ranks(ranks.cp.get_group())
    if ranks.rank in together and 0 in together:
        said = [_of_modules(module, names, config, loss, ranks, data)]
    dist.broadcast_object_list(said, src=0, group=ranks.saving)
    forward, backward, sizes = said[0]
    said = [{size: _sent(size, ranks.pp.get_group(), ranks.device) for size in sorted(set(sizes))}]
    dist.broadcast_object_list(said, src=0, group=ranks.saving)
    share = config.parallel.tp
    return Times(
        forward=[seconds / share for seconds in forward],
        backward=[seconds / share for seconds in backward],
        links=[said[0][size] for size in sizes],
    )


def _of_modules(
    module: nn.Module,
    names: Sequence[str],
    config: TrainConfig,
    loss: losses.Loss,
    ranks: Ranks,
    data: Sequence[Any],
) -> tuple[list[float], list[float], list[int]]:
    """Returns the seconds of the forward and the backward passes, and the bytes of each output except the last."""
    mode, device, cut = config.precision.resolved, ranks.device, cutter(ranks, config.parallel)
    x, targets = torch.utils.data.default_collate([data[i % len(data)] for i in range(config.micro_batch)])
    x, targets = to_device(x, device, parameter_dtype(mode)), one_tensor(targets, "a pipeline").to(device)
    targets = cut.part(targets) if cut is not None else targets
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    forward, backward, sizes = [], [], []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for index, name in enumerate(names):
            part, last = module.get_submodule(name), index == len(names) - 1

            def forth(part: nn.Module = part, x: Any = x, last: bool = last) -> torch.Tensor:
                with autocast(mode, device.type):
                    found = call(part, x)
                return losses.summed(loss, found, targets)[0] if last else found

            seconds, y = _median(forth, device)
            forward.append(seconds)
            wanted = [t for t in (*part.parameters(), *_tensors(x)) if t.requires_grad]
            gradient = torch.ones_like(y)

            def back(y: torch.Tensor = y, wanted: Any = wanted, gradient: torch.Tensor = gradient) -> Any:
                return torch.autograd.grad(y, wanted, gradient, retain_graph=True, allow_unused=True)

            backward.append(_median(back, device)[0] if wanted and y.requires_grad else 0.0)
            if not last:
                sizes.append(y.nbytes)
                x = y.detach().requires_grad_(y.is_floating_point())
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return forward, backward, sizes


def _median(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    seconds = []
    for _ in range(_RUNS + 1):
        began = time.perf_counter()
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]), found


def _tensors(inputs: Any) -> list[torch.Tensor]:
    return [t for t in (inputs if isinstance(inputs, tuple) else (inputs,)) if isinstance(t, torch.Tensor)]


def _sent(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the seconds in which ``size`` bytes go from the first rank of ``group`` to the second. The other ranks
    return 0."""
    here, (one, two) = dist.get_rank(group), (dist.get_global_rank(group, index) for index in (0, 1))
    if here > 1:
        return 0.0
    body = torch.empty(size, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for sender, receiver in ((0, two), (1, one)):
            if here == sender:
                dist.send(body, receiver, group=group)
            else:
                dist.recv(body, (one, two)[sender], group=group)

    return _median(there_and_back, device)[0] / 2
