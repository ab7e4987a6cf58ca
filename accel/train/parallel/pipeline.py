"""Implements pipeline parallelism. Cuts a chain of modules into stages of similar cost, and runs torch's schedules.

``gpipe`` runs all forward passes, then all backward passes (Huang et al. 2019). ``1f1b`` alternates forward and
backward passes (Narayanan et al. 2019, "PipeDream"). ``interleaved`` runs 1f1b over two stages per rank (Narayanan et
al. 2021, section 2.2). ``zero-bubble`` places two stages per rank in a V, and runs each backward pass in two halves (Qi
et al. 2024, "Zero Bubble", ZB-V).

The chain is an ``nn.Sequential``, or the modules that the model's attribute ``pipeline_chain`` names. In
``pipeline_chain``, the name of a ``ModuleList`` means all its entries. ``forward`` has to run the modules of the chain
one after the other. Before the chain is cut, a run on a sample checks the order of its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor.parallel import loss_parallel

from accel.errors import BadConfig, one_line
from accel.plan.measure import blocks, count_flops

from .. import loss as losses
from ..batch import Batch, call, one_tensor, to_device
from ..config.schema import TrainConfig
from ..precision.modes import autocast, parameter_dtype
from ..ranks import Ranks

SCHEDULES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "zero-bubble": torch_schedules.ScheduleZBVZeroBubble,
}
# Schedules that give every rank two stages.
TWO_STAGES = ("interleaved", "zero-bubble")
# A pass, the number of its stage, and the number of its micro-batch. A pass is F (forward), B (backward), I (the first
# half of a backward pass) or W (the second half).
Turn = tuple[str, int, int]
_PASSES = ("F", "B", "I", "W")


class Stage(nn.Module):
    """Holds successive modules of a chain, under their names in the whole model."""

    def __init__(self, parts: Mapping[str, nn.Module], mode: str) -> None:
        super().__init__()
        self._order, self._mode = list(parts), mode
        for name, part in parts.items():
            *folders, last = name.split(".")
            home: nn.Module = self
            for folder in folders:
                if folder not in home._modules:
                    home.add_module(folder, nn.Module())
                home = home.get_submodule(folder)
            home.add_module(last, part)

    def forward(self, *inputs: Any) -> torch.Tensor:
        """Runs this stage's modules and returns their output."""
        x: Any = inputs
        with autocast(self._mode, inputs[0].device.type):
            for name in self._order:
                x = call(self.get_submodule(name), x)
        # Makes the tensor contiguous for the next stage, because gloo and NCCL can't send a transposed view.
        found: torch.Tensor = x.contiguous() if isinstance(x, torch.Tensor) else x
        return found


class _Place(PipelineStage):
    """A stage of torch's pipeline that keeps its batch norm statistics while torch learns the shapes.

    Before the first step, torch calls ``_prepare_forward_infra``, which runs the module once to learn the shapes. In
    this run, the input of every stage except the first is uninitialized memory. After the run, the module's buffers get
    their previous values back.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)  # writes through .data, so that autograd doesn't see a change


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A stage of the pipeline on this rank. ``index`` is the number of the stage, and ``count`` is the number of all
    stages. FSDP2 gathers the parameters of each block in ``blocks`` together."""

    module: Stage
    index: int
    count: int
    blocks: Sequence[nn.Module]


def chain(module: nn.Module) -> list[str]:
    """Returns the names of the modules in the chain of ``module``. Raises ``BadConfig`` if ``module`` declares no
    chain."""
    names = getattr(module, "pipeline_chain", None)
    if names is None and isinstance(module, nn.Sequential):
        return [name for name, _ in module.named_children()]
    if names is None:
        raise BadConfig(
            f"the model {type(module).__name__} doesn't say where a pipeline may cut it; make the model an "
            "nn.Sequential, or list its modules in an attribute pipeline_chain, in the order of forward"
        )
    found = []
    for name in names:
        try:
            part = module.get_submodule(name)
        except AttributeError:
            raise BadConfig(
                f"pipeline_chain lists {name}, which is not a module of the model; correct the name"
            ) from None
        several = isinstance(part, nn.ModuleList)
        found += [f"{name}.{index}" for index, _ in part.named_children()] if several else [name]
    return found


