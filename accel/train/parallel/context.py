"""Ulysses context parallel: ranks share the sequences of a batch, and change to sharing the heads around attention.

Jacobs et al. 2023, "DeepSpeed Ulysses". The model's code stays as it is: one module (``parallel.cp_split``: what embeds
the tokens and knows where they stand) works on whole sequences, and its output is cut; every call of
``F.scaled_dot_product_attention`` after it gets all positions of its share of the heads, by two all-to-alls. Everything
else has to work on each position alone, which is tried on a sample before training. To ZeRO, a rank that has a part of
some sequences is a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from accel.errors import BadConfig, BadData, one_line
from accel.train.attention import AroundAttention
from accel.train.config import TrainConfig
from accel.train.inputs import call, to_device
from accel.train.layout import Ranks
from accel.train.precision import parameter_dtype

_HEADS, _POSITIONS = 1, 2
_FIX = (
    "name in parallel.cp_split what embeds tokens and positions, and let only F.scaled_dot_product_attention look at "
    "other positions"
)


class Ulysses(AroundAttention):
    """Inside, attention sees whole sequences: float[batch, heads, own positions, width] in and out."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise BadConfig("context parallel can't cut an attention mask; use is_causal=True or parallel.cp = 1")
        for tensor in (query, key, value):
            if tensor.ndim != 4 or tensor.shape[_HEADS] % self.mesh.size():
                raise BadConfig(
                    f"attention over {list(tensor.shape)} has no [batch, heads, positions, width] with heads that "
                    f"divide by cp {self.mesh.size()}; use a divisor of the heads"
                )
        whole = [self._turn(tensor, _POSITIONS, _HEADS) for tensor in (query, key, value)]
        found = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], None, *rest, **named)
        return self._turn(found, _HEADS, _POSITIONS)

    def _turn(self, tensor: torch.Tensor, had: int, gets: int) -> torch.Tensor:
        """``tensor``, of which this rank has a part along ``had``, as its part along ``gets``."""
        shared = DTensor.from_local(tensor, self.mesh, (Shard(had),), run_check=False)
        return shared.redistribute(placements=(Shard(gets),)).to_local()


def share(module: nn.Module, config: TrainConfig, ranks: Ranks, data: Sequence[Any]) -> None:
    """Let ``module``, which nothing has cut yet, work on this rank's part of the sequence, in place.

    Raises ``BadConfig`` where ``parallel.cp_split`` names nothing, or the parts together aren't what the whole model
    gives: positions are counted after the cut, or something besides attention looks at other positions.
    """
    mesh, name = ranks.cp, config.parallel.cp_split
    assert mesh is not None
    try:
        embedding = module.get_submodule(name)
    except AttributeError:
        raise BadConfig(f"parallel.cp_split is {name!r}, which the model hasn't; name what embeds its tokens") from None
    sample = torch.utils.data.default_collate([data[0]])[0]
    inputs = to_device(sample, ranks.device, parameter_dtype(config.precision.resolved))
    module.eval()
    with torch.no_grad():
        expected = part(call(module, inputs), mesh)
        # A copy: a view would keep the whole output until the backward pass.
        embedding.register_forward_hook(lambda _, __, output: part(output, mesh, output.ndim - 2).clone())
        Ulysses(mesh).wrap(module)
        try:
            found = call(module, inputs)
        except BadConfig:
            raise
        except Exception as error:
            reason = one_line(error, 200)
            raise BadConfig(f"the model can't be run with its sequence cut after {name} ({reason}); {_FIX}") from error
    module.train()
    right = found.shape == expected.shape and torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-3)
    wrong = torch.tensor(float(not right), device=ranks.device)
    dist.all_reduce(wrong, group=mesh.get_group())  # the first part of a sequence may be right where another isn't
    if wrong:
        raise BadConfig(f"with its sequence cut after {name}, the model gives something else; {_FIX}")


def part(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """This rank's part of ``tensor`` along ``dim``."""
    if tensor.shape[dim] % mesh.size():
        raise BadData(f"a sequence of {tensor.shape[dim]} doesn't divide by cp {mesh.size()}; pad it")
    return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
