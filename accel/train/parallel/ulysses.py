"""Implements Ulysses context parallelism. Each rank holds a part of every sequence, and computes attention for a part
of the heads.

The method is from Jacobs et al. 2023, "DeepSpeed Ulysses". Two all-to-alls around each call of
``F.scaled_dot_product_attention`` let a rank see all positions for its share of the heads. If there are fewer
key-value heads than ranks, each key-value head is copied before the all-to-all, so that every rank gets the heads that
its queries need.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from accel.errors import BadConfig

from .shared_attention import Call, SharedAttention

_HEADS, _POSITIONS = 1, 2


class Ulysses(SharedAttention):
    """A context in which a rank computes attention over whole sequences for its share of the heads."""

    def check(self, query: torch.Tensor, key: torch.Tensor, call: Call) -> None:
        ranks, heads, kv_heads = self.mesh.size(), query.shape[_HEADS], key.shape[_HEADS]
        if heads % ranks:
            raise BadConfig(
                f"attention gets a tensor of shape {list(query.shape)}, but takes only the shape [batch, heads, "
                f"positions, width], in which heads is a multiple of cp {ranks}; use a cp that divides the number of "
                "heads of a rank, or parallel.cp_method = ring"
            )
        if kv_heads % ranks and (not call.grouped or heads % kv_heads):
            raise BadConfig(
                f"attention gets {heads} query heads and {kv_heads} key-value heads, which cp {ranks} can't share; "
                "pass enable_gqa=True to F.scaled_dot_product_attention, or use parallel.cp_method = ring"
            )

    def shared(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> torch.Tensor:
        ranks, mask = self.mesh.size(), call.mask
        # The copies of a head lie side by side, so a rank gets exactly the key-value heads of its query heads.
        copies = ranks // math.gcd(ranks, key.shape[_HEADS])
        if copies > 1:
            key, value = key.repeat_interleave(copies, _HEADS), value.repeat_interleave(copies, _HEADS)
        if mask is not None and mask.ndim > _HEADS + 1 and mask.shape[-3] > 1:  # a mask for each head
            mask = mask.chunk(ranks, -3)[self.mesh.get_local_rank()]
        query, key, value = (self._turn(tensor, _POSITIONS, _HEADS) for tensor in (query, key, value))
        found = F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
        )
        return self._turn(found, _HEADS, _POSITIONS)

    def _turn(self, tensor: torch.Tensor, had: int, gets: int) -> torch.Tensor:
        """Takes this rank's shard of a tensor that is sharded along dim ``had``. Returns this rank's shard of the same
        tensor along dim ``gets``."""
        shared = DTensor.from_local(tensor, self.mesh, (Shard(had),), run_check=False)
        return shared.redistribute(placements=(Shard(gets),)).to_local()