@torch.no_grad()
def costs(module: nn.Module, names: Sequence[str], inputs: Any) -> list[float]:
    """Returns the cost of each module of the chain on ``inputs``: the FLOPs of the module's forward pass.

    If no module has FLOPs, the cost is the number of parameters. Raises ``BadConfig`` if the chain leaves out
    parameters of the model, or if the chain's output differs from the model's.
    """
    owned = {id(p) for name in names for p in module.get_submodule(name).parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in owned:
            raise BadConfig(
                f"the parameter {name} is in no part of the pipeline's chain; list all modules in pipeline_chain"
            )
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        expected = call(module, inputs)
        found, x = [], inputs
        for name in names:
            with count_flops() as counter:
                x = call(module.get_submodule(name), x)
            found.append(float(counter.get_total_flops()))
    except BadConfig:
        raise
    except Exception as error:
        reason = one_line(error, 200)
        raise BadConfig(
            f"the pipeline's chain can't be run ({reason}); let each part take the output of the part before it"
        ) from error
    finally:
        for part in training:
            part.training = True
    if x.shape != expected.shape or not torch.allclose(x.float(), expected.float(), rtol=1e-3, atol=1e-5):
        raise BadConfig(
            "the output of the pipeline's chain differs from the model's output; list the modules in pipeline_chain "
            "in the order of forward"
        )
    if not any(found):
        found = [float(sum(p.numel() for p in module.get_submodule(name).parameters())) for name in names]
    return found


def balance(costs: Sequence[float], stages: int, links: Sequence[float] = ()) -> list[range]:
    """Cuts ``costs`` into ``stages`` non-empty groups of neighbors, and minimizes the cost of the most expensive group
    or link. ``links`` has the cost of a cut after each entry of ``costs`` except the last.

    Finds the exact optimum by dynamic programming. Raises ``BadConfig`` if there are fewer costs than stages.
    """
    count, dear = len(costs), [0.0, *(links or [0.0] * len(costs))]
    if count < stages:
        raise BadConfig(f"a chain of {count} parts can't be cut into {stages} stages; use a smaller pp")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][n] describes the best cut of the first n parts into k groups. The entry has the cost of the most expensive
    # group, and the start index of the last group.
    best = [[(0.0, 0) if n == 0 else (float("inf"), 0) for n in range(count + 1)]]
    for k in range(1, stages + 1):
        row = [(float("inf"), 0)] * k
        row += [
            min((max(best[k - 1][cut][0], dear[cut], total[n] - total[cut]), cut) for cut in range(k - 1, n))
            for n in range(k, count + 1)
        ]
        best.append(row)
    ends = [count]
    for k in range(stages, 0, -1):
        ends.append(best[k][ends[-1]][1])
    ends.reverse()
    return [range(a, b) for a, b in pairwise(ends)]


def places(pp: int, schedule: str) -> list[list[int]]:
    """Returns the stage numbers of each rank. A rank has one stage, or two stages for the schedules ``interleaved``
    (placed in a loop) and ``zero-bubble`` (placed in a V)."""
    if schedule == "interleaved":
        return [[rank, pp + rank] for rank in range(pp)]
    if schedule == "zero-bubble":
        return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
    return [[rank] for rank in range(pp)]


def turns(pp: int, schedule: str, batches: int, group: dist.ProcessGroup | None = None) -> list[list[Turn]]:
    """Returns the passes of each rank of a step with ``batches`` micro-batches, in order. ``group`` has ``pp`` ranks,
    and is the default group if it is None."""
    mine = places(pp, schedule)
    count = sum(map(len, mine))
    made = [
        PipelineStage(nn.Identity(), index, count, torch.device("cpu"), group=group)
        for index in mine[dist.get_rank(group)]
    ]
    run = SCHEDULES[schedule](made if schedule in TWO_STAGES else made[0], batches)
    return [list(_numbered(run.pipeline_order[rank])) for rank in range(pp)]


def _numbered(actions: Iterable[Any]) -> Iterator[Turn]:
    """Yields the passes among a rank's ``actions``. A stage runs its micro-batches in order. The numbers in ``actions``
    aren't used, because torch 2.13 numbers the forward passes of the last 1F1B stage from 1."""
    seen: Counter[tuple[str, int]] = Counter()
    for action in actions:
        if action is not None and action.computation_type.value in _PASSES:
            kind, stage = action.computation_type.value, action.stage_index
            yield kind, stage, seen[kind, stage]
            seen[kind, stage] += 1


