"""Simulates a training step of any world size on one machine.

Fake tensors have shapes but no memory, and a fake process group answers every collective. The simulation runs the
training engine's own calls and sums the bytes that a rank would hold and send.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from accel.plan.measure import SavedBytes, count_flops
from accel.plan.spec import Layout
from accel.plan.traffic import ring

from .batch import call
from .config.schema import OptimizerConfig
from .loss import cross_entropy
from .optimizer.master import MasterOptimizer
from .parallel.pipeline import Stage, Turn, balance, chain, turns
from .parallel.quantized_comm import set_quantized
from .parallel.tensor import distribute, match
from .parallel.zero import micro_batch, shard
from .precision.modes import parameter_dtype
from .recompute import recompute
from .shards import local


@dataclass(kw_only=True)
class Simulated:
    """The peak of each kind of memory on rank 0 of the simulated world, and the bytes that rank 0 sent in the step.

    ``activations`` are the bytes that autograd saved in the forward pass. ``activations`` are counted only at ZeRO
    stage 0, because at stages 1 to 3 the saved bytes would include gathered parameters. ``sent`` counts the bytes sent
    to data-parallel ranks, ``sent_tp`` the bytes sent to tensor-parallel ranks, and ``sent_pp`` the bytes sent to
    pipeline stages. ``groups`` counts the same bytes by the name of the process group.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    sent: float = 0.0
    sent_tp: float = 0.0
    sent_pp: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)
    groups: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def simulate(
    factory: Callable[[], torch.nn.Module],
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    layout: Layout,
    styles: Mapping[str, str] | None = None,
) -> Simulated:
    """Runs one step of ``factory``'s model on fake ranks and returns the bytes that rank 0 holds and sends.

    ``inputs`` makes one micro-batch ``(inputs, targets)``. ``styles`` is the tensor-parallel plan. Pipeline parallel,
    context parallel and CPU offload are not simulated. ``activations`` leaves out the tensors that ``selective``
    recomputation keeps, because autograd doesn't see these tensors.

    Raises ``RuntimeError`` if a process group exists. A gradient is counted only while the step keeps it in memory. At
    ZeRO stage 0, DDP and DDP's traffic aren't simulated, because fake tensors can't enter DDP's native reducer.
    """
    zero, tp = layout.zero, layout.tp
    found = Simulated()
    with fake_world(layout.world):
        mesh, cut = _meshes(layout.world // tp, tp, layout.replicate, sharded=zero > 0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with _default_dtype(parameter_dtype(layout.precision)):  # fake parameters can't be cast later
                module = factory()
            recompute(module, layout.recompute)
            if cut is not None:
                distribute(module, cut, match(module, styles or {}), sequence=layout.sequence_parallel)
            with unset_fake_temporarily():  # FSDP2 stores the ranks of a device mesh in real tensors
                called = shard(module, mesh, zero, hpz=layout.hpz)
                set_quantized(called, layout.shards, gather=layout.qwz, reduce=layout.qgz)
            stepper = MasterOptimizer(module, OptimizerConfig.planned(layout.optimizer), layout.precision)
            with Sent(found):
                for index in range(layout.accumulation):
                    x, y = inputs()
                    last = index == layout.accumulation - 1
                    with micro_batch(called, zero, last=last), loss_parallel() if cut is not None else nullcontext():
                        with SavedBytes(map(local, module.parameters())) as saved:
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
    """Returns the peak of the bytes that autograd has saved, for each rank of a pipeline.

    Cuts ``factory``'s model into stages. The micro-batches of ``inputs`` run through the stages in the order of torch's
    schedule, in float32. If a backward pass has two halves, the second half frees the saved bytes. Raises
    ``RuntimeError`` if a process group exists.
    """
    with fake_world(pp):
        order = turns(pp, pipeline, accumulation)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = factory()
        recompute(module, again)
        x, y = inputs()
        names = chain(module)
        runs = balance(_costs(module, names, x), 1 + max(stage for rank in order for _, stage, _ in rank))
        saved = []
        for index, run in enumerate(runs):
            stage = Stage({names[i]: module.get_submodule(names[i]) for i in run}, "fp32")
            with SavedBytes(module.parameters()) as kept:
                out = stage(x)
                loss = cross_entropy(out, y) if index == len(runs) - 1 else None
            saved.append(kept.bytes)
            x = out.detach().requires_grad_()
            del out, loss
    return [_fullest(rank, saved) for rank in order]


@torch.no_grad()
def _costs(module: torch.nn.Module, names: Sequence[str], x: Any) -> list[float]:
    found = []
    for name in names:
        with count_flops() as counter:
            x = call(module.get_submodule(name), x)
        found.append(float(counter.get_total_flops()))
    return found


def _fullest(mine: Sequence[Turn], saved: Sequence[int]) -> int:
    held = most = 0
    for kind, stage, _ in mine:
        held += {"F": saved[stage], "B": -saved[stage], "W": -saved[stage]}.get(kind, 0)
        most = max(most, held)
    return most


def _meshes(ranks: int, tp: int, replicate: int, *, sharded: bool) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Returns the meshes that ``parallel.layout`` makes for ``ranks`` data-parallel and ``tp`` tensor-parallel
    ranks."""
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
def fake_world(world: int) -> Iterator[None]:
    """Opens a context with a process group of ``world`` ranks, in which this process is rank 0 and no other rank
    exists. Raises ``RuntimeError`` if a process group exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process group already exists; run the simulation before creating a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in map(local, (t for t in tensors if t is not None)))


class Sent(TorchDispatchMode):
    """Sums the bytes that ring algorithms would send for each collective, and the bytes that pipeline stages send.

    DDP and FSDP2 call the collectives of c10d. DTensor calls functional collectives. In an all-to-all, a rank sends as
    many bytes as in an all-gather over a ring.
    """

    def __init__(self, found: Simulated) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls this method again with plain tensors
        kind, _, name = str(func).removesuffix(".default").split("::")[-1].rpartition(".")
        if kind == "_c10d_functional":
            self._functional(name, args)
        elif name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            self._add(name, ring(whole.numel() * whole.element_size(), _group(args).size()), args)
        elif name == "allreduce_":
            self._add(name, 2 * ring(sum(t.numel() * t.element_size() for t in args[0]), _group(args).size()), args)
        elif name == "send":
            size = sum(t.numel() * t.element_size() for t in args[0])
            self.found.sent_pp += size
            self.found.groups[_group(args).group_name] += size
            self.found.collectives[name] += 1
        return func(*args, **(kwargs or {}))

    def _functional(self, name: str, args: Sequence[Any]) -> None:
        if name == "all_gather_into_tensor":
            size = ring(args[0].nbytes * args[1], args[1])
        elif name == "reduce_scatter_tensor":
            size = ring(args[0].nbytes, args[2])
        elif name == "all_reduce":
            size = 2 * ring(args[0].nbytes, dist.distributed_c10d._get_group_size_by_name(args[2]))
        elif name == "all_to_all_single":
            size = ring(args[0].nbytes, len(args[2]))
        else:
            return
        self.found.sent_tp += size
        self.found.groups[args[-1]] += size
        self.found.collectives[name] += 1

    def _add(self, name: str, size: float, args: Sequence[Any]) -> None:
        self.found.sent += size
        self.found.groups[_group(args).group_name] += size
        self.found.collectives[name] += 1


def _group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """Returns the process group of a collective, which is the first ``ScriptObject`` among the arguments."""
    group = next(argument for argument in arguments if isinstance(argument, torch.ScriptObject))
    return dist.ProcessGroup.unbox(group)
