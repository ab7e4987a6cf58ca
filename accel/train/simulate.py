"""A training step of any world size on one machine: fake tensors have shapes and no memory, a fake process group
answers every collective. What a rank would hold and send is summed from what the engine really does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from accel.plan.measure import SavedBytes, count_flops
from accel.plan.traffic import ring
from accel.train.inputs import call
from accel.train.loss import cross_entropy
from accel.train.pipeline import SCHEDULES, TWO_STAGES, Stage, balance, chain, places
from accel.train.precision import MasterOptimizer, parameter_dtype
from accel.train.quantized_comm import set_quantized
from accel.train.recompute import recompute
from accel.train.tensor_parallel import distribute, match
from accel.train.zero import micro_batch, shard


@dataclass(kw_only=True)
class Simulated:
    """What rank 0 of the simulated world held in a step, each at its fullest, and sent in it, in bytes.

    ``activations``: what autograd saved in the forward pass; only counted at stage 0, where no gathered parameter is
    in it. ``sent``: over data-parallel ranks, ``sent_tp``: over tensor-parallel ones, ``sent_pp``: from stage to stage.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    sent: float = 0.0
    sent_tp: float = 0.0
    sent_pp: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def simulate(
    factory: Callable[[], torch.nn.Module],
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    world: int,
    zero: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    accumulation: int = 1,
    replicate: int = 1,
    hpz: int = 0,
    qwz: bool = False,
    qgz: bool = False,
    tp: int = 1,
    styles: Mapping[str, str] | None = None,
    sequence: bool = True,
    again: str = "none",
) -> Simulated:
    """One step of ``factory``'s model on ``world`` ranks, in ``replicate`` replicas, seen from rank 0.

    ``tp`` ranks cut the model by the plan ``styles``, along the ``sequence`` too; the others are data-parallel ones.
    ``again``: what is recomputed (``full`` or ``none``; what ``selective`` keeps, autograd doesn't see).
    ``inputs`` makes one micro-batch ``(inputs, targets)``. No process group may exist. Gradients are counted where
    they are kept until the step. Stage 0 is not wrapped: DDP's reducer is native code that fake tensors can't enter,
    so its traffic is not simulated.
    """
    from accel.train.config import OptimizerConfig

    found = Simulated()
    with _fake_world(world):
        mesh, cut = _meshes(world // tp, tp, replicate, sharded=zero > 0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with _default_dtype(parameter_dtype(precision)):  # fake parameters can't be cast once they are made
                module = factory()
            recompute(module, again)
            if cut is not None:
                distribute(module, cut, match(module, styles or {}), sequence=sequence)
            with unset_fake_temporarily():  # it makes meshes, and looks at their ranks
                called = shard(module, mesh, zero, hpz=hpz)
                set_quantized(called, world // tp // replicate, gather=qwz, reduce=qgz)
            stepper = MasterOptimizer(module, OptimizerConfig(name=optimizer), precision)
            with Sent(found):
                for index in range(accumulation):
                    x, y = inputs()
                    last = index == accumulation - 1
                    with micro_batch(called, zero, last=last), loss_parallel() if cut is not None else nullcontext():
                        with SavedBytes(_locals(module.parameters())) as saved:
                            loss, _ = cross_entropy(called(x), y)
                        found.parameters = max(found.parameters, _bytes(module.parameters()))
                        if mesh is None:
                            found.activations = saved.bytes
                        torch.autograd.backward(loss)
                        del loss, saved
                    held = _bytes(p.grad for p in module.parameters() if p.grad is not None)
                    found.gradients = max(found.gradients, held)
                stepper.step()
            found.optimizer = _bytes(stepper.tensors())
    return found


def simulate_pipeline(
    factory: Callable[[], torch.nn.Module],
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    pp: int,
    pipeline: str,
    accumulation: int,
    again: str = "none",
) -> list[int]:
    """Bytes that autograd has saved on each rank of a pipeline at its fullest: micro-batches of ``inputs`` go through
    the stages that ``factory``'s model is cut into, in the order of torch's schedule, in float32.

    A backward pass in two halves frees what was saved in its second one. No process group may exist.
    """
    with _fake_world(pp):
        turns = _turns(pp, pipeline, accumulation)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = factory()
        recompute(module, again)
        x, y = inputs()
        names = chain(module)
        runs = balance(_costs(module, names, x), 1 + max(stage for rank in turns for _, stage in rank))
        saved = []
        for index, run in enumerate(runs):
            stage = Stage({names[i]: module.get_submodule(names[i]) for i in run}, "fp32")
            with SavedBytes(module.parameters()) as kept:
                out = stage(x)
                loss = cross_entropy(out, y) if index == len(runs) - 1 else None
            saved.append(kept.bytes)
            x = out.detach().requires_grad_()
            del out, loss
    return [_fullest(rank, saved) for rank in turns]


def _turns(pp: int, pipeline: str, batches: int) -> list[list[tuple[str, int]]]:
    """What each rank computes in turn, and of which stage: F forward, B backward, or I and W, its halves."""
    mine = places(pp, pipeline)
    count = sum(map(len, mine))
    stages = [PipelineStage(torch.nn.Identity(), i, count, torch.device("cpu")) for i in mine[dist.get_rank()]]
    made = SCHEDULES[pipeline](stages if pipeline in TWO_STAGES else stages[0], batches)
    return [
        [
            (action.computation_type.value, action.stage_index)
            for action in made.pipeline_order[rank]
            if action is not None and (action.microbatch_index or 0) < batches
        ]
        for rank in range(pp)
    ]


@torch.no_grad()
def _costs(module: torch.nn.Module, names: Sequence[str], x: Any) -> list[float]:
    found = []
    for name in names:
        with count_flops() as counter:
            x = call(module.get_submodule(name), x)
        found.append(float(counter.get_total_flops()))
    return found


def _fullest(turns: Sequence[tuple[str, int]], saved: Sequence[int]) -> int:
    held = most = 0
    for kind, stage in turns:
        held += {"F": saved[stage], "B": -saved[stage], "W": -saved[stage]}.get(kind, 0)
        most = max(most, held)
    return most


def _meshes(ranks: int, tp: int, replicate: int, *, sharded: bool) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The meshes of ``ranks`` data-parallel and of ``tp`` tensor-parallel ranks, as ``accel.train.layout`` has them."""
    sizes = {"dp_replicate": replicate, "dp_shard": ranks // replicate, "tp": tp}
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
    mesh = init_device_mesh("cpu", tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    data = mesh[axes[:-1]] if tp > 1 else mesh
    return data if sharded and ranks > 1 else None, mesh["tp"] if tp > 1 else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _fake_world(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group exists already; simulate before it is made")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in _locals(t for t in tensors if t is not None))


class Sent(TorchDispatchMode):
    """Sums what a ring would send for every collective that is called inside: c10d's own are those of DDP and FSDP2,
    functional ones those of DTensor; and what stages send to one another. Exchanged all to all, as little leaves a rank
    as in a ring."""

    def __init__(self, found: Simulated) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what DTensor makes of it comes here again
        kind, _, name = str(func).removesuffix(".default").split("::")[-1].rpartition(".")
        if kind == "_c10d_functional":
            self._functional(name, args)
        elif name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            self._add(name, ring(whole.numel() * whole.element_size(), _ranks(args)))
        elif name == "allreduce_":
            self._add(name, 2 * ring(sum(t.numel() * t.element_size() for t in args[0]), _ranks(args)))
        elif name == "send":
            self.found.sent_pp += sum(t.numel() * t.element_size() for t in args[0])
            self.found.collectives[name] += 1
        return func(*args, **(kwargs or {}))

    def _functional(self, name: str, args: Sequence[Any]) -> None:
        if name == "all_gather_into_tensor":
            size = ring(args[0].nbytes * args[1], args[1])
        elif name == "reduce_scatter_tensor":
            size = ring(args[0].nbytes, args[2])
        elif name == "all_reduce":
            size = 2 * ring(args[0].nbytes, dist.distributed_c10d._get_group_size_by_name(args[2]))
        else:
            return
        self.found.sent_tp += size
        self.found.collectives[name] += 1

    def _add(self, name: str, size: float) -> None:
        self.found.sent += size
        self.found.collectives[name] += 1


def _ranks(arguments: Sequence[Any]) -> int:
    """How many take part in a collective: its group is the first of its arguments that is no tensor."""
    group = next(argument for argument in arguments if isinstance(argument, torch.ScriptObject))
    return dist.ProcessGroup.unbox(group).size()
