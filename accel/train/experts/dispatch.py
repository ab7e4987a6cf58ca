"""Runs the experts of a model on several ranks (expert parallelism), with or without a capacity.

Each rank of a group holds a part of the experts. Two all-to-alls bring each token to the rank of its expert, and bring
the expert's output back (Lepikhin et al. 2020, "GShard", section 3.2). The experts' own ``forward`` computes the tokens
that a rank receives.

Under tensor parallelism, each rank holds whole experts. With sequence parallelism, the tokens of a mixture are those of
a rank's part of the sequence, so the gradients of routers and experts are summed over the tensor-parallel ranks.
Otherwise all these ranks compute the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils.stateless import _reparametrize_module

from accel.errors import BadConfig

from .block import mixtures


def distribute(
    module: nn.Module, mesh: DeviceMesh | None, capacity: float, parts: DeviceMesh | None = None
) -> list[nn.Module]:
    """Changes the mixtures of ``module`` in place, so that each rank of ``mesh`` holds a part of the experts. Returns
    the modules of the experts. ``mesh`` is None if every rank holds all experts. The ranks of ``parts`` have different
    tokens of the same samples.

    In training, an expert takes at most ``capacity`` times the mean number of tokens, or all of its tokens if
    ``capacity`` is 0. Raises ``BadConfig`` if ``module`` has no mixture, or if the ranks can't share the experts
    evenly.
    """
    found = mixtures(module)
    if not found:
        raise BadConfig(
            "the model has no mixture of experts that accel knows; use accel.train.experts.block:MixtureOfExperts or a "
            "model of transformers, or leave out parallel.ep and experts.capacity"
        )
    made = []
    for name, part in found.items():
        experts = part.get_submodule("experts")
        if parts is not None:
            gate = part.get_submodule("gate")
            _place(gate, parts, Replicate())
            gate.forward = _Router(gate)
        if mesh is not None:
            _cut(experts, mesh, name)
        elif parts is not None:
            _place(experts, parts, Replicate())
        experts.forward = Dispatch(experts, mesh, capacity, parts=parts.size() if parts is not None else 1)
        made.append(experts)
    return made


def _cut(experts: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Gives this rank its part of the stacked weights."""
    for weight in experts.parameters(recurse=False):
        if weight.shape[0] % mesh.size():
            raise BadConfig(
                f"the {weight.shape[0]} experts of {name} can't be divided evenly over ep {mesh.size()}; use a divisor "
                f"of {weight.shape[0]}"
            )
    _place(experts, mesh, Shard(0))
    whole = getattr(experts, "num_experts", None)
    if isinstance(whole, int):  # the attribute of transformers' experts
        vars(experts)["num_experts"] = whole // mesh.size()


def _place(part: nn.Module, mesh: DeviceMesh, how: Placement) -> None:
    """Makes the parameters of ``part`` DTensors on ``mesh``. Every rank has the same weights already."""
    for key, weight in list(part.named_parameters(recurse=False)):
        placed = distribute_tensor(weight.data, mesh, [how], src_data_rank=None)
        setattr(part, key, nn.Parameter(placed, requires_grad=weight.requires_grad))


class _Router:
    """The ``forward`` of a router whose ranks have different tokens. Their gradients are summed."""

    def __init__(self, gate: nn.Module) -> None:
        self.gate, self.own = gate, gate.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        weights = {name: _summed(weight) for name, weight in self.gate.named_parameters(recurse=False)}
        with _reparametrize_module(self.gate, weights):
            return self.own(*inputs, **named)


def _summed(weight: Any) -> torch.Tensor:
    """Returns the values of a DTensor that every rank holds, whose gradient is the sum over the ranks."""
    found: torch.Tensor = weight.to_local(grad_placements=[Partial()])
    return found


class Dispatch:
    """The ``forward`` of ``experts`` on the ranks of ``mesh``. ``parts`` is the number of ranks that have different
    tokens of the same samples. ``dropped`` counts the copies of tokens in the last run that found no room."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh | None, capacity: float, *, parts: int = 1) -> None:
        self.experts, self.capacity, self.parts = experts, capacity, parts
        self.group = mesh.get_group() if mesh is not None else None
        self.ranks = mesh.size() if mesh is not None else 1
        self.own: Callable[..., torch.Tensor] = experts.forward
        self.count = experts.get_parameter("gate_up_proj").shape[0]
        self.dropped = 0

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the outputs of each token's experts."""
        copies = top_k_index.shape[1]
        expert = top_k_index.flatten()
        order = expert.argsort(stable=True)
        self.dropped = 0
        if self.capacity and self.experts.training:
            order = self._with_room(expert, order, math.ceil(self.capacity * len(expert) / self.count))
            self.dropped = len(expert) - len(order)
        token = order // copies
        counts = expert[order].bincount(minlength=self.count)
        found = self._exchanged(hidden_states[token], counts)
        weights = top_k_weights.flatten()[order].to(found.dtype)
        return torch.zeros_like(hidden_states).index_add(0, token, found * weights[:, None])

    def _with_room(self, expert: torch.Tensor, order: torch.Tensor, most: int) -> torch.Tensor:
        """Returns the copies in ``order`` that are among the first ``most`` of their expert. Earlier tokens of the
        batch come first (Lepikhin et al. 2020, algorithm 1)."""
        counts = expert.bincount(minlength=self.count)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(order), device=order.device) - starts[expert[order]]
        return order[place < most]

    def _exchanged(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns the experts' outputs for ``rows``, which are sorted by expert. ``counts`` is the number of rows of
        each expert."""
        if self.group is None:
            return self._computed(rows, torch.arange(self.count, device=rows.device).repeat_interleave(counts))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, theirs))
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        local = self.count // self.ranks
        expert = torch.arange(local, device=rows.device).repeat(self.ranks).repeat_interleave(theirs)
        found: torch.Tensor = all_to_all_single_autograd(self._computed(arrived, expert), sent, received, self.group)
        return found

    def _computed(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Returns the output of the experts ``expert``, counted on this rank, for each of ``rows``."""
        weights = {name: self._local(weight) for name, weight in self.experts.named_parameters(recurse=False)}
        index, ones = expert[:, None], torch.ones_like(rows[:, :1])
        with _reparametrize_module(self.experts, weights):
            found = self.own(rows, index, ones)
        # A rank without tokens takes part in the reduction of the gradients.
        return found + sum(weight[:, :1, :1].sum() for weight in weights.values() if weight.ndim == 3) * 0

    def _local(self, weight: Any) -> torch.Tensor:
        if not isinstance(weight, DTensor):
            return weight  # type: ignore[no-any-return]
        if self.group is None:
            return _summed(weight)
        # The gradients of the experts are averaged over other ranks than the loss was multiplied by: over those that
        # have different tokens of the same samples too, but not over the ranks of ``mesh``.
        return _Scaled.apply(weight.to_local(), self.parts / self.ranks)  # type: ignore[no-any-return]


class _Scaled(torch.autograd.Function):
    """Returns its input, and multiplies the gradient by ``factor``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None