def cut(
    module: nn.Module, config: TrainConfig, ranks: Ranks, loss: losses.Loss, data: Sequence[Any]
) -> tuple[list[Cut], str]:
    """Returns this rank's stages of ``module``, and a message about stages that were cut by measured times, or "".

    Raises ``BadConfig`` if the model can't be cut into stages.
    """
    assert ranks.pp is not None
    mode = config.precision.resolved
    names = chain(module)
    _not_tied(module, names)
    sample = torch.utils.data.default_collate([data[0]])[0]
    found = costs(module, names, to_device(sample, ranks.device, parameter_dtype(mode)))
    units = _trained(module, names)
    mine, said = places(ranks.pp.size(), config.parallel.pipeline), ""
    runs = balance([sum(found[i] for i in unit) for unit in units], sum(map(len, mine)))
    if config.parallel.pipeline_split == "measured":
        from .part_times import measure
        from .split import best, step_seconds

        times = measure(module, names, config, ranks, loss, data).of(units)
        order = turns(len(mine), config.parallel.pipeline, config.accumulation(ranks.world), ranks.pp.get_group())
        by_flops, runs = step_seconds(runs, times, order), best(times, order, len(runs))
        first = ", ".join(names[units[run.start].start] for run in runs[1:])
        share = 1 - step_seconds(runs, times, order) / by_flops
        said = f"the pipeline is cut before {first}: {share:.0%} less time a step than cut by FLOPs, if links overlap"
    every = {id(block) for block in blocks(module)} | {id(module.get_submodule(name)) for name in names if "." in name}
    stages = []
    for index in mine[ranks.pp.get_local_rank()]:
        parts = {names[i]: module.get_submodule(names[i]) for unit in runs[index] for i in units[unit]}
        inside = [m for part in parts.values() for m in part.modules() if id(m) in every]
        stages.append(Cut(module=Stage(parts, mode), index=index, count=len(runs), blocks=inside))
    return stages, said


def _trained(module: nn.Module, names: Sequence[str]) -> list[range]:
    """Returns the modules of a chain in groups with trained parameters, because a stage without them has nothing for
    the optimizer. A module without trained parameters belongs to the module before it, or to the first that has
    some."""
    starts = [
        i for i, name in enumerate(names) if any(p.requires_grad for p in module.get_submodule(name).parameters())
    ]
    return [range(a, b) for a, b in pairwise([0, *starts[1:], len(names)])]


def _not_tied(module: nn.Module, names: Sequence[str]) -> None:
    owner: dict[int, str] = {}
    for name in names:
        for parameter in module.get_submodule(name).parameters():
            if owner.setdefault(id(parameter), name) != name:
                raise BadConfig(
                    f"the modules {owner[id(parameter)]} and {name} share a parameter, but pipeline stages can't share "
                    "parameters; give each module its own parameter, or use pp 1"
                )


def whole(stages: Sequence[Cut]) -> nn.Module:
    """Returns all stages of a rank as one module with the stages' names and parameters."""
    return Stage({name: s.module.get_submodule(name) for s in stages for name in s.module._order}, "fp32")


class Pipelined:
    """Runs the forward and backward passes of a step through a pipeline. Under context parallelism, ``part`` returns
    this rank's part of the targets."""

    def __init__(
        self,
        stages: Sequence[Cut],
        config: TrainConfig,
        ranks: Ranks,
        loss: losses.Loss,
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        assert ranks.pp is not None
        self.part = part
        self.loss, self.ranks, self.dtype = loss, ranks, parameter_dtype(config.precision.resolved)
        self.forth = 1.0
        self.count = config.accumulation(ranks.world)
        self.pairs: list[torch.Tensor] = []
        group = ranks.pp.get_group()
        made = [_Place(s.module, s.index, s.count, ranks.device, group=group) for s in stages]
        kind = SCHEDULES[config.parallel.pipeline]
        self.first, self.last = any(s.is_first for s in made), any(s.is_last for s in made)
        self.schedule = kind(
            made if config.parallel.pipeline in TWO_STAGES else made[0],
            self.count,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total, count = losses.summed(self.loss, outputs, targets)
        self.pairs.append(losses.pair(total, count))
        return total * self.forth

    def run(self, batches: Sequence[Batch], forth: float) -> torch.Tensor:
        """Runs one step.

        Returns [sum of losses, counted targets] on the rank of the last stage, and zeros on the other ranks.
        """
        self.forth = forth
        self.pairs.clear()
        inputs: tuple[Any, ...] = ()
        if self.first:
            given = [x if isinstance(x, tuple | list) else (x,) for x, _ in batches]
            if any(isinstance(x, Mapping) for x, _ in batches):
                raise BadConfig("a pipeline takes inputs by position; let the data give tensors or tuples, not dicts")
            inputs = to_device(tuple(map(torch.cat, zip(*given, strict=True))), self.ranks.device, self.dtype)
        target = None
        if self.last:
            target = torch.cat([one_tensor(y, "a pipeline") for _, y in batches]).to(self.ranks.device)
            target = self.part(target) if self.part is not None else target
        with loss_parallel():  # a loss over a sharded vocabulary needs this context for its backward pass
            # Without return_outputs=False, torch keeps the outputs of all micro-batches, and then copies them together.
            self.schedule.step(*inputs, return_outputs=False, **({"target": target} if self.last else {}))
        if not self.last:
            return torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        # The last ``count`` entries of ``pairs`` are the losses of this step. Before the first step, torch also calls
        # the loss on uninitialized memory to learn the shapes.
        return torch.stack(self.pairs[-self.count :]).sum(0)

    def figures(self) -> dict[str, torch.Tensor]:
        return {}
