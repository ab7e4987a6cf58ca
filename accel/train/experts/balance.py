"""Adds the losses of the routers to the loss of a model with experts, and measures the experts' load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config.schema import ExpertsConfig
from .block import expert_count, mixtures
from .dispatch import Dispatch

FIGURES = ("balance_loss", "z_loss", "expert_load", "dropped")


class Balance:
    """The losses and figures of all routers of ``module``. ``ranks`` is the number of ranks that share a micro-batch.

    The tokens of all these ranks count together, so that the losses don't depend on how the samples are divided. The
    ranks of ``tp`` have the same samples. With ``parts``, each of them has different tokens of the samples.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ExpertsConfig,
        ranks: int,
        device: torch.device,
        *,
        tp: DeviceMesh | None = None,
        parts: bool = False,
    ) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        self.same = tp.size() if tp is not None else 1  # the ranks that count the same targets
        self.group = tp.get_group() if tp is not None and parts else None
        self.again = 1 if parts else self.same  # the ranks that count the same tokens
        self.parts = list(mixtures(module).values())
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seen = torch.zeros(len(FIGURES), dtype=torch.float64, device=device)
        self._watching = False
        self.sizes = [expert_count(part) for part in self.parts]
        for part in self.parts:
            part.get_submodule("gate").register_forward_hook(self._keep)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Opens the context in which the model runs."""
        self.routed, self._watching = [], True
        try:
            yield
        finally:
            self._watching = False  # the backward pass may run routers again

    def _keep(self, _: nn.Module, __: Any, output: Sequence[torch.Tensor]) -> None:
        if self._watching:
            self.routed.append((output[0].flatten(0, -2), output[2].flatten(0, -2)))

    def pass_by(self) -> None:
        """Takes part in the sums over all ranks on a rank that has no sample."""
        self._summed(torch.zeros(sum(self.sizes) + 3, dtype=torch.float64, device=self.device))

    def add(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Returns the loss ``total`` together with the losses of the routers, as a sum over ``count`` targets.

        The loss of balance is E sum_i f_i P_i (Fedus et al. 2021, "Switch Transformer", equation 4): E experts, the
        share f_i of the tokens' copies that goes to expert i, and its mean probability P_i. The loss is 1 if all
        experts have the same load. The z loss is the mean of the squared logsumexp of the logits (Zoph et al. 2022,
        "ST-MoE", equation 5). Both are means over the blocks.
        """
        routed = zip(self.routed, self.sizes, strict=True)
        copies = [indices.flatten().bincount(minlength=size) for (_, indices), size in routed]
        tokens = len(self.routed[0][0])
        dropped = sum(self._dropped(part) for part in self.parts)
        own = [tokens / self.again, float(count) / self.same, float(dropped)]
        numbers = torch.tensor(own, dtype=torch.float64, device=self.device)
        *each, rest = self._summed(torch.cat([*(c.double() for c in copies), numbers])).split([*self.sizes, 3])
        all_tokens, all_count, all_dropped = rest.tolist()
        balance = z = torch.zeros((), device=self.device)
        load = 0.0
        for (logits, _), size, counts in zip(self.routed, self.sizes, each, strict=True):
            share = (counts / counts.sum()).float()
            balance = balance + size * (share * logits.float().softmax(-1).sum(0)).sum()
            z = z + logits.float().logsumexp(-1).square().sum()
            load = max(load, float(share.max()) * size)
        # Sums over this rank's tokens become sums over its targets, because the run divides by the number of targets.
        scale = all_count / (all_tokens * len(self.parts))
        balance, z = balance * scale, z * scale
        copied = sum(float(counts.sum()) for counts in each)
        counted = float(count) / self.same
        losses = (float(balance.detach()) / self.again, float(z.detach()) / self.again)
        figures = (*losses, load * counted, all_dropped / copied * counted)
        self.seen += torch.tensor(figures, dtype=torch.float64, device=self.device)
        routers: torch.Tensor = self.config.balance * balance + self.config.z * z
        if isinstance(total, DTensor):  # of sharded logits
            total = total.full_tensor()
        return total + self._with_other_parts(routers)

    def _with_other_parts(self, routers: torch.Tensor) -> torch.Tensor:
        """Adds the losses of the tokens that the other tensor-parallel ranks have, which have their gradients there."""
        if self.group is None:
            return routers
        whole = routers.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return routers + (whole - routers.detach())

    def figures(self) -> dict[str, torch.Tensor]:
        """Returns the sums since the last call: both losses, the largest load of an expert in relation to the mean
        load, and the share of dropped copies."""
        found = dict(zip(FIGURES, self.seen, strict=True))
        self.seen = torch.zeros_like(self.seen)
        return found

    @staticmethod
    def _dropped(part: nn.Module) -> int:
        dispatch = part.get_submodule("experts").forward
        return dispatch.dropped if isinstance(dispatch, Dispatch) else 0

    def _summed(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            dist.all_reduce(numbers)
        return numbers
