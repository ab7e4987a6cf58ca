"""A training step of any world size on one machine: fake tensors have shapes and no memory, a fake process group
answers every collective. What a rank would hold and send is summed from what the engine really does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel.plan.measure import SavedBytes
from accel.plan.traffic import ring
from accel.train.precision import MasterOptimizer, parameter_dtype
from accel.train.recompute import recompute
from accel.train.zero import micro_batch, shard


@dataclass(kw_only=True)
class Simulated:
    """What rank 0 of the simulated world held in a step, each at its fullest, and sent in it, in bytes.

    ``activations``: what autograd saved in the forward pass; only counted at stage 0, where no gathered parameter is
    in it.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    sent: float = 0.0
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
    again: str = "none",
) -> Simulated:
    """One step of ``factory``'s model on ``world`` data-parallel ranks, in ``replicate`` replicas, seen from rank 0.

    ``again``: what is recomputed (``full`` or ``none``; what ``selective`` keeps, autograd doesn't see).
    ``inputs`` makes one micro-batch ``(inputs, targets)``. No process group may exist. Gradients are counted where
    they are kept until the step. Stage 0 is not wrapped: DDP's reducer is native code that fake tensors can't enter,
    so its traffic is not simulated.
    """
    from accel.train.config import OptimizerConfig

    found = Simulated()
    with _fake_world(world):
        shape = (replicate, world // replicate) if replicate > 1 else (world,)
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if world > 1 and zero else None
        with FakeTensorMode(allow_non_fake_inputs=True):
            with _default_dtype(parameter_dtype(precision)):  # fake parameters can't be cast once they are made
                module = factory()
            recompute(module, again)
            called = shard(module, mesh, zero)
            stepper = MasterOptimizer(module, OptimizerConfig(name=optimizer), precision)
            with Sent(found):
                for index in range(accumulation):
                    x, y = inputs()
                    last = index == accumulation - 1
                    with micro_batch(called, zero, last=last):
                        with SavedBytes(_locals(module.parameters())) as saved:
                            loss = torch.nn.functional.cross_entropy(called(x).flatten(0, -2).float(), y.flatten())
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
    """Sums what a ring would send for every collective that is called inside."""

    def __init__(self, found: Simulated) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default").split("::")[-1].removeprefix("c10d.")
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            whole = args[0] if name == "_allgather_base_" else args[1]
            self._add(name, ring(whole.numel() * whole.element_size(), _ranks(args)))
        elif name == "allreduce_":
            self._add(name, 2 * ring(sum(t.numel() * t.element_size() for t in args[0]), _ranks(args)))
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, size: float) -> None:
        self.found.sent += size
        self.found.collectives[name] += 1


def _ranks(arguments: Sequence[Any]) -> int:
    """How many take part in a collective: its group is the first of its arguments that is no tensor."""
    group = next(argument for argument in arguments if isinstance(argument, torch.ScriptObject))
    return dist.ProcessGroup.unbox(group).size()
