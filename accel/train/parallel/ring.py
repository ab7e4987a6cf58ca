"""Implements context parallelism by ring attention. Each rank holds a part of every sequence, and the parts of keys and
values travel around the ring of ranks.

The method is from Liu et al. 2023, "Ring Attention with Blockwise Transformers". A rank attends from its own queries to
one part of keys and values at a time, and combines the results by their logsumexp (Rabe and Staats 2021,
"Self-attention Does Not Need O(n^2) Memory"). The number of heads may be any, unlike with Ulysses. In causal attention,
the ranks of early positions have less work than the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.errors import BadConfig

from ..attention import AroundAttention


class Ring(AroundAttention):
    """A context in which attention sees whole sequences.

    ``attention`` takes and returns float[batch, heads, this rank's positions, width].
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p:
            raise BadConfig(
                "ring attention takes no attention mask and no dropout; use is_causal=True and dropout 0, or "
                "parallel.cp = 1"
            )
        if query.ndim != 4 or query.shape[2] != key.shape[2]:
            raise BadConfig(
                f"attention gets tensors of the shapes {list(query.shape)} and {list(key.shape)}, but takes only the "
                "shape [batch, heads, positions, width] with as many keys as queries; use parallel.cp = 1"
            )
        if enable_gqa:
            copies = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        found: torch.Tensor = _RingAttention.apply(query, key, value, self.group, is_causal, factor)
        return found


class _RingAttention(torch.autograd.Function):
    """Computes attention over all ranks of a group. Keeps the inputs, the output and the logsumexp for the backward
    pass, which sends keys and values around the ring again, together with their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        q, pair = query.float(), torch.stack((key, value))
        out = torch.zeros_like(q)
        total = q.new_full(q.shape[:-1], -torch.inf)
        for step in range(ranks):
            arriving = _Passed(pair, group) if step < ranks - 1 else None
            source = (rank - step) % ranks
            if source <= rank or not causal:
                scores = _scores(q, pair[0], scale, diagonal=causal and source == rank)
                part = scores.logsumexp(-1)
                both = torch.logaddexp(total, part)
                seen = (scores - both[..., None]).exp() @ pair[1].float()
                out = out * (total - both).exp()[..., None] + seen
                total = both
            pair = arriving.wait() if arriving is not None else pair
        ctx.save_for_backward(query, key, value, out, total)
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, total = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        q, g = query.float(), gradient.float()
        delta = (g * out).sum(-1, keepdim=True)
        to_query = torch.zeros_like(q)
        pair = torch.stack((key, value))
        to_pair = torch.zeros_like(pair, dtype=torch.float32)
        for step in range(ranks):
            arriving = _Passed(pair, ctx.group) if step < ranks - 1 else None
            source = (rank - step) % ranks
            if source <= rank or not ctx.causal:
                k, v = pair.float()
                scores = _scores(q, k, ctx.scale, diagonal=ctx.causal and source == rank)
                weights = (scores - total[..., None]).exp()
                to_scores = weights * (g @ v.transpose(-2, -1) - delta) * ctx.scale
                to_query += to_scores @ k
                to_pair += torch.stack((to_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ g))
            # The gradients travel with their keys and values, and come home after the last step.
            to_pair = _Passed(to_pair, ctx.group).wait()
            pair = arriving.wait() if arriving is not None else pair
        to_key, to_value = to_pair.to(key.dtype)
        return to_query.to(query.dtype), to_key, to_value, None, None, None


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, *, diagonal: bool) -> torch.Tensor:
    """Returns float32[..., queries, keys]. On the diagonal, a query doesn't see the keys after it."""
    scores = query @ key.float().transpose(-2, -1) * scale
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


class _Passed:
    """A tensor on its way to the next rank of the ring. ``wait`` returns the tensor of the rank before."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        to, back = (dist.get_global_rank(group, (rank + turn) % ranks) for turn in (1, -1))
        self.sent, self.found = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sends = [dist.P2POp(dist.isend, self.sent, to, group), dist.P2POp(dist.irecv, self.found, back, group)]
        self.work = dist.batch_isend_irecv(sends)

    def wait(self) -> torch.Tensor:
        for one in self.work:
            one.wait()
        return self.found
